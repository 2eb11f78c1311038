{{/*
The sidecar and the container that brings the worker extension, both init containers. The sidecar is a native one: it
starts before the engine, is restarted on its own, and ends after the engine.
*/}}
{{- define "highwater.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "highwater.sidecarMounts" -}}
{{- if .Values.config.recorder_dir }}
- name: highwater-recorder
  mountPath: {{ .Values.config.recorder_dir }}
{{- end }}
{{- if .Values.config.engine_log }}
- name: highwater-engine-log
  mountPath: {{ dir .Values.config.engine_log }}
  readOnly: true
{{- end }}
{{- if .Values.config.state_file }}
- name: highwater-state
  mountPath: {{ dir .Values.config.state_file }}
{{- end }}
{{- if eq .Values.engine.listen.kind "socket" }}
- name: highwater-engine-socket
  mountPath: /run/highwater/engine
{{- end }}
{{- if .Values.sidecar.tls.existingSecret }}
- name: highwater-tls
  mountPath: /etc/highwater/tls
  readOnly: true
{{- end }}
{{- with include "highwater.adminTokenFolder" . }}
- name: highwater-admin
  mountPath: {{ . }}
  {{- if include "highwater.mountsAdminToken" $ }}
  readOnly: true
  {{- end }}
{{- end }}
- name: highwater-tmp
  mountPath: /tmp
{{- with .Values.sidecar.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "highwater.sidecar" -}}
name: highwater
image: {{ include "highwater.sidecarImage" . }}
imagePullPolicy: {{ .Values.sidecar.image.pullPolicy }}
command: [highwater]
args: [serve]
restartPolicy: Always
env:
  {{- include "highwater.sidecarEnv" . | trim | nindent 2 }}
ports:
  - name: highwater
    containerPort: {{ int .Values.config.port }}
    protocol: TCP
  - name: control
    containerPort: {{ int .Values.config.control_port }}
    protocol: TCP
{{- /*
No startup probe: the containers after this one, and that is the engine, would wait for it. A sidecar that cannot start
must not keep a model from loading. And not whether the engine is there: it is no reason to restart the sidecar.
*/}}
livenessProbe:
  {{- $livez := dict "path" "/livez" "port" (int .Values.config.control_port) "scheme" (include "highwater.scheme" .) }}
  {{- $liveness := dict "httpGet" $livez "initialDelaySeconds" (int .Values.sidecar.probes.startupSeconds) "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 3 }}
  {{- mergeOverwrite $liveness .Values.sidecar.probes.overrides.liveness | toYaml | nindent 2 }}
readinessProbe:
  {{- mergeOverwrite (include "highwater.readiness" . | fromYaml) .Values.sidecar.probes.overrides.readiness | toYaml | nindent 2 }}
resources:
  {{- toYaml .Values.sidecar.resources | nindent 2 }}
securityContext:
  {{- mergeOverwrite (include "highwater.restricted" . | fromYaml) .Values.sidecar.securityContext | toYaml | nindent 2 }}
volumeMounts:
  {{- include "highwater.sidecarMounts" . | trim | nindent 2 }}
{{- end -}}

{{- /* "image" or "copy". */ -}}
{{- define "highwater.extensionFrom" -}}
{{- if ne .Values.extension.from "auto" -}}
{{- .Values.extension.from -}}
{{- else if and .Values.extension.image.repository (semverCompare ">=1.35.0-0" .Capabilities.KubeVersion.Version) -}}
image
{{- else -}}
copy
{{- end -}}
{{- end -}}

{{- /* Nothing where an image volume brings it. The sidecar's image holds the package, so that both are of one version. */ -}}
{{- define "highwater.extensionCopy" -}}
{{- if eq (include "highwater.extensionFrom" .) "copy" -}}
name: highwater-extension
image: {{ include "highwater.sidecarImage" . }}
imagePullPolicy: {{ .Values.sidecar.image.pullPolicy }}
command: [highwater, extension, --copy-to, /opt/highwater]
resources:
  {{- toYaml .Values.extension.resources | nindent 2 }}
securityContext:
  {{- mergeOverwrite (include "highwater.restricted" . | fromYaml) .Values.sidecar.securityContext | toYaml | nindent 2 }}
volumeMounts:
  - name: highwater-extension
    mountPath: /opt/highwater
{{- end -}}
{{- end -}}

{{/*
Volumes. Those called highwater-... are ours and also part of the patch for a workload that is there already; the
others belong to the engine that this chart runs.
*/}}
{{- define "highwater.volumes" -}}
- name: highwater-extension
  {{- if eq (include "highwater.extensionFrom" .) "image" }}
  image:
    reference: {{ include "highwater.image" (dict "root" . "image" .Values.extension.image "tag" .Chart.AppVersion) }}
    pullPolicy: {{ .Values.extension.image.pullPolicy }}
  {{- else }}
  emptyDir: {sizeLimit: 16Mi}
  {{- end }}
- name: highwater-tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if include "highwater.mountsAdminToken" . }}
- name: highwater-admin
  secret:
    {{- $source := include "highwater.adminTokenSource" . | fromYaml }}
    secretName: {{ $source.name }}
    items:
      - {key: {{ $source.key }}, path: token}
    # Its owner is root, its group the pod's fsGroup.
    defaultMode: 0440
    # Without it the engine starts, and the sidecar serves and refuses control calls, until the Secret is there.
    optional: true
{{- else if include "highwater.makesAdminToken" . }}
- name: highwater-admin
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- if .Values.config.recorder_dir }}
- name: highwater-recorder
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sidecar.recorderSize }}}
{{- end }}
{{- if .Values.config.engine_log }}
- name: highwater-engine-log
  emptyDir: {sizeLimit: {{ .Values.engine.logFile.volumeSize }}}
- name: highwater-logging
  configMap:
    name: {{ include "highwater.fullname" . }}-logging
{{- end }}
{{- if and .Values.config.state_file (not (include "highwater.stateIsClaimed" .)) }}
- name: highwater-state
  {{- if .Values.sidecar.state.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.sidecar.state.existingClaim }}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.sidecar.state.size }}}
  {{- end }}
{{- end }}
{{- if eq .Values.engine.listen.kind "socket" }}
- name: highwater-engine-socket
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- if .Values.sidecar.tls.existingSecret }}
- name: highwater-tls
  secret:
    secretName: {{ .Values.sidecar.tls.existingSecret }}
{{- end }}
{{- end -}}

{{- /* A StatefulSet makes a claim for each pod. */ -}}
{{- define "highwater.stateIsClaimed" -}}
{{- if and (eq .Values.workload.kind "StatefulSet") .Values.sidecar.state.persistent .Values.config.state_file }}true{{ end -}}
{{- end -}}

{{- define "highwater.engineVolumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.sharedMemory }}}
{{- $models := .Values.models }}
{{- if eq $models.kind "emptyDir" }}
- name: models
  emptyDir: {{ ternary (dict "sizeLimit" $models.size) dict (ne $models.size "") | toJson }}
{{- else if eq $models.kind "hostPath" }}
- name: models
  hostPath:
    path: {{ $models.hostPath }}
    type: Directory
{{- else if eq $models.kind "existingClaim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ $models.existingClaim }}
    readOnly: {{ $models.readOnly }}
{{- else if and (eq $models.kind "claim") (ne .Values.workload.kind "StatefulSet") }}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "highwater.fullname" . }}-models
{{- end }}
{{- with .Values.pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "highwater.claimSpec" -}}
accessModes: {{ toJson .accessModes }}
{{- if .storageClass }}
storageClassName: {{ .storageClass | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end -}}

{{/*
The sidecar's settings as environment variables: `policy.mode` of `config` is HIGHWATER_POLICY__MODE, as everywhere else
(docs/settings.md). Helm reads every number as a float: whole ones are written as whole ones.
*/}}
{{- define "highwater.process" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{- int64 . -}}{{- else -}}{{- . -}}{{- end -}}
{{- else if kindIs "slice" . -}}
{{- toJson . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{- /* Takes (dict "table" config "prefix" "HIGHWATER_"). A key without a value is left to its default. */ -}}
{{- define "highwater.variables" -}}
{{- $prefix := .prefix -}}
{{- range $key, $value := .table -}}
{{- $name := printf "%s%s" $prefix (upper $key) -}}
{{- if kindIs "map" $value -}}
{{- include "highwater.variables" (dict "table" $value "prefix" (printf "%s__" $name)) -}}
{{- else if not (kindIs "invalid" $value) }}
- name: {{ $name }}
  value: {{ include "highwater.process" $value | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Where the control plane of a pod's sidecar is. Takes (dict "root" . "host" "where the pod is"). */ -}}
{{- define "highwater.controlUrl" -}}
{{- printf "%s://%s:%d" (include "highwater.scheme" .root | lower) .host (int .root.Values.config.control_port) -}}
{{- end -}}

{{- define "highwater.engineUrl" -}}
{{- if eq .Values.engine.listen.kind "socket" -}}
unix:/run/highwater/engine/engine.sock
{{- else -}}
http://127.0.0.1:{{ int .Values.engine.listen.port }}
{{- end -}}
{{- end -}}

{{- define "highwater.sidecarEnv" -}}
- name: HIGHWATER_ENGINE_URL
  value: {{ include "highwater.engineUrl" . }}
{{- if and .Values.engine.workerExtension (ne .Values.engine.workerExtension "highwater_worker.MemoryExtension") (not (hasKey .Values.config "engine_has_extension")) }}
- name: HIGHWATER_ENGINE_HAS_EXTENSION
  value: "true"
{{- end }}
{{- include "highwater.variables" (dict "table" .Values.config "prefix" "HIGHWATER_") }}
{{- if .Values.sidecar.tls.existingSecret }}
- name: HIGHWATER_TLS__CERT_FILE
  value: /etc/highwater/tls/tls.crt
- name: HIGHWATER_TLS__KEY_FILE
  value: /etc/highwater/tls/tls.key
{{- end }}
{{- with include "highwater.adminTokenFolder" . }}
- name: HIGHWATER_ADMIN_TOKEN_FILE
  value: {{ . }}/token
{{- else }}
{{- if .Values.adminToken.enabled }}
- name: HIGHWATER_ADMIN_TOKEN
  valueFrom:
    secretKeyRef:
      {{- include "highwater.adminTokenSource" . | nindent 6 }}
{{- end }}
{{- end }}
{{- with .Values.sidecar.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

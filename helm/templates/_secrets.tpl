{{/*
Secrets are named and never written into arguments or values: either one that is there, or one that is made at the first
installation and read again at each upgrade. Each takes the root context.
*/}}
{{- define "highwater.adminTokenSource" -}}
{{- $existing := .Values.adminToken.existingSecret -}}
name: {{ $existing.name | default (include "highwater.fullname" .) }}
key: {{ ternary $existing.key "admin-token" (ne $existing.name "") }}
{{- end -}}

{{- /* Whether each pod makes a token of its own: where no Secret and no file of somebody else's holds one. */ -}}
{{- define "highwater.makesAdminToken" -}}
{{- if not (or .Values.adminToken.enabled .Values.config.admin_token_file) -}}true{{- end -}}
{{- end -}}

{{- /*
Whether the Secret is mounted as a file, which the sidecar reads again when it changes. Its group is the pod's fsGroup,
which a workload of somebody else's may lack: there the token is a variable.
*/ -}}
{{- define "highwater.mountsAdminToken" -}}
{{- if and .Values.adminToken.enabled (ne .Values.workload.kind "None") -}}true{{- end -}}
{{- end -}}

{{- define "highwater.adminTokenFolder" -}}
{{- if or (include "highwater.mountsAdminToken" .) (include "highwater.makesAdminToken" .) -}}/run/highwater/admin{{- end -}}
{{- end -}}

{{- define "highwater.apiKeySource" -}}
{{- $existing := .Values.engine.apiKey.existingSecret -}}
name: {{ $existing.name | default (include "highwater.fullname" .) }}
key: {{ ternary $existing.key "api-key" (ne $existing.name "") }}
{{- end -}}

{{- /* The keys of our own Secret: what is enabled and not somebody else's. */ -}}
{{- define "highwater.generatedKeys" -}}
{{- if and .Values.adminToken.enabled (not .Values.adminToken.existingSecret.name) }}
- admin-token
{{- end }}
{{- if and .Values.engine.apiKey.enabled (not .Values.engine.apiKey.existingSecret.name) }}
- api-key
{{- end }}
{{- end -}}

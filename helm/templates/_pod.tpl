{{/*
The pods. Takes (dict "root" . "component" "engine" | "worker"): a worker is a further node of an engine and has no
sidecar.
*/}}
{{- define "highwater.initContainers" -}}
{{- with include "highwater.extensionCopy" . }}
- {{ . | nindent 2 | trim }}
{{- end }}
{{- with .Values.pod.extraInitContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "highwater.podTemplate" -}}
{{- $root := .root -}}
{{- $isServing := eq .component "engine" -}}
{{- with $root -}}
metadata:
  labels:
    {{- /* No versions among them: a new chart that changes nothing in the pod restarts no engine. */}}
    {{- merge (dict "app.kubernetes.io/component" $.component) (include "highwater.selectorLabels" . | fromYaml) .Values.commonLabels .Values.pod.labels | toYaml | nindent 4 }}
  annotations:
    {{- $annotations := dict "kubectl.kubernetes.io/default-container" "vllm" }}
    {{- if .Values.config.engine_log }}
    {{- $_ := set $annotations "checksum/logging" (include "highwater.loggingJson" . | sha256sum) }}
    {{- end }}
    {{- mergeOverwrite $annotations .Values.pod.annotations | toYaml | nindent 4 }}
spec:
  # What Kubernetes would write for a Service called highwater or vllm (HIGHWATER_PORT=tcp://...) breaks both.
  enableServiceLinks: false
  automountServiceAccountToken: false
  serviceAccountName: {{ include "highwater.serviceAccountName" . }}
  # The engine first lets its requests end, then ends; the sidecar after it.
  terminationGracePeriodSeconds: {{ include "highwater.graceSeconds" . }}
  {{- range $key := list "hostNetwork" "hostIPC" "shareProcessNamespace" }}
  {{- if index $.root.Values.pod $key }}
  {{ $key }}: true
  {{- end }}
  {{- end }}
  {{- with .Values.pod.dnsPolicy | default (ternary "ClusterFirstWithHostNet" "" .Values.pod.hostNetwork) }}
  dnsPolicy: {{ . }}
  {{- end }}
  securityContext:
    {{- mergeOverwrite (include "highwater.restrictedPod" . | fromYaml) .Values.pod.securityContext | toYaml | nindent 4 }}
  {{- range $key, $value := dict
      "imagePullSecrets" .Values.imagePullSecrets
      "runtimeClassName" .Values.pod.runtimeClassName
      "priorityClassName" .Values.pod.priorityClassName
      "schedulerName" .Values.pod.schedulerName
      "nodeSelector" .Values.pod.nodeSelector
      "tolerations" .Values.pod.tolerations
      "affinity" .Values.pod.affinity
      "topologySpreadConstraints" .Values.pod.topologySpreadConstraints
      "resourceClaims" .Values.pod.resourceClaims
      "dnsConfig" .Values.pod.dnsConfig
      "hostAliases" .Values.pod.hostAliases
  }}
  {{- with $value }}
  {{ $key }}: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- $init := include "highwater.initContainers" . | trim }}
  {{- if or $init $isServing }}
  initContainers:
    {{- with $init }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if $isServing }}
    - {{ include "highwater.sidecar" . | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - {{ include (ternary "highwater.engine" "highwater.follower" $isServing) . | nindent 6 | trim }}
    {{- with .Values.pod.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- $volumes := concat (include "highwater.volumes" . | fromYamlArray) (include "highwater.engineVolumes" . | fromYamlArray) }}
    {{- range $volume := $volumes }}
    {{- /* A claim for the state is the sidecar's: a further node could not even mount it. */}}
    {{- if or $isServing (not (has $volume.name (list "highwater-state" "highwater-tmp" "highwater-tls" "highwater-admin"))) }}
    - {{ toYaml $volume | nindent 6 | trim }}
    {{- end }}
    {{- end }}
{{- end -}}
{{- end -}}

{{- /* Both containers run as one user, so that each may read what the other writes into their shared folders. */ -}}
{{- define "highwater.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* First the requests, then the engine itself, then what the sidecar still has to say. */ -}}
{{- define "highwater.graceSeconds" -}}
{{- $drain := .Values.engine.drain -}}
{{- $sidecar := .Values.config.shutdown_seconds | default 30.0 -}}
{{- add (ceil $drain.firstSeconds | int) (ceil $drain.seconds | int) (ceil $sidecar | int) 20 -}}
{{- end -}}

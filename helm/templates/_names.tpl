{{/*
Names, labels and images. Every template of the folder takes the chart's root context: `.` here, and
`.Subcharts.highwater` in a chart that has this one as a dependency.
*/}}
{{- define "highwater.name" -}}
{{- include "highwater.dnsLabel" (default .Chart.Name .Values.nameOverride) -}}
{{- end -}}

{{- define "highwater.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- include "highwater.dnsLabel" .Values.fullnameOverride -}}
{{- else if contains (include "highwater.name" .) (include "highwater.dnsLabel" .Release.Name) -}}
{{- include "highwater.dnsLabel" .Release.Name -}}
{{- else -}}
{{- include "highwater.dnsLabel" (printf "%s-%s" .Release.Name (include "highwater.name" .)) -}}
{{- end -}}
{{- end -}}

{{- /*
A text as a name that a Service may have (DNS-1035): letters, digits and dashes, a letter first. Releases are often named
after a model (qwen2.5-7b, 7b), which Helm allows and the API server does not. 46 characters leave 17 of 63 for the
longest ending, -dashboard-server.
*/ -}}
{{- define "highwater.dnsLabel" -}}
{{- $name := regexReplaceAll "[^a-z0-9-]" . "-" | trimAll "-" -}}
{{- if regexMatch "^[0-9]" $name -}}
{{- $name = printf "hw-%s" $name -}}
{{- end -}}
{{- $name | trunc 46 | trimAll "-" -}}
{{- end -}}

{{- /* What pods are found by: never changed, a Deployment's selector is immutable. */ -}}
{{- define "highwater.selectorLabels" -}}
app.kubernetes.io/name: {{ include "highwater.name" . | quote }}
{{- /* Quoted: a release may be called 7. */}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* The pods that have a sidecar: all of them, or of a LeaderWorkerSet the leaders. */ -}}
{{- define "highwater.servingLabels" -}}
{{- if eq .Values.workload.kind "None" -}}
{{- toYaml .Values.attach.podLabels -}}
{{- else -}}
{{ include "highwater.selectorLabels" . }}
app.kubernetes.io/component: engine
{{- end -}}
{{- end -}}

{{- /* Nobody's label replaces one that something is found by. */ -}}
{{- define "highwater.labels" -}}
{{- $ours := dict
    "app.kubernetes.io/version" .Chart.AppVersion
    "app.kubernetes.io/managed-by" .Release.Service
    "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_")
-}}
{{- merge (include "highwater.selectorLabels" . | fromYaml) $ours .Values.commonLabels | toYaml -}}
{{- end -}}

{{- /* metadata of everything but pods. Takes (dict "root" . "suffix" "-x" "annotations" {} "labels" {}). */ -}}
{{- define "highwater.metadata" -}}
{{- $root := .root -}}
name: {{ printf "%s%s" (include "highwater.fullname" $root) (.suffix | default "") | quote }}
namespace: {{ .namespace | default $root.Release.Namespace | quote }}
labels:
  {{- merge (deepCopy (.labels | default dict)) (include "highwater.labels" $root | fromYaml) | toYaml | nindent 2 }}
{{- with merge (deepCopy (.annotations | default dict)) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Takes (dict "root" . "image" {repository, tag, digest} "tag" "fallback"). A digest wins over a tag. */ -}}
{{- define "highwater.image" -}}
{{- $repository := .image.repository -}}
{{- with (.root.Values.global | default dict).imageRegistry -}}
{{- /* What stands before the first slash is a registry if it could not be a folder of Docker Hub. */ -}}
{{- $first := splitList "/" $repository | first -}}
{{- if and (contains "/" $repository) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) -}}
{{- $repository = trimPrefix (printf "%s/" $first) $repository -}}
{{- end -}}
{{- $repository = printf "%s/%s" . $repository -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (.image.tag | default .tag) -}}
{{- end -}}
{{- end -}}

{{- define "highwater.sidecarImage" -}}
{{- include "highwater.image" (dict "root" . "image" .Values.sidecar.image "tag" .Chart.AppVersion) -}}
{{- end -}}

{{- /* Where an alert's runbook is, absolute. Takes (dict "root" . "url" <its path in the repository>). */ -}}
{{- define "highwater.runbookUrl" -}}
{{- $root := .root -}}
{{- $name := trimSuffix ".md" (base .url) -}}
{{- with $root.Values.docs -}}
{{- if .baseUrl -}}
{{- printf "%s/runbooks/%s.%s" (trimSuffix "/" .baseUrl) $name .suffix -}}
{{- else -}}
{{- $host := printf "%s-control.%s" (include "highwater.fullname" $root) $root.Release.Namespace -}}
{{- printf "%s/docs/runbooks/%s.html" (include "highwater.controlUrl" (dict "root" $root "host" $host)) $name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "highwater.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "highwater.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* apiVersion, kind and name of what runs the pods, for whatever scales it. */ -}}
{{- define "highwater.scaleTarget" -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq .Values.workload.kind "LeaderWorkerSet") }}
kind: {{ .Values.workload.kind }}
name: {{ include "highwater.fullname" . }}
{{- end -}}

{{- define "highwater.isScaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled }}true{{ end -}}
{{- end -}}

{{- define "highwater.scheme" -}}
{{- ternary "HTTPS" "HTTP" (ne .Values.sidecar.tls.existingSecret "") -}}
{{- end -}}

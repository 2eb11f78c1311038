{{/*
Names, labels and images. Every template of the folder takes the chart's root context: `.` here, and
`.Subcharts.highwater` in a chart that has this one as a dependency.
*/}}
{{- define "highwater.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "highwater.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "highwater.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "highwater.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* What pods are found by: never changed, a Deployment's selector is immutable. */ -}}
{{- define "highwater.selectorLabels" -}}
app.kubernetes.io/name: {{ include "highwater.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{- define "highwater.labels" -}}
{{ include "highwater.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* metadata of everything but pods. Takes (dict "root" . "suffix" "-x" "annotations" {} "labels" {}). */ -}}
{{- define "highwater.metadata" -}}
{{- $root := .root -}}
name: {{ include "highwater.fullname" $root }}{{ .suffix }}
namespace: {{ .namespace | default $root.Release.Namespace }}
labels:
  {{- merge (deepCopy (.labels | default dict)) (include "highwater.labels" $root | fromYaml) | toYaml | nindent 2 }}
{{- with merge (deepCopy (.annotations | default dict)) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Takes (dict "image" {repository, tag, digest} "what" "sidecar.image" "tag" "fallback"). A digest wins. */ -}}
{{- define "highwater.image" -}}
{{- $repository := required (printf "%s.repository: say where the image is; docker/ in the repository builds it" .what) .image.repository -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (required (printf "%s.tag: give a tag or a digest" .what) (.image.tag | default .tag)) -}}
{{- end -}}
{{- end -}}

{{- define "highwater.sidecarImage" -}}
{{- include "highwater.image" (dict "image" .Values.sidecar.image "what" "sidecar.image" "tag" .Chart.AppVersion) -}}
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

{{/*
The engine's container. What keeps it private (loopback or a socket) and what loads the extension comes last among the
arguments: vLLM takes the last of two.
*/}}
{{- define "highwater.guardArgs" -}}
{{- if eq .Values.engine.listen.kind "socket" }}
- --uds=/run/highwater/engine/engine.sock
{{- else }}
- --host=127.0.0.1
- --port={{ int .Values.engine.listen.port }}
{{- end }}
{{- with include "highwater.workerExtension" . }}
- --worker-extension-cls={{ . }}
{{- end }}
{{- end -}}

{{- /*
The class that is named to vLLM, empty where its plugin alone loads the operations. The plugin suffices where every
worker's recorder tells the sidecar of them: it needs the folder, and cannot see that of another node.
*/ -}}
{{- define "highwater.workerExtension" -}}
{{- if .Values.engine.workerExtension -}}
{{ .Values.engine.workerExtension }}
{{- else if or (not .Values.config.recorder_dir) (eq .Values.workload.kind "LeaderWorkerSet") -}}
highwater_worker.MemoryExtension
{{- end -}}
{{- end -}}

{{- define "highwater.modelArgs" -}}
{{- $model := .Values.engine.model -}}
{{- if eq (last .Values.engine.command) "serve" }}
- {{ $model | quote }}
{{- else }}
- {{ printf "--model=%s" $model | quote }}
{{- end }}
{{- with .Values.engine.servedModelName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- $tensor := .Values.engine.tensorParallelSize | default (ternary 0 .Values.engine.device.count (eq .Values.engine.device.kind "cpu")) }}
{{- if gt (int $tensor) 1 }}
- --tensor-parallel-size={{ int $tensor }}
{{- end }}
{{- with .Values.engine.args }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* All of it, as this chart's own engine gets it. */ -}}
{{- define "highwater.engineArgs" -}}
{{- include "highwater.modelArgs" . }}
{{- if eq .Values.workload.kind "LeaderWorkerSet" }}
{{- include "highwater.groupArgs" . }}
{{- end }}
{{- include "highwater.guardArgs" . }}
{{- end -}}

{{- define "highwater.groupArgs" }}
- --pipeline-parallel-size={{ int (.Values.multiNode.pipelineParallelSize | default .Values.multiNode.size) }}
{{- if eq .Values.multiNode.executor "ray" }}
- --distributed-executor-backend=ray
{{- else }}
- --nnodes=$(LWS_GROUP_SIZE)
- --node-rank=$(LWS_WORKER_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
- --master-port={{ int .Values.multiNode.port }}
{{- end }}
{{- end -}}

{{- /* What the extension needs; also part of the patch. */ -}}
{{- define "highwater.guardEnv" -}}
- name: VLLM_SERVER_DEV_MODE
  value: "1"
- name: PYTHONPATH
  value: {{ prepend .Values.engine.pythonPath "/opt/highwater" | join ":" }}
{{- /* By this alone each worker starts its recorder, before the model is loaded. */}}
{{- with .Values.config.recorder_dir }}
- name: HIGHWATER_RECORDER_DIR
  value: {{ . }}
{{- end }}
{{- if .Values.config.engine_log }}
- name: VLLM_LOGGING_CONFIG_PATH
  value: /etc/highwater/logging/logging.json
{{- end }}
{{- if .Values.engine.apiKey.enabled }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      {{- include "highwater.apiKeySource" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- /* What an installation may want otherwise: engine.env replaces these by name. */ -}}
{{- define "highwater.engineDefaults" -}}
# A numeric user has no home and no name in the image; what asks for one (PyTorch, Triton, HCCL's logs) finds these.
- name: HOME
  value: /home/vllm
- name: USER
  value: vllm
- name: LOGNAME
  value: vllm
# torch.compile's results: a new pod need not compile again where they are on a claim.
- name: VLLM_CACHE_ROOT
  value: {{ ternary (printf "%s/vllm-cache" .Values.models.mountPath) "/home/vllm/.cache/vllm" (and (has .Values.models.kind (list "claim" "existingClaim")) (not .Values.models.readOnly)) }}
- name: VLLM_NO_USAGE_STATS
  value: "1"
{{- if ne .Values.models.kind "none" }}
- name: HF_HOME
  value: {{ .Values.models.mountPath }}/huggingface
# With VLLM_USE_MODELSCOPE models come from there instead.
- name: MODELSCOPE_CACHE
  value: {{ .Values.models.mountPath }}/modelscope
{{- end }}
{{- end -}}

{{- define "highwater.engineEnv" -}}
{{ include "highwater.guardEnv" . }}
{{- $theirs := list -}}
{{- range .Values.engine.env }}{{ $theirs = append $theirs .name }}{{ end -}}
{{- range include "highwater.engineDefaults" . | fromYamlArray }}
{{- if not (has .name $theirs) }}
- {{ toYaml . | nindent 2 | trim }}
{{- end }}
{{- end }}
{{- if .Values.models.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .Values.models.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- if eq .Values.workload.kind "LeaderWorkerSet" }}
- name: VLLM_HOST_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- with .Values.engine.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "highwater.guardMounts" -}}
- name: highwater-extension
  mountPath: /opt/highwater
  readOnly: true
{{- if .Values.config.recorder_dir }}
- name: highwater-recorder
  mountPath: {{ .Values.config.recorder_dir }}
{{- end }}
{{- if .Values.config.engine_log }}
- name: highwater-engine-log
  mountPath: {{ dir .Values.config.engine_log }}
- name: highwater-logging
  mountPath: /etc/highwater/logging
  readOnly: true
{{- end }}
{{- if eq .Values.engine.listen.kind "socket" }}
- name: highwater-engine-socket
  mountPath: /run/highwater/engine
{{- end }}
{{- end -}}

{{- define "highwater.engineMounts" -}}
{{ include "highwater.guardMounts" . }}
- name: shm
  mountPath: /dev/shm
{{- if include "highwater.ownsShm" . }}
# By its own name too: /dev/shm may be another by the time the engine starts (files/empty-shm.sh).
- name: shm
  mountPath: /run/highwater/shm
{{- end }}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/vllm
{{- if ne .Values.models.kind "none" }}
- name: models
  mountPath: {{ .Values.models.mountPath }}
  {{- if .Values.models.readOnly }}
  readOnly: true
  {{- end }}
{{- end }}
{{- with .Values.engine.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /*
The probes ask the sidecar, at its control port: the engine is on loopback, where the kubelet cannot reach it, and its own
/health says 200 while it hangs. They are the engine's container's, so what fails restarts the engine and not the sidecar.
Those that can kill the engine run in that container, so that they can ask the engine itself where the sidecar does not
answer: a sidecar that is restarted again and again must not have a healthy engine killed, while it loads or later.
*/ -}}
{{- define "highwater.alive" -}}
exec:
  # Neither site packages nor the engine's PYTHONPATH: what is there may take seconds to import.
  command:
    - python3
    - -I
    - -S
    - -c
    - |
      {{- .Files.Get "files/alive.py" | trim | nindent 6 }}
    - {{ include "highwater.controlUrl" (dict "root" . "host" "127.0.0.1") }}
    - {{ include "highwater.engineUrl" . }}
{{- end -}}

{{- define "highwater.readiness" -}}
httpGet: {path: /readyz, port: {{ int .Values.config.control_port }}, scheme: {{ include "highwater.scheme" . }}}
periodSeconds: {{ int .Values.sidecar.probes.readinessPeriodSeconds }}
timeoutSeconds: 5
failureThreshold: {{ int .Values.sidecar.probes.readinessFailures }}
{{- end -}}

{{- define "highwater.engineProbes" -}}
{{- $probes := .Values.engine.probes -}}
{{- $alive := include "highwater.alive" . | fromYaml -}}
{{- $kill := int $probes.killSeconds -}}
{{- $startup := dict "periodSeconds" 5 "timeoutSeconds" 10 "failureThreshold" (div (add (int $probes.startupSeconds) 4) 5) "terminationGracePeriodSeconds" $kill -}}
startupProbe:
  {{- mergeOverwrite (deepCopy $alive) $startup $probes.overrides.startup | toYaml | nindent 2 }}
# The sidecar has the same: some look at one container, some at the other.
readinessProbe:
  {{- mergeOverwrite (include "highwater.readiness" . | fromYaml) $probes.overrides.readiness | toYaml | nindent 2 }}
{{- if $probes.liveness }}
{{- $liveness := dict "periodSeconds" 10 "timeoutSeconds" 10 "failureThreshold" (div (add (int $probes.unhealthySeconds) 9) 10) "terminationGracePeriodSeconds" $kill }}
livenessProbe:
  {{- mergeOverwrite (deepCopy $alive) $liveness $probes.overrides.liveness | toYaml | nindent 2 }}
{{- end }}
{{ include "highwater.lifecycle" (dict "root" . "host" "127.0.0.1") }}
{{- end -}}

{{- /* The drain, and the hook of the user's. Takes the same. */ -}}
{{- define "highwater.lifecycle" -}}
{{- $hooks := include "highwater.drain" . | fromYaml -}}
{{- with .root.Values.engine.lifecycle.postStart -}}
{{- $_ := set $hooks.lifecycle "postStart" . -}}
{{- end -}}
{{- toYaml $hooks -}}
{{- end -}}

{{- /* Takes (dict "root" . "host" "where the sidecar is"). */ -}}
{{- define "highwater.drain" -}}
lifecycle:
  preStop:
    exec:
      command:
        - python3
        - -c
        - |
          {{- .root.Files.Get "files/drain.py" | trim | nindent 10 }}
        - {{ include "highwater.controlUrl" . }}
        - {{ .root.Values.engine.drain.firstSeconds | toString | quote }}
        - {{ .root.Values.engine.drain.seconds | toString | quote }}
{{- end -}}

{{- /* Empty on a CPU, and where devices come by claims. */ -}}
{{- define "highwater.deviceResource" -}}
{{- $device := .Values.engine.device -}}
{{- $known := dict "nvidia" "nvidia.com/gpu" "ascend" "huawei.com/Ascend910" "amd" "amd.com/gpu" "gaudi" "habana.ai/gaudi" -}}
{{- if not $device.claims -}}
{{- $device.resource | default (get $known $device.kind) -}}
{{- end -}}
{{- end -}}

{{- define "highwater.engineResources" -}}
{{- $resources := deepCopy .Values.engine.resources -}}
{{- with include "highwater.deviceResource" . -}}
{{- $_ := set $resources "limits" (merge (dict . (int $.Values.engine.device.count)) ($resources.limits | default dict)) -}}
{{- end -}}
{{- with .Values.engine.device.claims -}}
{{- $claims := $resources.claims | default list -}}
{{- range . }}{{ $claims = append $claims (dict "name" .) }}{{ end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- /*
Takes (dict "root" . "argv" list). /dev/shm is emptied, and files that an image's login shell would read are read, first.
*/ -}}
{{- define "highwater.engineCommand" -}}
{{- $root := .root -}}
{{- $files := $root.Values.engine.environmentFiles -}}
{{- $empties := include "highwater.ownsShm" $root -}}
{{- if or $files $empties -}}
command:
  - {{ ternary "bash" "sh" (not (empty $files)) }}
  - -c
  - |
    {{- if $empties }}
    {{- $root.Files.Get "files/empty-shm.sh" | trim | nindent 4 }}
    {{- end }}
    {{ range $files }}. {{ . | squote }} && {{ end }}exec "$@"
  - vllm
  {{- toYaml .argv | nindent 2 }}
{{- else -}}
command:
  {{- toYaml .argv | nindent 2 }}
{{- end -}}
{{- end -}}

{{- /* Empty where another container has the engine's /dev/shm mounted: what lies there may be its own. */ -}}
{{- define "highwater.ownsShm" -}}
{{- $names := list -}}
{{- range concat .Values.pod.extraContainers .Values.pod.extraInitContainers (list (dict "volumeMounts" .Values.sidecar.extraVolumeMounts)) -}}
{{- range .volumeMounts }}{{ $names = append $names .name }}{{ end -}}
{{- end -}}
{{- if not (has "shm" $names) }}true{{ end -}}
{{- end -}}

{{- define "highwater.engineCommon" -}}
image: {{ include "highwater.image" (dict "root" . "image" .Values.engine.image "tag" "") }}
imagePullPolicy: {{ .Values.engine.image.pullPolicy }}
workingDir: /home/vllm
env:
  {{- include "highwater.engineEnv" . | nindent 2 }}
{{- with .Values.engine.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- include "highwater.engineResources" . | nindent 2 }}
securityContext:
  {{- mergeOverwrite (include "highwater.restricted" . | fromYaml) .Values.engine.securityContext | toYaml | nindent 2 }}
volumeMounts:
  {{- include "highwater.engineMounts" . | nindent 2 }}
{{- end -}}

{{- define "highwater.engine" -}}
name: vllm
{{- if and (eq .Values.workload.kind "LeaderWorkerSet") (eq .Values.multiNode.executor "ray") }}
{{ include "highwater.engineCommand" (dict "root" . "argv" (concat (list "bash" "-c" (printf "ray start --head --port=%d && exec \"$@\"" (int .Values.multiNode.port)) "vllm") .Values.engine.command)) }}
{{- else }}
{{ include "highwater.engineCommand" (dict "root" . "argv" .Values.engine.command) }}
{{- end }}
args:
  {{- include "highwater.engineArgs" . | trim | nindent 2 }}
{{ include "highwater.engineProbes" . }}
{{ include "highwater.engineCommon" . }}
{{- end -}}

{{- /* The other nodes of a group: they have no API server, and no sidecar either. */ -}}
{{- define "highwater.follower" -}}
name: vllm
{{- if eq .Values.multiNode.executor "ray" }}
{{ include "highwater.engineCommand" (dict "root" . "argv" (list "ray" "start" (printf "--address=$(LWS_LEADER_ADDRESS):%d" (int .Values.multiNode.port)) "--block")) }}
{{- else }}
{{ include "highwater.engineCommand" (dict "root" . "argv" .Values.engine.command) }}
args:
  {{- include "highwater.modelArgs" . | trim | nindent 2 }}
  {{- include "highwater.groupArgs" . | trim | nindent 2 }}
  - --headless
  - --worker-extension-cls={{ include "highwater.workerExtension" . }}
{{- end }}
{{- /* The requests are the leader's to count. */}}
{{ include "highwater.lifecycle" (dict "root" . "host" "${LWS_LEADER_ADDRESS}") }}
{{ include "highwater.engineCommon" . }}
{{- end -}}

{{/*
What the schema cannot say, because it is about two values at once. All problems are told together.
*/}}
{{- define "highwater.problems" -}}
{{- $v := .Values -}}
{{- $ours := list "--host" "--port" "--uds" "--worker-extension-cls" "--headless" "--nnodes" "--node-rank" "--master-addr" "--master-port" -}}
{{- $secrets := list "--api-key" "--hf-token" -}}
{{- range $v.engine.args -}}
{{- $flag := splitList "=" (toString .) | first | replace "_" "-" -}}
{{- if has $flag $ours }}
- engine.args: {{ $flag }} is set by this chart (engine.listen, engine.workerExtension, multiNode); leave it out
{{- end -}}
{{- if has $flag $secrets }}
- engine.args: {{ $flag }} would show a secret to whoever may read the pod; use engine.apiKey or models.tokenSecret
{{- end -}}
{{- end -}}
{{- $ownEnv := list "VLLM_SERVER_DEV_MODE" "PYTHONPATH" "VLLM_LOGGING_CONFIG_PATH" "VLLM_API_KEY" "HF_TOKEN" -}}
{{- range $v.engine.env -}}
{{- if has .name $ownEnv }}
- engine.env: {{ .name }} is set by this chart (engine.pythonPath, engine.apiKey, models.tokenSecret, config.engine_log); leave it out
{{- end -}}
{{- if and (eq .name "VLLM_PLUGINS") .value (not (has "highwater" (splitList "," (toString .value)))) }}
- engine.env: VLLM_PLUGINS ({{ .value }}) leaves out highwater, the plugin that the workers record themselves by; add it
{{- end -}}
{{- end -}}
{{- range $v.sidecar.env -}}
{{- if hasPrefix "HIGHWATER_" .name }}
- sidecar.env: {{ .name }} belongs into config, which is checked
{{- end -}}
{{- end -}}
{{- if and $v.pod.hostNetwork (ne $v.engine.listen.kind "socket") }}
- pod.hostNetwork: on the node's loopback every process of the node could reach the engine's control paths; set engine.listen.kind to socket
{{- end -}}
{{- range $key := list "port" "control_port" -}}
{{- $port := int (get $v.config $key) -}}
{{- if and (eq $v.engine.listen.kind "loopback") (eq (int $v.engine.listen.port) $port) }}
- engine.listen.port and config.{{ $key }} are both {{ $port }}; they share the pod's addresses and must differ
{{- end -}}
{{- end -}}
{{- if eq (int $v.config.port) (int $v.config.control_port) }}
- config.port and config.control_port are both {{ int $v.config.port }}; requests to the model go to the first, probes and operators to the second
{{- end -}}
{{- with $v.config.proxy -}}
{{- if eq (toString .enabled) "false" }}
- config.proxy.enabled: false leaves no way to the engine, which listens in the pod alone; leave it out
{{- end -}}
{{- end -}}
{{- if and (eq $v.engine.device.kind "none") (or $v.engine.device.resource $v.engine.device.count) }}
- engine.device: kind is none, so count must be 0 and resource empty
{{- end -}}
{{- if and (ne $v.engine.device.kind "none") (lt (int $v.engine.device.count) 1) }}
- engine.device.count: {{ $v.engine.device.kind }} needs at least 1
{{- end -}}
{{- if and (eq $v.extension.from "image") (not $v.extension.image.repository) }}
- extension.image.repository: extension.from is image; say where the image with highwater_worker/ is
{{- end -}}
{{- if and $v.autoscaling.hpa.enabled $v.autoscaling.keda.enabled }}
- autoscaling: hpa and keda would both scale; enable one
{{- end -}}
{{- if and $v.autoscaling.keda.enabled (not $v.autoscaling.keda.serverAddress) }}
- autoscaling.keda.serverAddress: say where Prometheus is
{{- end -}}
{{- if and (include "highwater.isScaled" .) (eq $v.workload.kind "None") }}
- autoscaling: workload.kind is None; scale the workload where it is defined
{{- end -}}
{{- range $kind := list "hpa" "keda" -}}
{{- $scaler := index $v.autoscaling $kind -}}
{{- if and $scaler.enabled (gt (int $scaler.minReplicas) (int $scaler.maxReplicas)) }}
- autoscaling.{{ $kind }}: minReplicas ({{ int $scaler.minReplicas }}) is over maxReplicas ({{ int $scaler.maxReplicas }})
{{- end -}}
{{- end -}}
{{- if and $v.podMonitor.enabled $v.serviceMonitor.enabled }}
- podMonitor and serviceMonitor would both scrape every sidecar, and each series would be there twice; enable one
{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (not (kindIs "invalid" $v.podDisruptionBudget.minAvailable)) (not (kindIs "invalid" $v.podDisruptionBudget.maxUnavailable)) }}
- podDisruptionBudget: minAvailable and maxUnavailable exclude each other; set one to null
{{- end -}}
{{- if and (has $v.workload.kind (list "Deployment" "LeaderWorkerSet")) (eq $v.models.kind "claim") (not (has "ReadWriteMany" $v.models.accessModes)) (or (gt (int $v.workload.replicas) 1) (include "highwater.isScaled" .) (eq $v.workload.kind "LeaderWorkerSet")) }}
- models.accessModes: several pods share this claim, which needs ReadWriteMany; or use a StatefulSet, which makes one for each pod
{{- end -}}
{{- if and $v.sidecar.state.existingClaim (ne $v.workload.kind "None") (or (gt (int $v.workload.replicas) 1) (include "highwater.isScaled" .)) }}
- sidecar.state.existingClaim: the state belongs to one sidecar, and there are several; use a StatefulSet with sidecar.state.persistent
{{- end -}}
{{- if and $v.sidecar.state.persistent (ne $v.workload.kind "StatefulSet") }}
- sidecar.state.persistent: a claim for each pod needs workload.kind StatefulSet
{{- end -}}
{{- $taken := dict "/" "the root" "/tmp" "temporary files" "/run/highwater/engine" "the engine's socket" "/etc/highwater/tls" "the certificate" -}}
{{- range $key, $folder := dict
  "recorder_dir" ($v.config.recorder_dir | default "")
  "state_file" (ternary (dir (toString $v.config.state_file)) "" (not (empty $v.config.state_file)))
  "engine_log" (ternary (dir (toString $v.config.engine_log)) "" (not (empty $v.config.engine_log)))
-}}
{{- $folder = trimSuffix "/" $folder | default (ternary "/" "" (ne $folder "")) -}}
{{- if and $folder (hasKey $taken $folder) }}
- config.{{ $key }}: {{ $folder }} is there for {{ get $taken $folder }} already; it needs a folder of its own
{{- end -}}
{{- if $folder -}}{{- $_ := set $taken $folder (printf "config.%s" $key) -}}{{- end -}}
{{- end -}}
{{- if and $v.config.incidents $v.config.incidents.folder (or (not $v.config.state_file) (ne $v.config.incidents.folder (dir (toString $v.config.state_file)))) (not $v.sidecar.extraVolumeMounts) }}
- config.incidents.folder: nothing is mounted at {{ $v.config.incidents.folder }}, and the sidecar starts only where the folder exists; use the folder of config.state_file, or sidecar.extraVolumeMounts
{{- end -}}
{{- if and (eq $v.models.kind "existingClaim") (not $v.models.existingClaim) }}
- models.existingClaim: say which claim
{{- end -}}
{{- if and (eq $v.models.kind "hostPath") (not $v.models.hostPath) }}
- models.hostPath: say which folder of the node
{{- end -}}
{{- if and (eq $v.workload.kind "None") (not $v.attach.podLabels) }}
- attach.podLabels: workload.kind is None; say which labels your vLLM pods have, so that Service, monitors and policies find them
{{- end -}}
{{- if and (eq $v.workload.kind "None") (not $v.attach.name) }}
- attach.name: workload.kind is None; say what your {{ $v.attach.workload }} is called
{{- end -}}
{{- if lt (int $v.engine.probes.killSeconds) (add (ceil $v.engine.drain.firstSeconds | int) 5) }}
- engine.probes.killSeconds: must be at least engine.drain.firstSeconds + 5, or a hung engine is not even asked to end
{{- end -}}
{{- if and $v.adminToken.enabled $v.config.admin_token_file }}
- config.admin_token_file: adminToken.enabled is true, so the token comes from a Secret; set one of the two
{{- end -}}
{{- end -}}

{{- define "highwater.check" -}}
{{- with include "highwater.problems" . | trim -}}
{{- fail (printf "\n\nThese values do not go together:\n%s\n" .) -}}
{{- end -}}
{{- end -}}

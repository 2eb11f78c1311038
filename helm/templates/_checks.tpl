{{/*
What the schema cannot say, because it is about two values at once, or about what only some workloads need. All problems
are told together.
*/}}
{{- define "highwater.problems" -}}
{{- $v := .Values -}}
{{- include "highwater.missing" . -}}
{{- include "highwater.deviceProblems" . -}}
{{- include "highwater.ruleProblems" . -}}
{{- include "highwater.serviceProblems" . -}}
{{- include "highwater.monitoringProblems" . -}}
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
{{- if and $v.autoscaling.hpa.enabled $v.autoscaling.keda.enabled }}
- autoscaling: hpa and keda would both scale; enable one
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
{{- $taken := dict "/" "the root" "/tmp" "temporary files" "/run/highwater/engine" "the engine's socket" "/etc/highwater/tls" "the certificate" "/run/highwater/admin" "the admin token" -}}
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
{{- if lt (int $v.engine.probes.killSeconds) (add (ceil $v.engine.drain.firstSeconds | int) 5) }}
- engine.probes.killSeconds: must be at least engine.drain.firstSeconds + 5, or a hung engine is not even asked to end
{{- end -}}
{{- if and $v.adminToken.enabled $v.config.admin_token_file }}
- config.admin_token_file: adminToken.enabled is true, so the token comes from a Secret; set one of the two
{{- end -}}
{{- if and (eq $v.pod.dnsPolicy "None") (not $v.pod.dnsConfig) }}
- pod.dnsConfig: pod.dnsPolicy is None; say which nameservers the pods use
{{- end -}}
{{- end -}}

{{- /* What has no default, and what an option cannot do without. */ -}}
{{- define "highwater.missing" -}}
{{- $v := .Values -}}
{{- if not $v.sidecar.image.repository }}
- sidecar.image.repository: say where the sidecar's image is; docker/ in the repository builds it
{{- end -}}
{{- if ne $v.workload.kind "None" -}}
{{- if not $v.engine.model }}
- engine.model: say which model, by its name or as a folder
{{- end -}}
{{- if not $v.engine.device.kind }}
- engine.device.kind: say which devices the engine uses: nvidia, ascend, amd, gaudi or cpu
{{- end -}}
{{- if not $v.engine.image.repository }}
- engine.image.repository: say where vLLM's image is
{{- end -}}
{{- if not (or $v.engine.image.tag $v.engine.image.digest) }}
- engine.image.tag: give a tag or a digest
{{- end -}}
{{- end -}}
{{- if and (eq $v.extension.from "image") (not $v.extension.image.repository) }}
- extension.image.repository: extension.from is image; say where the image with highwater_worker/ is
{{- end -}}
{{- if and $v.autoscaling.keda.enabled (not $v.autoscaling.keda.serverAddress) }}
- autoscaling.keda.serverAddress: say where Prometheus is
{{- end -}}
{{- if and (eq $v.models.kind "existingClaim") (not $v.models.existingClaim) }}
- models.existingClaim: say which claim
{{- end -}}
{{- if and (eq $v.models.kind "hostPath") (not $v.models.hostPath) }}
- models.hostPath: say which folder of the node
{{- end -}}
{{- if and (eq $v.models.kind "claim") (not $v.models.size) }}
- models.size: models.kind is claim; say how large it is
{{- end -}}
{{- if and (eq $v.workload.kind "None") (not $v.attach.podLabels) }}
- attach.podLabels: workload.kind is None; say which labels your vLLM pods have, so that Service, monitors and policies find them
{{- end -}}
{{- if and (eq $v.workload.kind "None") (not $v.attach.name) }}
- attach.name: workload.kind is None; say what your {{ $v.attach.workload }} is called
{{- end -}}
{{- if and (eq $v.workload.kind "None") $v.engine.apiKey.enabled (not $v.engine.apiKey.existingSecret.name) }}
- engine.apiKey: workload.kind is None, and the Secret that would be made goes with the release; your container keeps the key that it has, so leave it out, or name a Secret of yours in engine.apiKey.existingSecret
{{- end -}}
{{- end -}}

{{- define "highwater.deviceProblems" -}}
{{- $v := .Values -}}
{{- $device := $v.engine.device -}}
{{- $isCpu := eq $device.kind "cpu" -}}
{{- if and $isCpu (or $device.resource $device.claims (gt (int $device.count) 1)) }}
- engine.device: kind is cpu; leave count, resource and claims out
{{- end -}}
{{- if and $device.kind (not $isCpu) (lt (int $device.count) 1) }}
- engine.device.count: {{ int $device.count }}; {{ $device.kind }} needs at least 1
{{- end -}}
{{- if and $device.claims $device.resource }}
- engine.device: the devices come by resource ({{ $device.resource }}) or by claims ({{ join ", " $device.claims }}); set one of the two
{{- end -}}
{{- $claims := list -}}
{{- range $v.pod.resourceClaims }}{{ $claims = append $claims .name }}{{ end -}}
{{- range $name := $device.claims -}}
{{- if not (has $name $claims) }}
- engine.device.claims: {{ $name }} is not among pod.resourceClaims; add it there
{{- end -}}
{{- end -}}
{{- $image := $v.engine.image -}}
{{- if and $device.kind (ne $device.kind "nvidia") (eq $image.repository "vllm/vllm-openai") (not $image.digest) (regexMatch "^v[0-9.]+$" $image.tag) }}
- engine.image: vllm/vllm-openai:{{ $image.tag }} is vLLM for nvidia, and engine.device.kind is {{ $device.kind }}; name an image for it
{{- end -}}
{{- end -}}

{{- /* As the sidecar would judge them at its start (app/highwater/act/rules.py). */ -}}
{{- define "highwater.ruleProblems" -}}
{{- $rules := (.Values.config.policy | default dict).rules | default list -}}
{{- $signals := .Files.Get "files/signals.json" | fromJson -}}
{{- $names := list -}}
{{- range $index, $rule := $rules -}}
{{- $at := printf "config.policy.rules[%d] (%s)" $index $rule.name -}}
{{- if has $rule.name $names }}
- {{ $at }}: another rule has this name; names must be unique
{{- end -}}
{{- $names = append $names $rule.name -}}
{{- $noHigh := kindIs "invalid" $rule.high_water -}}
{{- $noLow := kindIs "invalid" $rule.low_water -}}
{{- if ne $noHigh $noLow }}
- {{ $at }}: {{ ternary "high_water" "low_water" $noHigh }} is missing; give both, or neither
{{- else if and $noHigh (ne $rule.signal "device_free_bytes") }}
- {{ $at }}: high_water and low_water are required for {{ $rule.signal }}
{{- else if not $noHigh -}}
{{- $high := float64 $rule.high_water -}}
{{- $low := float64 $rule.low_water -}}
{{- $waters := printf "high_water (%s) and low_water (%s)" (include "highwater.process" $high) (include "highwater.process" $low) -}}
{{- if has $rule.signal $signals.falling -}}
{{- if le $low $high }}
- {{ $at }}: {{ $waters }}: low_water must be over high_water, because less {{ $rule.signal }} is worse
{{- end -}}
{{- else if ge $low $high }}
- {{ $at }}: {{ $waters }}: low_water must be under high_water
{{- end -}}
{{- if and (has $rule.signal $signals.ratios) (or (lt $low 0.0) (gt $low 1.0) (lt $high 0.0) (gt $high 1.0)) }}
- {{ $at }}: {{ $waters }}: {{ $rule.signal }} is a ratio from 0 to 1
{{- else if or (lt $low 0.0) (lt $high 0.0) }}
- {{ $at }}: {{ $waters }}: {{ $rule.signal }} is never negative
{{- end -}}
{{- end -}}
{{- if and (has $rule.signal $signals.withoutRemedies) (not $rule.remedies) }}
- {{ $at }}: remedies must be named for {{ $rule.signal }}, because what frees host memory costs cache hits or holds requests
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "highwater.serviceProblems" -}}
{{- $v := .Values -}}
{{- $service := $v.service -}}
{{- if not $service.enabled -}}
{{- range $key, $enabled := dict "ingress" $v.ingress.enabled "httpRoute" $v.httpRoute.enabled "serviceMonitor" $v.serviceMonitor.enabled "helmTest" $v.helmTest.enabled -}}
{{- if $enabled }}
- {{ $key }}.enabled: it leads to the Service, and service.enabled is false; enable that, or disable this
{{- end -}}
{{- end -}}
{{- end -}}
{{- $publishes := has $service.type (list "NodePort" "LoadBalancer") -}}
{{- range $key := list "nodePort" "externalTrafficPolicy" -}}
{{- if and (index $service $key) (not $publishes) }}
- service.{{ $key }}: service.type is {{ $service.type }}; it needs NodePort or LoadBalancer
{{- end -}}
{{- end -}}
{{- range $key := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
{{- if and (index $service $key) (ne $service.type "LoadBalancer") }}
- service.{{ $key }}: service.type is {{ $service.type }}; it needs LoadBalancer
{{- end -}}
{{- end -}}
{{- if and $publishes (eq $service.clusterIP "None") }}
- service.clusterIP: None is a headless Service, and service.type is {{ $service.type }}; it needs ClusterIP
{{- end -}}
{{- end -}}

{{- define "highwater.monitoringProblems" -}}
{{- $v := .Values -}}
{{- if and $v.podMonitor.enabled $v.serviceMonitor.enabled }}
- podMonitor and serviceMonitor would both scrape every sidecar, and each series would be there twice; enable one
{{- end -}}
{{- range $key := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := index $v $key -}}
{{- if and $monitor.enabled $v.networkPolicy.enabled (not $v.networkPolicy.scrapers) }}
- networkPolicy.scrapers: it is empty, so the policy shuts Prometheus out, and {{ $key }}.enabled is true; name the namespace or the pods of Prometheus
{{- end -}}
{{- if and $monitor.enabled $monitor.authorization $monitor.basicAuth }}
- {{ $key }}: authorization and basicAuth exclude each other; set one of the two
{{- end -}}
{{- end -}}
{{- if $v.prometheusRule.enabled -}}
{{- $known := list -}}
{{- $reasons := list -}}
{{- range $path, $_ := .Files.Glob "alerts/*.yaml" -}}
{{- range ($.Files.Get $path | fromYaml).groups }}{{ range .rules }}{{ with get . "alert" }}{{ $known = append $known . }}{{ end }}{{ with get (.labels | default dict) "reason" }}{{ $reasons = append $reasons (printf "%s/%s" (last $known) .) }}{{ end }}{{ end }}{{ end -}}
{{- end -}}
{{- range $name, $_ := $v.prometheusRule.alerts -}}
{{- if not (has $name (concat $known $reasons)) }}
- prometheusRule.alerts: {{ $name }} is no alert of this chart; there are {{ concat ($known | uniq) $reasons | sortAlpha | join ", " }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "highwater.check" -}}
{{- with include "highwater.problems" . | trim -}}
{{- fail (printf "\n\nHelm cannot install these values:\n%s\n" .) -}}
{{- end -}}
{{- end -}}

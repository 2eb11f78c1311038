"""values.schema.json: what each value may be. Values that must fit each other are `templates/_checks.tpl`'s matter."""

from __future__ import annotations

import json
from typing import Any

from helm.generator.settings import config_schema

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
MAP: Schema = {"type": "object"}
MAPS: Schema = {"type": "array", "items": {"type": "object"}}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
TEXTS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
SECONDS: Schema = {"type": "integer", "minimum": 1, "maximum": 86400}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
# The restricted standard lets nobody below it in, and the sidecar needs no port that would want it.
OPEN_PORT: Schema = {"type": "integer", "minimum": 1024, "maximum": 65535}
COUNT: Schema = {"type": "integer", "minimum": 0}
ONE_OR_MORE: Schema = {"type": "integer", "minimum": 1}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"}
QUANTITY_OR_NONE: Schema = {"type": "string", "pattern": "^([0-9]+(\\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?)?$"}
FOLDER: Schema = {"type": "string", "pattern": "^/[^:]*[^/:]$"}
FOLDER_OR_NONE: Schema = {"type": "string", "pattern": "^(/[^:]*)?$"}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
NAME: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
SHORT_NAME: Schema = NAME | {"maxLength": 46}
# As `host:port`: what stands before the first slash of an image.
REGISTRY: Schema = {"type": "string", "pattern": "^([a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._/-]*[a-z0-9])?)?$"}
PULL_POLICY: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}
DIGEST: Schema = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
TAG: Schema = {"type": "string", "pattern": "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$"}
# Lower case and no tag: a tag or digest in it would be lost or doubled.
REPOSITORY: Schema = {"type": "string", "pattern": "^([a-z0-9.-]+(:[0-9]+)?/)?[a-z0-9._/-]*$"}
NUMBER_OR_PERCENT: Schema = {
    "anyOf": [COUNT, {"type": "string", "pattern": "^(100|[0-9]{1,2})%$"}, {"type": "null"}],
}
ENV: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {"name": SOME_TEXT, "value": TEXT, "valueFrom": MAP},
    },
}


def table(**properties: Schema) -> Schema:
    """An object with these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def one_of(*names: str) -> Schema:
    """One of these words."""
    return {"type": "string", "enum": list(names)}


IMAGE = table(repository=REPOSITORY, tag=TAG, digest=DIGEST, pullPolicy=PULL_POLICY)
SECRET_KEY = table(name=NAME, key=SOME_TEXT)
RESOURCES = table(requests=MAP, limits=MAP, claims=MAPS)
MONITOR = table(
    enabled=FLAG,
    engineMetrics=FLAG,
    interval=DURATION,
    scrapeTimeout=DURATION,
    namespace=NAME,
    labels=LABELS,
    annotations=LABELS,
    jobLabel=TEXT,
    honorLabels=FLAG,
    sampleLimit=COUNT,
    authorization=MAP,
    basicAuth=MAP,
    tlsConfig=MAP,
    relabelings=MAPS,
    metricRelabelings=MAPS,
)
# Only its timing: what a probe asks follows from the ports, and a pod whose probe asks elsewhere is never ready.
TIMING = {
    "initialDelaySeconds": COUNT,
    "periodSeconds": ONE_OR_MORE,
    "timeoutSeconds": ONE_OR_MORE,
    "failureThreshold": ONE_OR_MORE,
}
READINESS_TIMING = table(**TIMING, successThreshold=ONE_OR_MORE)
KILLING_TIMING = table(**TIMING, terminationGracePeriodSeconds=ONE_OR_MORE)
ALERT = table(enabled=FLAG, severity=SOME_TEXT, **{"for": DURATION}, labels=LABELS)
SERVICE = table(
    enabled=FLAG,
    type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
    port=PORT,
    annotations=LABELS,
    labels=LABELS,
    clusterIP=TEXT,
    nodePort={"type": "integer", "minimum": 0, "maximum": 65535},
    loadBalancerClass=TEXT,
    loadBalancerSourceRanges=TEXTS,
    externalTrafficPolicy=one_of("", "Cluster", "Local"),
    trafficDistribution=one_of("", "PreferClose", "PreferSameZone", "PreferSameNode"),
)
DEVICE = table(
    kind=one_of("", "nvidia", "ascend", "amd", "intel", "gaudi", "cpu"), count=COUNT, resource=TEXT, claims=TEXTS
)
STRATEGY = table(
    type=one_of("RollingUpdate", "Recreate"),
    rollingUpdate={"anyOf": [table(maxSurge=NUMBER_OR_PERCENT, maxUnavailable=NUMBER_OR_PERCENT), {"type": "null"}]},
)

VALUES: dict[str, Schema] = {
    "nameOverride": SHORT_NAME,
    "fullnameOverride": SHORT_NAME,
    "commonLabels": LABELS,
    "commonAnnotations": LABELS,
    "imagePullSecrets": {"type": "array", "items": table(name=NAME)},
    "workload": table(
        kind=one_of("Deployment", "StatefulSet", "LeaderWorkerSet", "None"),
        replicas=COUNT,
        strategy=STRATEGY,
        updateStrategy=table(type=one_of("RollingUpdate", "OnDelete")),
        revisionHistoryLimit=COUNT,
        annotations=LABELS,
    ),
    "engine": table(
        image=IMAGE,
        model=TEXT,
        servedModelName=TEXT,
        command=TEXTS | {"minItems": 1},
        environmentFiles={"type": "array", "items": FOLDER},
        args={"type": "array", "items": {"type": "string"}},
        tensorParallelSize=COUNT,
        env=ENV,
        envFrom=MAPS,
        pythonPath={"type": "array", "items": FOLDER},
        workerExtension={"type": "string", "pattern": "^([A-Za-z_][A-Za-z0-9_]*(\\.[A-Za-z_][A-Za-z0-9_]*)+)?$"},
        listen=table(kind=one_of("loopback", "socket"), port=OPEN_PORT),
        device=DEVICE,
        resources=RESOURCES,
        sharedMemory=QUANTITY,
        apiKey=table(enabled=FLAG, existingSecret=SECRET_KEY),
        logFile=table(
            maxBytes={"type": "integer", "minimum": 65536},
            volumeSize=QUANTITY,
            level=one_of("DEBUG", "INFO", "WARNING", "ERROR"),
        ),
        probes=table(
            startupSeconds=SECONDS,
            liveness=FLAG,
            unhealthySeconds=SECONDS,
            killSeconds=SECONDS,
            overrides=table(startup=KILLING_TIMING, liveness=KILLING_TIMING, readiness=READINESS_TIMING),
        ),
        drain=table(firstSeconds={"type": "number", "minimum": 0}, seconds={"type": "number", "minimum": 0}),
        lifecycle=table(postStart=MAP),
        extraVolumeMounts=MAPS,
        securityContext=MAP,
    ),
    "models": table(
        kind=one_of("emptyDir", "claim", "existingClaim", "hostPath", "none"),
        mountPath=FOLDER,
        size=QUANTITY_OR_NONE,
        storageClass=TEXT,
        accessModes={
            "type": "array",
            "minItems": 1,
            "items": one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"),
        },
        existingClaim=NAME,
        hostPath=FOLDER_OR_NONE,
        readOnly=FLAG,
        offline=FLAG,
        tokenSecret=SECRET_KEY,
    ),
    "sidecar": table(
        image=IMAGE,
        resources=RESOURCES,
        env=ENV,
        extraVolumeMounts=MAPS,
        securityContext=MAP,
        recorderSize=QUANTITY,
        probes=table(
            startupSeconds=SECONDS,
            readinessPeriodSeconds=SECONDS,
            readinessFailures=ONE_OR_MORE,
            overrides=table(liveness=KILLING_TIMING, readiness=READINESS_TIMING),
        ),
        state=table(persistent=FLAG, size=QUANTITY, storageClass=TEXT, existingClaim=NAME),
        tls=table(existingSecret=NAME),
    ),
    "config": {},  # see values_schema
    "extension": table(**{"from": one_of("auto", "image", "copy")}, image=IMAGE, resources=RESOURCES),
    "adminToken": table(enabled=FLAG, existingSecret=SECRET_KEY),
    "multiNode": table(
        size={"type": "integer", "minimum": 2},
        executor=one_of("mp", "ray"),
        port=OPEN_PORT,
        pipelineParallelSize=COUNT,
        restartPolicy=one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
    ),
    "attach": table(
        workload=one_of("Deployment", "StatefulSet"),
        name=NAME,
        podLabels=LABELS,
        container=NAME,
        args={"type": ["array", "null"], "items": {"type": "string"}},
        containerIndex=COUNT,
    ),
    "pod": table(
        labels=LABELS,
        annotations=LABELS,
        runtimeClassName=NAME,
        priorityClassName=NAME,
        schedulerName=NAME,
        nodeSelector=LABELS,
        tolerations=MAPS,
        affinity=MAP,
        topologySpreadConstraints=MAPS,
        resourceClaims=MAPS,
        hostNetwork=FLAG,
        hostIPC=FLAG,
        shareProcessNamespace=FLAG,
        dnsPolicy=one_of("", "Default", "ClusterFirst", "ClusterFirstWithHostNet", "None"),
        dnsConfig=table(nameservers=TEXTS, searches=TEXTS, options=MAPS),
        hostAliases=MAPS,
        securityContext=MAP,
        extraVolumes=MAPS,
        extraContainers=MAPS,
        extraInitContainers=MAPS,
    ),
    "service": SERVICE,
    "serviceAccount": table(create=FLAG, name=NAME, annotations=LABELS),
    "podMonitor": MONITOR,
    "serviceMonitor": MONITOR,
    "prometheusRule": table(
        enabled=FLAG,
        namespace=NAME,
        labels=LABELS,
        ruleLabels=LABELS,
        recordings=FLAG,
        alerts={"type": "object", "additionalProperties": ALERT},
    ),
    "docs": table(baseUrl=TEXT, suffix=one_of("html", "md")),
    "dashboards": table(enabled=FLAG, namespace=NAME, labels=LABELS, annotations=LABELS),
    "networkPolicy": table(
        enabled=FLAG, clients=MAPS, operators=MAPS, scrapers=MAPS, egress=table(enabled=FLAG, rules=MAPS)
    ),
    "podDisruptionBudget": table(enabled=FLAG, minAvailable=NUMBER_OR_PERCENT, maxUnavailable=NUMBER_OR_PERCENT),
    "autoscaling": table(
        hpa=table(
            enabled=FLAG,
            minReplicas=ONE_OR_MORE,
            maxReplicas=ONE_OR_MORE,
            podMetrics={
                "type": "array",
                "minItems": 1,
                "items": table(name=SOME_TEXT, averageValue=SOME_TEXT) | {"required": ["name", "averageValue"]},
            },
            behavior=MAP,
        ),
        keda=table(
            enabled=FLAG,
            minReplicas=COUNT,
            maxReplicas=ONE_OR_MORE,
            pollingSeconds=SECONDS,
            cooldownSeconds=SECONDS,
            serverAddress=TEXT,
            triggers={
                "type": "array",
                "minItems": 1,
                "items": table(
                    query=SOME_TEXT,
                    threshold=SOME_TEXT,
                    metricType=one_of("AverageValue", "Value"),
                    ignoreNullValues=FLAG,
                )
                | {"required": ["query", "threshold"]},
            },
            fallback=table(failureThreshold=ONE_OR_MORE, replicas=COUNT, behavior=SOME_TEXT),
            advanced=MAP,
        ),
    ),
    "ingress": table(enabled=FLAG, className=NAME, annotations=LABELS, hosts=TEXTS, tls=MAPS),
    "httpRoute": table(enabled=FLAG, annotations=LABELS, parentRefs=MAPS, hostnames=TEXTS, timeouts=LABELS),
    "helmTest": table(enabled=FLAG),
    "extraObjects": MAPS,
}

# What is enabled must have what it cannot work without.
NEEDED = (
    ("ingress", "hosts", 1),
    ("httpRoute", "parentRefs", 1),
)


def values_schema() -> Schema:
    """The whole. `global` is shared with parent charts, whose keys are not ours to judge."""
    shared = {"type": "object", "properties": {"imageRegistry": REGISTRY}}
    properties = VALUES | {"config": _config(), "global": shared}
    needed = [
        {
            "if": {"properties": {section: {"properties": {"enabled": {"const": True}}}}},
            "then": {"properties": {section: {"properties": {key: {"minItems": least}}}}},
        }
        for section, key, least in NEEDED
    ]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Highwater",
        "description": "Made by `python -m helm.generator`; `config` follows app/highwater/settings.py.",
        **table(**properties),
        "allOf": needed,
    }


def _config() -> Schema:
    schema = config_schema()
    # They are put into probes and Services: they must be there, and the ports above 1023, as nobody is root.
    schema["properties"]["host"] = SOME_TEXT
    for key in ("port", "control_port"):
        schema["properties"][key] = OPEN_PORT | {"description": schema["properties"][key]["description"]}
    return schema


def text() -> str:
    """As the file has it."""
    return json.dumps(values_schema(), indent=2) + "\n"

"""The recording rules: a fleet's figures once per server, then once per namespace and model.

A query over all ranks of a thousand servers reads tens of thousands of series; these read them once in 30 seconds, and
what they leave is a few hundred. They are one group, whose rules run one after the other: those of a model are made of
what those of its servers have just found. They are for the Prometheus that scrapes: where several clusters are looked
at as one, `job` and `instance` do not name one server.

A name is `<labels that are left>:<family>:<operation>`, the family as exported, with its `_total` too, so that whoever
reads the name finds the family.
"""

from __future__ import annotations

from dataclasses import dataclass

from helm.source.metrics import names_in

GROUP = "highwater-fleet"
INTERVAL_SECONDS = 30.0

_INFO = "on (job, instance) group_left (model) highwater_engine_info"
_RANKS = "without (rank, device, host)"
_MODEL = "by (namespace, model)"


@dataclass(frozen=True, slots=True)
class Recording:
    """One rule.

    Attributes:
        record: The name of what it makes.
        expr: PromQL.
        meaning: What the value is, a sentence's beginning in lower case.
    """

    record: str
    expr: str
    meaning: str

    def __post_init__(self) -> None:
        """Every metric that is read exists."""
        names_in(self.expr)


def _server(name: str, aggregate: str, family: str, meaning: str, *, level: str = "instance") -> Recording:
    """One series for each server (and what else the level names), with its model and all labels of the scrape."""
    expr = f"{aggregate} {_RANKS} ({family}) * {_INFO}"
    return Recording(f"{level}:{name}", expr, meaning)


def _of_servers(name: str, aggregate: str, meaning: str) -> Recording:
    """The same over the servers of a model."""
    return Recording(f"namespace_model:{name}", f"{aggregate} {_MODEL} (instance:{name})", meaning)


def _of_models(name: str, aggregate: str, expr: str, meaning: str, *more: str) -> Recording:
    """Something that each server has once already, over the servers of a model, by further labels too."""
    labels = ("namespace", "model", *more)
    return Recording(f"{'_'.join(labels)}:{name}", f"{aggregate} by ({', '.join(labels)}) ({expr} * {_INFO})", meaning)


_FREE = "highwater_device_memory_free_bytes"
_LEFT = f"{_FREE} / (-deriv({_FREE}[15m]) > 0)"
_PARTS = "highwater_memory_component_bytes:sum"
# Of the room that was left when the engine became ready, how much is gone: 0 then, 1 when the devices are full,
# whatever share vLLM took for itself.
_GROWN = "clamp_min(highwater_growth_bytes, 0)"
_ROOM_GONE = "highwater_growth_bytes:room_ratio"

SERVERS = (
    _server(
        "highwater_device_memory_used_ratio:max",
        "max",
        "highwater_device_memory_used_ratio",
        "used share of the fullest device",
    ),
    _server(f"{_FREE}:min", "min", _FREE, "free bytes of the fullest device"),
    _server(
        "highwater_devices_memory_used_bytes:sum",
        "sum",
        "highwater_devices_memory_used_bytes",
        "bytes in use over its devices",
    ),
    _server(
        "highwater_devices_memory_total_bytes:sum",
        "sum",
        "highwater_devices_memory_total_bytes",
        "memory of its devices",
    ),
    _server(f"{_FREE}:seconds_left15m", "min", _LEFT, "when the first device is full, were it to go on as it did"),
    Recording(
        f"instance:{_ROOM_GONE}",
        f"{_GROWN} / ({_GROWN} + (sum {_RANKS} ({_FREE}))) * {_INFO}",
        "share of the room left after the start that is gone",
    ),
    _server(_PARTS, "sum", "highwater_memory_component_bytes", "exclusive parts of it", level="instance_component"),
)
MODELS = (
    _of_models("highwater_engine_up:count", "count", "highwater_engine_up", "servers"),
    _of_models("highwater_engine_up:sum", "sum", "highwater_engine_up", "servers whose engine answers"),
    _of_models(
        "highwater_ranks_reported:missing",
        "sum",
        "(highwater_ranks_expected - highwater_ranks_reported)",
        "ranks that are not heard of",
    ),
    _of_servers("highwater_device_memory_used_ratio:max", "max", "used share of the fullest device"),
    _of_servers(f"{_FREE}:min", "min", "free bytes of the fullest device"),
    _of_servers("highwater_devices_memory_used_bytes:sum", "sum", "bytes in use"),
    _of_servers("highwater_devices_memory_total_bytes:sum", "sum", "memory of all devices"),
    _of_servers(f"{_FREE}:seconds_left15m", "min", "when the first device is full"),
    _of_servers(_ROOM_GONE, "max", "share of the room left after the start that is gone, where most is"),
    Recording(
        f"namespace_model_component:{_PARTS}",
        f"sum by (namespace, model, component) (instance_component:{_PARTS})",
        "exclusive parts of what is used",
    ),
    _of_models(
        "highwater_engine_kv_cache_usage_ratio:avg",
        "avg",
        "highwater_engine_kv_cache_usage_ratio",
        "used share of the KV caches",
    ),
    _of_models(
        "highwater_engine_kv_cache_usage_ratio:max",
        "max",
        "highwater_engine_kv_cache_usage_ratio",
        "that of the fullest",
    ),
    _of_models(
        "highwater_engine_requests_running:sum",
        "sum",
        "highwater_engine_requests_running",
        "requests in the running batches",
    ),
    _of_models(
        "highwater_engine_requests_waiting:sum", "sum", "highwater_engine_requests_waiting", "requests that are queued"
    ),
    _of_models("highwater_growth_bytes:max", "max", "highwater_growth_bytes", "what the server that grew most grew by"),
    _of_models(
        "highwater_policy_state:sum", "sum", "highwater_policy_state", "rules in each state, over the servers", "state"
    ),
    _of_models(
        "highwater_policy_level:sum",
        "sum",
        "highwater_policy_level",
        "servers by how memory stands by their policy",
        "level",
    ),
    _of_models(
        "highwater_resets_total:increase5m",
        "sum",
        "increase(highwater_resets_total[5m])",
        "remedies within five minutes",
        *("remedy", "outcome"),
    ),
    _of_models(
        "highwater_reset_freed_bytes_total:rate5m",
        "sum",
        "rate(highwater_reset_freed_bytes_total[5m])",
        "bytes that remedies give back each second",
        "remedy",
    ),
    _of_models(
        "highwater_proxy_requests_total:rate5m",
        "sum",
        "rate(highwater_proxy_requests_total[5m])",
        "requests that ended each second",
        "code",
    ),
    _of_models(
        "highwater_proxy_upstream_errors_total:rate5m",
        "sum",
        "rate(highwater_proxy_upstream_errors_total[5m])",
        "requests that engines failed each second",
    ),
    _of_models(
        "highwater_proxy_time_to_first_byte_seconds_bucket:rate5m",
        "sum",
        "rate(highwater_proxy_time_to_first_byte_seconds_bucket[5m])",
        "for `histogram_quantile`: time to the first byte",
        "le",
    ),
)
RECORDINGS = (*SERVERS, *MODELS)

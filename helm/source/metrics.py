"""The metrics that exist: names and HELP texts as the exporter writes them.

They come from the golden exposition, which a unit test compares with `app/highwater/http/metrics.py`: a metric that is
renamed there is unknown here, and no dashboard is generated.
"""

from __future__ import annotations

import re
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "unit" / "http" / "golden" / "metrics.txt"

# vLLM's own families, which are not there where Prometheus scrapes `/metrics?engine=0`. What they mean is vLLM's to say
# (vllm/v1/metrics/loggers.py); `tests/engine/test_sidecar.py` asks the real engine for each.
ENGINE_FAMILIES = {
    "vllm:num_requests_running": "Requests in the running batch, by engine.",
    "vllm:num_requests_waiting": "Requests queued in the scheduler, by engine.",
    "vllm:kv_cache_usage_perc": "Used share of the KV cache's blocks, 1 is all, by engine.",
    "vllm:prefix_cache_hits_total": "Tokens found in the prefix cache.",
    "vllm:prefix_cache_queries_total": "Tokens looked up in the prefix cache.",
    "vllm:mm_cache_hits_total": "Items found in the multimodal processor cache.",
    "vllm:mm_cache_queries_total": "Items looked up in the multimodal processor cache.",
    "vllm:num_preemptions_total": "Requests that lost their KV blocks and were computed again.",
    "vllm:generation_tokens_total": "Tokens generated.",
    "vllm:prompt_tokens_total": "Prompt tokens computed.",
}
ENGINE_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "Time to the first token of a request, in seconds.",
    "vllm:inter_token_latency_seconds": "Time between two tokens of a request, in seconds.",
    "vllm:e2e_request_latency_seconds": "Time from a request's arrival to its last token, in seconds.",
}
# Prometheus' own.
PROMETHEUS_FAMILIES = {
    "up": "1 where the last scrape of the target went well.",
    "ALERTS": "1 while an alert of the rules that are loaded is pending or firing.",
}

_NAME = re.compile(r"\b(?:highwater_\w+|vllm:\w+)|\b(?:up|ALERTS)\b")


class UnknownMetricError(LookupError):
    """A query names a metric that is not exported."""


_TEXT = GOLDEN.read_text(encoding="utf-8")
_TYPES = dict(re.findall(r"^# TYPE (\S+) (\S+)$", _TEXT, re.MULTILINE))
OWN = {name: (_TYPES[name], meaning) for name, meaning in re.findall(r"^# HELP (\S+) (.+)$", _TEXT, re.MULTILINE)}


def names_in(expression: str) -> list[str]:
    """Return the families that a PromQL expression reads, in its order, each once. Raises UnknownMetricError."""
    without_text = re.sub(r'"[^"]*"', '""', expression)
    return list(dict.fromkeys(_family(name) for name in _NAME.findall(without_text)))


def _family(name: str) -> str:
    if name in OWN or name in ENGINE_FAMILIES or name in PROMETHEUS_FAMILIES:
        return name
    family = re.sub(r"_(?:bucket|count|sum)$", "", name)
    if OWN.get(family, ("", ""))[0] == "histogram" or (family != name and family in ENGINE_HISTOGRAMS):
        return family
    raise UnknownMetricError(f"{name} is neither in {GOLDEN.name} nor one of the engine's families")


def help_of(family: str) -> str:
    if family in OWN:
        return OWN[family][1]
    return (ENGINE_FAMILIES | ENGINE_HISTOGRAMS | PROMETHEUS_FAMILIES)[family]

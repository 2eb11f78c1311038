"""What others read of vLLM's page, by their own published names and parsers, to see that they go on reading it here."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

# What Prometheus 2 and 3 say that they take. Both accept the classic format, which is vLLM's only one.
PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
# llm-d-router, pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go, defaultEngineConfigs: by family.
LLM_D = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")


def production_stack(page: str) -> tuple[float, float]:
    """Return the running and the queued requests as production-stack's router takes them from a page.

    As src/vllm_router/stats/engine_stats.py, EngineStats.from_vllm_scrape: the same parser, the samples by name, and 0
    for what is not there.
    """
    samples = {
        sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples
    }
    return samples.get("vllm:num_requests_running", 0), samples.get("vllm:num_requests_waiting", 0)


def llm_d(page: str) -> Mapping[str, float]:
    """Return the load as llm-d's endpoint picker takes it from a page; without what is not on it.

    As extractor.go beside the names: each family's first sample. A family that is missing leaves the endpoint's figures
    as old as they are, and after `metrics-staleness-threshold` (2 s) they count no more.
    """
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return {name: families[name].samples[0].value for name in LLM_D if name in families}

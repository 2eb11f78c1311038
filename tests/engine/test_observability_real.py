"""Every query of dashboards and alerts, asked of a real Prometheus that scrapes a sidecar beside a real engine."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from helm.source.metrics import ENGINE_FAMILIES, ENGINE_HISTOGRAMS, names_in
from highwater.demo.sidecar import DemoSidecar
from highwater.demo.traffic import send_images
from tests.engines import send_texts
from tests.observability.rule_files import ALERTS, every_panel
from tests.patience import LIMIT_SECONDS, wait_until

from .conftest import sidecar_beside, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from highwater.demo.engine import DemoEngine

DASHBOARDS = Path(__file__).resolve().parents[2] / "helm" / "dashboards"
MARK = "nothing_else_was_found"
SCRAPES = 20
"""After so many, one a second, what can be shown is shown."""
# What brings no data here, by what the query contains, and why. All else must.
EMPTY_HERE = {
    "highwater_torch_": "PyTorch keeps no allocator statistics on CPU",
    "highwater_device_memory_seconds_to_full": "the memory of this machine need not be getting less just now",
    "highwater_growth_bytes{": "the shared engine had worked before this sidecar came: its baseline is not known",
    "highwater_proxy_upstream_errors_total": "the engine failed no request",
    "highwater_device_releasable_bytes": "a CPU has no allocator's reserve",
    "highwater_host_memory_pinned_bytes": "a CPU worker pins no host memory",
    "highwater_poll_failures_total": "no source failed",
    "highwater_proxy_requests_shed_total": "no request was shed",
    "highwater_proxy_refused_total": "no request was refused",
    'result="truncated"': "no response broke off",
    'outcome="failed"': "no remedy failed",
    'outcome=~"done|ineffective|failed"': "the policy only observes",
    'signal="device_free_bytes"': "no rule watches free bytes",
    "up{": "the sidecar is up",
    "highwater_engine_loading": "no recorder shows a start",
    "highwater_extension_info": "no recorder names its version",
    "highwater_growth_leak_": "nothing leaks",
    "highwater_growth_exhausted_": "likewise",
    "highwater_host_container_limit_bytes": "this container need have no limit",
    "highwater_host_container_seconds_to_limit": "likewise",
    "highwater_host_container_pressure_seconds": "version 1 of cgroups counts no pressure",
    'code=~"5.."': "no request failed",
    "highwater_process_memory_limit_bytes": "no container, and so no limit",
    ":highwater_": "the recordings are not loaded there; tests/observability/test_recording.py has their values",
    "ALERTS{": "the rules are not loaded there, but asked one by one",
}
COUNTED = {
    "ours": '__name__=~"highwater_.+"',
    "of the rank": '__name__=~"highwater_.+", rank="0"',
    "the engine's": '__name__=~"vllm:.+"',
    "the engine's process": '__name__!~"vllm:.+|highwater_.+|up|scrape_.+", job="highwater"',
}
RULES = [
    {"name": "device", "signal": "device_used_ratio", "high_water": 0.99, "low_water": 0.98},
    {"name": "cache", "signal": "encoder_cache_bytes", "high_water": 2**20, "low_water": 2**19, "cooldown_seconds": 1},
]


@pytest.fixture(scope="module")
def observed(engine: DemoEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoSidecar]:
    """A sidecar of these tests' own, whose every family has something to tell once there was traffic."""
    settings = {"HIGHWATER_POLICY__MODE": "observe", "HIGHWATER_POLICY__RULES": json.dumps(RULES)}
    with sidecar_beside(engine, tmp_path_factory.mktemp("observed"), **settings) as started:
        yield started


async def move_everything(engine: DemoEngine, sidecar: DemoSidecar) -> None:
    """Images and texts, a trim and what comes back, and every reset twice: a rate needs two readings of a series."""
    for seed in (71_000, 71_100):
        await send_images(sidecar.url, engine.served_model, images=range(seed, seed + 4))
        await send_texts(sidecar.url, engine.served_model, texts=[f"Count from {seed} on."])
        trim = {"remedies": ["trim_encoder_cache"]}
        await asyncio.to_thread(sidecar.call, "POST", "/memory/reclaim", trim)
        await asyncio.to_thread(sidecar.call, "POST", "/memory/encoder-cache/restore")
        await asyncio.sleep(2.5)  # the policy sees it, Prometheus scrapes it
        await asyncio.to_thread(sidecar.call, "POST", "/memory/reclaim")
        for path in ("/reset_mm_cache", "/reset_prefix_cache?mode=safe"):
            await asyncio.to_thread(sidecar.call, "POST", path)
        await asyncio.sleep(2.5)
    await send_images(sidecar.url, engine.served_model, images=[71_200])  # what is cached has an age


def panels_queries() -> list[tuple[str, str]]:
    """Every query of every panel and annotation, with where it stands."""
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in every_panel(board):
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel.get("targets", [])]
        found += [(f"{path.stem}: {made['name']}", made["expr"]) for made in board["annotations"]["list"]]
    return found


def alerts_selectors() -> list[tuple[str, str]]:
    """What each alert looks at, without what makes it fire."""
    selector = r"(?:highwater_\w+|\bup\b)(?:\{[^}]*\})?"
    return [(alert["alert"], found) for alert in ALERTS for found in re.findall(selector, alert["expr"])]


def filled_in(expression: str, instance: str) -> str:
    """The query with its variables as Grafana would put them in."""
    values = {"instance": instance, "__rate_interval": "2m", "__interval": "10m"}
    return re.sub(r"\$(\w+)", lambda found: values.get(found[1], ".*"), expression)


def is_listed(expression: str) -> bool:
    return any(part in expression for part in EMPTY_HERE)


def test_every_query_brings_data_or_is_listed_with_the_reason(
    engine: DemoEngine, observed: DemoSidecar, prometheus: Callable[..., Callable[[str], list[Any]]]
) -> None:
    instance = f"127.0.0.1:{observed.port}"
    ask = prometheus(instance, "/metrics", {})
    marked = f'label_replace(vector(0), "{MARK}", "yes", "", "")'

    def brings(expression: str) -> bool:
        return any(MARK not in row["metric"] for row in ask(f"({filled_in(expression, instance)}) or {marked}"))

    # Verdicts come from an idle engine; while everything moves it may never be idle for long enough.
    wait_for(observed, lambda report: bool(report["growth"]["series"]))
    asyncio.run(move_everything(engine, observed))
    queries = panels_queries() + alerts_selectors()
    assert len(queries) > 100
    empty = {query for query in queries if not brings(query[1])}
    deadline = time.monotonic() + 600.0
    while (late := {query for query in empty if not is_listed(query[1])}) and time.monotonic() < deadline:
        asyncio.run(move_everything(engine, observed))  # what a slow machine had no time to show
        for _ in range(SCRAPES):
            empty -= {query for query in late if brings(query[1])}
            if not empty & late:
                break
            time.sleep(1.0)
    assert not late, "\n".join(f"{where}: {expression}" for where, expression in sorted(late))
    assert [part for part in EMPTY_HERE if not any(part in expression for _, expression in queries)] == []
    # The alerts as they are: Prometheus takes each, and none of those that name an emergency fires here.
    firing = {alert["alert"] for alert in ALERTS if brings(alert["expr"])}
    assert firing <= {"HighwaterShortageNotRelieved", "HighwaterMemoryFullWithinHour"}
    # About what docs/fleet.md says that a scrape costs.
    counted = {name: int(ask(f"count({{{chosen}}})")[0]["value"][1]) for name, chosen in COUNTED.items()}
    print(counted)  # noqa: T201 - with `pytest -s`
    assert counted["ours"] < 400
    assert counted["of the rank"] < 40


def test_the_engines_families_are_there_by_their_names(engine: DemoEngine, observed: DemoSidecar) -> None:
    """What is listed of vLLM's is what this vLLM exports."""

    pages = [""]

    def has_the_engines() -> bool:
        pages.append(httpx.get(f"{observed.url}/metrics", trust_env=False, timeout=LIMIT_SECONDS).text)
        return "\nvllm:" in pages[-1]

    wait_until(has_the_engines)  # all are left out of a page for which the engine is slow to tell them
    text = pages[-1]
    assert [name for name in ENGINE_FAMILIES if f"\n{name}{{" not in text] == []
    assert [name for name in ENGINE_HISTOGRAMS if f"\n{name}_bucket{{" not in text] == []
    assert names_in(" + ".join(ENGINE_FAMILIES)) == list(ENGINE_FAMILIES)

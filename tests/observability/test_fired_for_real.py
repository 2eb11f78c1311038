"""An alert on its whole way: a sidecar, a real Prometheus with our rules, a real Alertmanager, somebody who is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from highwater.terminal.demo.process import KeptProcess, free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.fakes.engine import FakeEngine
from tests.http.conftest import serving

from .conftest import tool, yaml_blocks
from .rule_files import ALERTS_FILE, group_of

# Instead of the alert's ten minutes; everything else is as shipped.
HOLD_SECONDS = 2
ALERT, REASON = "HighwaterMemoryShort", "not_relieved"
PATIENCE_SECONDS = 300.0


@contextlib.contextmanager
def running(what: str, folder: Path, command: list[str], port: int) -> Iterator[None]:
    process = KeptProcess(what, folder / f"{what}.log")
    process.start(command, env=dict(os.environ), cwd=folder)
    process.wait_until_answers(port, "/-/ready", PATIENCE_SECONDS)
    try:
        yield
    finally:
        process.stop()


@contextlib.contextmanager
def alertmanager(folder: Path, webhook: int) -> Iterator[int]:
    """Tells one webhook, as soon as it can, with the inhibitions that the documentation proposes."""
    port = free_port()
    receiver = {"name": "us", "webhook_configs": [{"url": f"http://127.0.0.1:{webhook}/", "send_resolved": True}]}
    route = {"receiver": "us", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s", "repeat_interval": "1h"}
    config = folder / "alertmanager.yml"
    (documented,) = yaml_blocks("grafana", "inhibit_rules")
    config.write_text(json.dumps({"route": route, "receivers": [receiver], **documented}))  # JSON is YAML
    command = [tool("prometheus-alertmanager"), f"--config.file={config}", f"--storage.path={folder / 'alertmanager'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=warn"]
    with running("alertmanager", folder, command, port):
        yield port


@contextlib.contextmanager
def prometheus(folder: Path, target: int, alertmanager_port: int) -> Iterator[None]:
    """Scrapes the sidecar, with one alert of this repository that waits for a short time only."""
    port = free_port()
    rules = folder / "rules.yml"
    (alert,) = [rule for rule in group_of(ALERTS_FILE)["rules"] if rule["labels"].get("reason") == REASON]
    shortened = {"name": "highwater", "interval": "200ms", "rules": [alert | {"for": f"{HOLD_SECONDS}s"}]}
    rules.write_text(json.dumps({"groups": [shortened]}))
    job = {
        "job_name": "highwater",
        # No scrape may take longer than what is between two: 50 ms for an idle machine, many times that for a busy one.
        "scrape_interval": "5s",
        "scrape_timeout": "5s",
        "static_configs": [{"targets": [f"127.0.0.1:{target}"], "labels": {"pod": "vl-0"}}],
    }
    config = folder / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "scrape_configs": [job],
                "rule_files": [str(rules)],
                "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager_port}"]}]}]},
            }
        )
    )
    command = [tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", "--rules.alert.resend-delay=1s"]
    with running("prometheus", folder, command, port):
        yield


class Told:
    """A webhook that remembers what it was told."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self.app = Starlette(routes=[Route("/", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        self.alerts += (await request.json())["alerts"]
        return Response()

    async def wait(self, name: str, status: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for alert in self.alerts:
                if (alert["labels"]["alertname"], alert["status"]) == (name, status):
                    return alert
            await asyncio.sleep(0.1)
        raise AssertionError(f"{name} {status} did not come; there came {self.alerts}")


@contextlib.asynccontextmanager
async def in_thread(make: Callable[[], contextlib.AbstractContextManager[Any]]):
    """A context manager that blocks, beside a loop that serves."""
    manager = make()
    entered = await asyncio.to_thread(manager.__enter__)
    try:
        yield entered
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def test_high_water_that_nobody_relieves_reaches_the_people_on_call(tmp_path: Path):
    for name in ("prometheus", "prometheus-alertmanager"):
        tool(name)
    fake, told = FakeEngine(), Told()
    fake.serve_images()  # 93.6 % of the device
    # It rests for a second instead of a minute after what it would have done.
    rules = [
        {"name": "device", "signal": "device_used_ratio", "high_water": 0.93, "low_water": 0.92, "cooldown_seconds": 1}
    ]
    settings = {"HIGHWATER_POLICY__MODE": "observe", "HIGHWATER_POLICY__RULES": json.dumps(rules)}
    settings["HIGHWATER_IDLE_POLL_SECONDS"] = "1"
    async with contextlib.AsyncExitStack() as stack:
        webhook = await stack.enter_async_context(serving(told.app))
        engine = await stack.enter_async_context(serving(fake))
        url = f"http://127.0.0.1:{engine}"
        sidecar = await stack.enter_async_context(
            in_thread(lambda: DemoSidecar(url, folder=tmp_path / "sidecar", settings=settings))
        )
        port = await stack.enter_async_context(in_thread(lambda: alertmanager(tmp_path, webhook)))
        await stack.enter_async_context(in_thread(lambda: prometheus(tmp_path, sidecar.port, port)))
        fired = await told.wait(ALERT, "firing")
        for worker in fake.workers:
            worker.forget_entries()
            worker.cached = 0
        await told.wait(ALERT, "resolved")
    labels = {
        "rule": "device",
        "reason": REASON,
        "severity": "warning",
        "pod": "vl-0",
        "job": "highwater",
        "model": fake.model,
    }
    assert labels.items() <= fired["labels"].items()
    notes = fired["annotations"]
    short = f"vl-0 ({fake.model}): memory is short by rule device: 1006MiB too little is free on one rank"
    assert notes["summary"] == short
    assert notes["first_step"].endswith("kubectl -n NAMESPACE exec vl-0 -c highwater -- highwater reclaim")
    assert notes["runbook_url"] == f"docs/runbooks/{ALERT}.md"
    assert notes["dashboard_url"].startswith("d/highwater-server?var-job=highwater&var-instance=127.0.0.1:")

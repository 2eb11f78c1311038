"""A real Prometheus that holds the scene: samples backfilled, recordings evaluated, and the alerts that they raise."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from highwater.terminal.demo.process import KeptProcess, free_port
from tests.observability.pictures.server import STEP_SECONDS, Server, exposition

ALERTS = Path(__file__).resolve().parents[3] / "helm" / "alerts"
# A moment of no meaning, at a whole hour.
BEGAN = 1_760_000_400
MINUTES = 120
SERVERS = (("vl-0", "vl-8b", True), ("vl-1", "vl-8b", False), ("ocr-0", "ocr-3b", False))
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_READY_SECONDS = 60.0


@dataclass(frozen=True)
class Store:
    """The running Prometheus."""

    url: str
    ends: int = BEGAN + 60 * MINUTES

    def range(self, expr: str, step: int = STEP_SECONDS) -> list[dict[str, Any]]:
        """A query's series over the scene: `metric` and `values`."""
        return self._ask("query_range", query=expr, start=BEGAN, end=self.ends, step=step)

    def instant(self, expr: str, at: int | None = None) -> list[dict[str, Any]]:
        """A query's series at one moment, the last one unless another is named: `metric` and `value`."""
        return self._ask("query", query=expr, time=at or self.ends)

    def _ask(self, call: str, **parameters: object) -> list[dict[str, Any]]:
        # Without certificates to verify by: to load them takes as long as many of these queries.
        said = httpx.post(f"{self.url}/api/v1/{call}", data=parameters, trust_env=False, verify=False, timeout=120)  # noqa: S501 - no TLS
        answer = said.json()
        if answer["status"] != "success":
            raise ValueError(f"{parameters['query']}: {answer['error']}")
        return answer["data"]["result"]  # type: ignore[no-any-return]


def scrapes() -> Iterator[str]:
    """Every sample of the scene, server by server."""
    for seed, (pod, model, dies) in enumerate(SERVERS):
        server = Server(seed, model, BEGAN, dies=dies)
        labels = f'cluster="east",job="highwater",namespace="models",pod="{pod}",instance="10.0.0.{seed + 1}:8002"'
        for at in range(BEGAN, BEGAN + 60 * MINUTES + 1, STEP_SECONDS):
            yield f"up{{{labels}}} 1 {at}\n"
            yield from exposition(server.page(at), labels, at)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[Store]:
    """Prometheus with the scene in it, for as long as the block lasts."""
    data = folder / "data"
    data.mkdir(parents=True)
    _backfill(folder, scrapes())
    # Twice, since those of a model are made of those of its servers, which each pass reads from what is stored.
    for _ in range(2):
        with _running(folder) as store:
            _record(store, data)
    with _running(folder) as store:
        firing = list(_alerts(store))
    _backfill(folder, firing)
    with _running(folder) as store:
        yield store


def _record(store: Store, data: Path) -> None:
    _promtool(
        "tsdb", "create-blocks-from", "rules", f"--url={store.url}", f"--start={BEGAN}", f"--end={store.ends}",
        f"--eval-interval={STEP_SECONDS}s", f"--output-dir={data}", str(ALERTS / "highwater-recording.rules.yaml"),
    )  # fmt: skip


def _promtool(*arguments: str) -> None:
    done = subprocess.run(
        [shutil.which("promtool") or "promtool", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"promtool {arguments[0]}: {done.stdout}{done.stderr}")


def _backfill(folder: Path, samples: Iterable[str]) -> None:
    path = folder / "samples.txt"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(samples)
        file.write("# EOF\n")
    _promtool("tsdb", "create-blocks-from", "openmetrics", "--quiet", str(path), str(folder / "data"))
    path.unlink()


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[Store]:
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text("{}\n")
    process = KeptProcess("prometheus", folder / "prometheus.log")
    process.start(
        [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=100y", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ],
        env=dict(os.environ),
        cwd=folder,
    )  # fmt: skip
    process.wait_until_answers(port, "/-/ready", _READY_SECONDS)
    try:
        yield Store(f"http://127.0.0.1:{port}")
    finally:
        process.stop()


def _alerts(store: Store) -> Iterator[str]:
    """The series ALERTS as Prometheus would have written it: what holds for as long as the alert's `for` fires."""
    (group,) = yaml.safe_load((ALERTS / "highwater.rules.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]:
        held = rule.get("for", "0s")
        patience = int(held[:-1]) * _UNITS[held[-1]]
        for series in store.range(rule["expr"]):
            names = {**series["metric"], **rule["labels"], "alertname": rule["alert"], "alertstate": "firing"}
            names.pop("__name__", None)
            labels = ",".join(f'{name}="{value}"' for name, value in names.items())
            since = before = None
            for at, _ in series["values"]:
                since = at if before is None or at - before > STEP_SECONDS else since
                before = at
                if since is not None and at - since >= patience:
                    yield f"ALERTS{{{labels}}} 1 {at:.0f}\n"

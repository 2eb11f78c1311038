"""Real engines for the tests in this folder: built and started on first use, ended whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from highwater.process.worker_package import SHIM_FOLDER
from highwater.terminal.demo.engine import (
    DemoEngine,
    EngineEnvironment,
    EngineOptions,
    build_model,
    ensure_environment,
    link_extension,
)
from highwater.terminal.demo.process import KeptProcess, free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.compat.results import Result, keep
from tests.engines import AnyEngine
from tests.patience import LIMIT_SECONDS

HERE, FOLDER = Path(__file__).parent, "tests/engine/"
RESULTS = "HIGHWATER_COMPAT_RESULTS"
"""Names the file that results go to; without it they are not kept."""
TEST_SECONDS = 1800
# How long clients storm beside each remedy; docs/compat.json and docs/relief.md were made with a minute.
STORM_SECONDS = float(os.environ.get("TEST_STORM_SECONDS", "4"))
SHARED = ("ruined", "two_workers", "engine")
"""Engines of the session: the tests of one go to one worker of xdist, so that it is started once."""
# They share the engine that may be ruined: the first wants it undisturbed, the others kill it and start it again.
RUINOUS = ("test_recorder_real", "test_kills", "test_relief_chaos")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)  # stable: all others keep their order
    mark_as_engine_tests(items, FOLDER)
    for item in items:
        shared = next((name for name in SHARED if name in item.fixturenames), None)
        if shared and item.nodeid.startswith(FOLDER) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(shared))


def mark_as_engine_tests(items: list[pytest.Item], folder: str) -> None:
    """Mark the tests of a folder, and bound the time of those that have no bound of their own."""
    for item in items:
        if item.nodeid.startswith(folder):
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                # The fixtures' time is not the test's: an install and a start have limits of their own.
                item.add_marker(pytest.mark.timeout(TEST_SECONDS, func_only=True))


def _turn(item: pytest.Item) -> int:
    """Return when a file has its turn: 0 for nearly all, behind them those that ruin an engine, in their order."""
    name = item.path.stem
    return RUINOUS.index(name) + 1 if name in RUINOUS and item.nodeid.startswith(FOLDER) else 0


@pytest.fixture(scope="session")
def engine_environment() -> EngineEnvironment:
    """The environment that vLLM is installed in; made once per machine, which takes minutes."""
    return ensure_environment(announce=print)


@pytest.fixture(scope="session")
def engine_factory(
    engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., DemoEngine]]:
    """`engine_factory(**options)` starts an engine; it is ended with the session, or earlier by its user."""
    engines: list[DemoEngine] = []

    def start(**options: object) -> DemoEngine:
        folder = tmp_path_factory.mktemp("engine")
        engine = AnyEngine(engine_environment, EngineOptions(**options), folder=folder)
        engines.append(engine)
        return engine.start()

    try:
        yield start
    finally:
        for engine in engines:
            engine.stop()


@contextmanager
def engine_with_weights(environment: EngineEnvironment, folder: Path, **options: Any) -> Iterator[DemoEngine]:
    """Start an engine whose answers depend on every image and token; in float32, whatever else is in the batch."""
    make_weights(environment, build_model(folder / "model"))
    options["extra_args"] = (*options.get("extra_args", ()), "--dtype", "float32", "--load-format", "auto")
    with AnyEngine(environment, EngineOptions(**options), folder=folder) as engine:
        yield engine


def make_weights(environment: EngineEnvironment, model: Path) -> None:
    command = [str(environment.python), str(HERE / "make_weights.py"), str(model)]
    env = os.environ | {"PYTHONPATH": str(SHIM_FOLDER), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=env, check=True, capture_output=True)


@pytest.fixture(scope="session")
def engine(engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoEngine]:
    """The engine that the tests share: one worker, images, dev mode, Highwater's extension. Leave it as it was."""
    with engine_with_weights(engine_environment, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture(scope="session")
def telling_engine(engine: DemoEngine) -> DemoEngine:
    """The shared engine, for tests that compare its answers."""
    return engine


class Victim(NamedTuple):
    """An engine to be ruined, and the file that orders its worker to stop in an operation."""

    engine: DemoEngine
    order: Path


@contextmanager
def engine_to_ruin(engine_factory: Callable[..., DemoEngine], folder: Path) -> Iterator[Victim]:
    """Start an engine whose worker can be made to hang, and to stop where a test wants to kill it."""
    path = (SHIM_FOLDER, link_extension(folder), HERE / "on_engine_path")
    order = folder / "stop"
    environ = {"PYTHONPATH": os.pathsep.join(map(str, path)), "HIGHWATER_TEST_STOP": str(order)}
    arguments = ("--worker-extension-cls", "troubled_worker.TroubledWorker")
    with engine_factory(extra_args=arguments, extra_env=tuple(environ.items())) as engine:
        yield Victim(engine, order)


@pytest.fixture(scope="session")
def ruined(engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """The engine of the files in `RUINOUS`: each finds it alive, and leaves it so."""
    with engine_to_ruin(engine_factory, tmp_path_factory.mktemp("ruined")) as victim:
        yield victim


# So that one prompt makes one long step.
MOST_TOKENS = 12_288
LONG_PROMPTS = (
    *("--hf-overrides", json.dumps({"text_config": {"max_position_embeddings": MOST_TOKENS}})),
    *("--max-model-len", str(MOST_TOKENS)),
)


@pytest.fixture(scope="session")
def two_workers(engine_factory: Callable[..., DemoEngine]) -> DemoEngine:
    """An engine of two workers for the files that begin with test_two_ranks; the last test of them kills it."""
    return engine_factory(tensor_parallel=2, extra_args=LONG_PROMPTS)


# What a worker is asked waits for the step it is in, which takes a slow machine longer than the default allows.
PATIENT = {"HIGHWATER_RPC_DEADLINE_SECONDS": "60"}


@pytest.fixture(scope="session")
def sidecar(engine: DemoEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoSidecar]:
    """A sidecar beside the shared engine, with the policy in observe mode, so that it acts only when told to."""
    settings = {"HIGHWATER_POLICY__MODE": "observe", **PATIENT}
    with sidecar_beside(engine, tmp_path_factory.mktemp("sidecar"), **settings) as started:
        yield started


@contextmanager
def sidecar_beside(engine: DemoEngine, folder: Path, **settings: str) -> Iterator[DemoSidecar]:
    with DemoSidecar(engine.url, folder=folder, settings=settings) as started:
        wait_for(started, lambda report: report["engine"]["state"] == "ready")
        yield started


def wait_for(sidecar: DemoSidecar, wanted: Callable[[dict[str, Any]], bool], seconds: float = 240.0) -> dict[str, Any]:
    """The first report that is as wanted; fails with the last one."""
    deadline = time.monotonic() + seconds
    while True:
        report: dict[str, Any] = sidecar.call("GET", "/memory")
        if wanted(report):
            return report
        assert time.monotonic() < deadline, json.dumps(report)  # of anything else pytest shows the first words
        time.sleep(0.2)


@pytest.fixture(scope="session")
def record() -> Callable[..., None]:
    """`record(version, remedy, way, outcome, figures)` keeps a result for `docs/compat.md`; see `Result`."""
    path = os.environ.get(RESULTS)

    def keep_result(version: str, remedy: str, way: str, outcome: str, figures: dict[str, float | str]) -> None:
        if path:
            keep(Path(path), Result(version, remedy, way, outcome, figures))

    return keep_result


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[..., Callable[[str], list[Any]]]]:
    """`prometheus(target, path, params)` starts a real Prometheus that scrapes it and returns a function to query."""
    process = KeptProcess("prometheus", tmp_path / "prometheus.log")
    port = free_port()

    def start(target: str, path: str, params: dict[str, list[str]]) -> Callable[[str], list[Any]]:
        job = {
            "job_name": "highwater",
            "metrics_path": path,
            "params": params,
            "scrape_interval": "1s",
            "static_configs": [{"targets": [target]}],
        }
        config = tmp_path / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        process.start(command, env=dict(os.environ), cwd=tmp_path)
        process.wait_until_answers(port, "/-/ready", 300.0)

        def query(expression: str) -> list[Any]:
            deadline = time.monotonic() + 60.0
            while True:
                answer = httpx.get(
                    f"http://127.0.0.1:{port}/api/v1/query",
                    params={"query": expression},
                    trust_env=False,
                    timeout=LIMIT_SECONDS,
                ).json()
                if answer["data"]["result"] or time.monotonic() > deadline:
                    return list(answer["data"]["result"])
                time.sleep(0.2)

        return query

    yield start
    process.stop()


def ask_all(engine: DemoEngine, op: str, payload: str = "{}") -> list[dict[str, Any]]:
    body = {"method": "highwater_rpc", "args": [op, payload]}
    response = httpx.post(f"{engine.url}/collective_rpc", json=body, timeout=60, trust_env=False)
    return [json.loads(text) for text in response.raise_for_status().json()["results"]]

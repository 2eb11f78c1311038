"""What each vLLM can do is found out without acting on it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from highwater.engine.capabilities import (
    PROBED_PATHS,
    REDETECT_SECONDS,
    Capabilities,
    Detection,
    detect,
    no_extension,
    parse_version,
)
from highwater.engine.client import Engine
from highwater.process.clocks import Clocks
from highwater.process.errors import EngineRefused, EngineUnreachable
from tests.fakes.engine import EXTENSION, FakeClock, FakeEngine

# version: reset_mm_cache, reset_encoder_cache, is_paused
MATRIX = {
    "0.11.0": (False, False, False),
    "0.12.0": (True, False, True),
    "0.16.0": (True, True, True),
    "0.28.0": (True, True, True),
    "0.32.0": (True, True, True),
    "0.33.0": (True, True, True),
}
versions = pytest.mark.parametrize("version", MATRIX)
documented = pytest.mark.parametrize("openapi", [True, False], ids=["openapi", "probed"])


async def detected(fake: FakeEngine, *, assume_extension: bool = False) -> Capabilities:
    async with Engine("http://engine:8000", transport=fake.transport()) as engine:
        return await detect(engine, assume_extension=assume_extension)


@pytest.mark.parametrize(
    ("balancer", "replicas"),
    [
        ({}, 8),
        ({"data_parallel_external_lb": True, "data_parallel_size_local": 1}, 1),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 4}, 4),
        ({"data_parallel_external_lb": False, "data_parallel_hybrid_lb": False, "data_parallel_size_local": 4}, 8),
    ],
    ids=["older", "external", "hybrid", "headless nodes beside it"],
)
async def test_only_a_servers_own_replicas_count(balancer, replicas):
    class Server:
        async def get_json(self, path, **_):
            sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 8}
            info = {"vllm_config": {"parallel_config": sizes | balancer}}
            return info if path == "/server_info" else {"version": "0.32.0", "paths": {}}

    found = await detect(Server())
    assert (found.data_parallel, found.ranks_expected) == (replicas, 2 * replicas)


@versions
@documented
async def test_the_matrix_of_versions(version, openapi):
    """The OpenAPI page and the 405 probes lead to the same, on every version."""
    found = await detected(FakeEngine(version, openapi=openapi))
    mm, encoder, is_paused = MATRIX[version]
    assert (found.reset_mm_cache, found.reset_encoder_cache) == (mm, encoder)
    assert (found.version, found.dev_mode, found.collective_rpc, found.server_info) == (version, True, True, True)
    assert (found.reset_prefix_cache, found.is_paused) == (True, is_paused)
    assert (found.tensor_parallel, found.ranks_expected) == (2, 2)
    assert found.model == "Qwen/Qwen3-VL-32B-Instruct"


@versions
@documented
async def test_without_development_mode_there_is_little(version, openapi):
    found = await detected(FakeEngine(version, openapi=openapi, dev_mode=False))
    assert not any((found.dev_mode, found.collective_rpc, found.server_info))
    assert not any((found.reset_prefix_cache, found.reset_mm_cache, found.reset_encoder_cache))
    assert (found.extension, found.ranks_expected) == (None, None)


@versions
@documented
async def test_detection_never_acts(version, openapi):
    """A POST would act, and CORS middleware answers every OPTIONS: only GETs are sent."""
    fake = FakeEngine(version, openapi=openapi)
    await detected(fake)
    assert {call.method for call in fake.calls} == {"GET"}
    assert not fake.asked("/is_sleeping"), "nobody reads it"
    assert bool(fake.asked("/collective_rpc")) is not openapi, "the page is enough where there is one"


@pytest.mark.parametrize(
    ("extension", "assume", "allowed"),
    [
        (EXTENSION, False, True),
        ("mine.Both", False, False),
        ("mine.Both", True, True),
        (None, False, False),
        (None, True, True),
    ],
)
async def test_worker_calls_need_our_extension(extension, assume, allowed):
    found = await detected(FakeEngine(extension=extension), assume_extension=assume)
    assert (found.collective_rpc, found.extension) == (allowed, extension)


async def test_the_operators_word_makes_no_route():
    assert not (await detected(FakeEngine(dev_mode=False), assume_extension=True)).collective_rpc


@pytest.mark.parametrize("status", [422, 500])
async def test_an_engine_that_cannot_dump_its_configuration(status):
    """Versions that answer /server_info with an error: the extension is not known, so it is not called."""
    fake = FakeEngine()
    fake.failing["/server_info"] = status
    found = await detected(fake)
    assert (found.collective_rpc, found.extension, found.ranks_expected) == (False, None, None)
    assert (found.dev_mode, found.server_info) == (True, False)


async def test_an_engine_that_is_not_there_raises():
    fake = FakeEngine()
    fake.down = True
    with pytest.raises(EngineUnreachable):
        await detected(fake)


@pytest.mark.parametrize(
    ("there", "is_vllm"),
    [
        ({}, False),
        ({"/": 200, "/openapi.json": 200, "/metrics": 200}, False),  # another server that is well
        ({"/health": 200}, True),
        ({"/health": 503}, True),
        ({"/version": 401, "/health": 401}, True),  # both behind a key
        ({"/v1/models": 200}, True),  # the others behind a prefix
        ({"/v1/models": 401}, True),
    ],
)
async def test_what_knows_no_path_of_every_vllm_is_none(there, is_vllm):
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(there.get(request.url.path, 404), json={"paths": {}})

    async with Engine("http://engine:8000", transport=httpx.MockTransport(answer)) as engine:
        if is_vllm:
            assert (await detect(engine)).version is None
            return
        with pytest.raises(EngineRefused, match=r"at http://engine:8000 is no vLLM .* is engine_url right"):
            await detect(engine)


async def test_an_encoder_cache_connector_is_seen():
    fake = FakeEngine()
    fake.ec_connector = True
    assert (await detected(fake)).ec_connector
    assert not (await detected(FakeEngine())).ec_connector


async def test_a_kv_connector_is_named_where_the_configuration_shows_it():
    fake = FakeEngine()
    assert (await detected(fake)).kv_connector == ""
    fake.kv_connector = "NixlConnector"
    assert (await detected(fake)).kv_connector == "NixlConnector (kv_producer)"
    assert (await detected(FakeEngine(dev_mode=False))).kv_connector is None


async def test_ranks_are_counted_over_all_engines():
    assert (await detected(FakeEngine(tensor_parallel=4, data_parallel=2))).ranks_expected == 8


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.32.0", "0.32.0"), ("0.32.0+cpu", "0.32.0"), ("0.12.0rc1", "0.12.0"), ("0.31.1.dev5+gabc", "0.31.1")],
)
def test_a_version_is_compared_by_its_release(text, release):
    assert str(parse_version(text)) == release
    assert Capabilities(version=text).at_least(release)
    assert not Capabilities(version=text).at_least("0.99")


@pytest.mark.parametrize("text", [None, "", "dev", "v?"])
def test_an_unknown_version_is_no_version(text):
    assert parse_version(text) is None
    assert not Capabilities(version=text).at_least("0.0.1")


def test_what_is_shown_repeats_nothing():
    assert {"version", "model"}.isdisjoint(Capabilities(version="0.32.0").public())
    assert len(PROBED_PATHS) == len(set(PROBED_PATHS))


@pytest.mark.parametrize("root_path", ["", "/llm", "/llm/prod"])
async def test_the_root_path_is_what_the_page_says(root_path):
    fake = FakeEngine()
    fake.root_path = root_path
    assert (await detected(fake)).root_path == root_path
    fake.openapi = False
    assert (await detected(fake)).root_path is None


# --- one object knows what the engine can do, and no other allows worker calls ---


APP = Path(__file__).parents[3] / "app" / "highwater"


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def fake(clock):
    return FakeEngine(clock=clock)


@pytest.fixture
async def engine(fake, clock):
    async with Engine("http://engine:8000", transport=fake.transport(), clocks=Clocks(clock)) as client:
        yield client


@pytest.fixture
def detection(engine, clock):
    return Detection(engine, assume_extension=False, clocks=Clocks(clock))


def test_no_module_outside_of_engine_allows_worker_calls():
    texts = {path.relative_to(APP): path.read_text(encoding="utf-8") for path in APP.rglob("*.py")}
    callers = {
        path.parent.name for path, text in texts.items() if re.search(r"\.(allow|forbid)_rpc\(|\.rpc_allowed = ", text)
    }
    assert callers == {"engine"}


async def test_worker_calls_are_allowed_from_the_detection_until_the_engine_is_lost(detection, engine):
    assert not engine.rpc_allowed
    await detection.detect()
    assert engine.rpc_allowed
    detection.detect_again()
    assert not engine.rpc_allowed
    assert detection.is_due(is_recorded=True)


async def test_an_engine_without_the_extension_is_detected_again_after_a_while(detection, fake, clock):
    """Unless its recorders show every rank: then no worker need be called."""
    fake.extension = None
    await detection.detect()
    assert not detection.is_due(is_recorded=False)
    clock.advance(REDETECT_SECONDS)
    assert (detection.is_due(is_recorded=False), detection.is_due(is_recorded=True)) == (True, False)


async def test_recorders_allow_calls_until_one_fails(detection, engine, fake):
    fake.extension = None
    await detection.detect()
    detection.trust_recorders(offers_calls=True, are_read=True)
    assert (engine.rpc_allowed, detection.has_extension) == (True, False)
    fake.failing["/collective_rpc"] = 500
    with pytest.raises(EngineRefused):
        await engine.rpc("memory")
    detection.trust_recorders(offers_calls=True, are_read=True)
    assert not engine.rpc_allowed


async def test_where_the_workers_are_ready_to_be_called_only_the_development_mode_is_missing(detection, fake):
    """A watched engine has the worker package already: who follows the advice must not add it a second time."""
    fake.extension, fake.dev_mode = None, False
    await detection.detect()
    assert "--worker-extension-cls" in (no_extension(detection.capabilities) or "")
    detection.trust_recorders(offers_calls=True, are_read=True)
    assert no_extension(detection.capabilities) == (
        "workers can be called in vLLM's development mode only: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
    )
    assert "has_operations" not in detection.public_capabilities
    detection.trust_recorders(offers_calls=False, are_read=True)
    assert "--worker-extension-cls" in (no_extension(detection.capabilities) or "")


async def test_another_engine_is_trusted_anew(detection, engine, fake):
    fake.failing["/collective_rpc"] = 500
    await detection.detect()
    with pytest.raises(EngineRefused):
        await engine.rpc("memory")
    detection.forget_engine()
    assert (engine.has_rpc_failed, engine.rpc_allowed, detection.is_current) == (False, False, False)

"""One object knows what the engine can do, and no other allows worker calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.engine.capabilities import REDETECT_SECONDS, Detection, no_extension
from highwater.engine.client import Engine
from highwater.errors import EngineRefused
from highwater.process.clocks import Clocks
from tests.fakes.engine import FakeClock, FakeEngine

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
    """Another one might do so before the extension is known to be loaded."""
    texts = {path.relative_to(APP): path.read_text(encoding="utf-8") for path in APP.rglob("*.py")}
    callers = {path.parent.name for path, text in texts.items() if ".allow_rpc(" in text or ".forbid_rpc(" in text}
    assert callers == {"engine"}


async def test_worker_calls_are_allowed_from_the_detection_until_the_engine_is_lost(detection, engine):
    """The engine that responds next may be a different one."""
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
    """Their files may be another engine's."""
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
    """A failure is that of the engine that failed."""
    fake.failing["/collective_rpc"] = 500
    await detection.detect()
    with pytest.raises(EngineRefused):
        await engine.rpc("memory")
    detection.forget_engine()
    assert (engine.has_rpc_failed, engine.rpc_allowed, detection.is_current) == (False, False, False)

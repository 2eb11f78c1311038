"""The terminal's commands beside a real engine, and at the engine itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from highwater.demo.traffic import send_images
from tests.engine.conftest import wait_for

CACHE_LEAST = 4 * 2**20


def ran(*arguments: str, url: str, status: int | None = 0) -> str:
    """What a command printed, which must have ended so; None: however."""
    command = [sys.executable, "-m", "highwater", *arguments, "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert status in (None, done.returncode), (arguments, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture
async def filled(engine, sidecar):
    """The sidecar, with images in the engine's encoder cache."""
    sent = await send_images(sidecar.url, engine.served_model, images=range(900, 908), concurrency=4)
    assert sent.failed == 0
    wait_for(sidecar, lambda report: (report["encoder_cache"] or {}).get("device_bytes", 0) >= 8 * CACHE_LEAST)
    return sidecar


async def test_the_commands_tell_what_the_sidecar_knows(filled):
    report = json.loads(ran("top", "--once", "--json", url=filled.url))
    assert report["ranks"][0]["components"]["encoder_cache_bytes"] >= CACHE_LEAST
    shown = ran("top", url=filled.url)
    assert "0 cpu" in shown
    later = json.loads(ran("top", "--once", "--json", url=filled.url))  # the last images may have come in between
    assert any(f"{one['encoder_cache']['entries']} entries" in shown for one in (report, later))
    ran("mark", "before the reset", url=filled.url)
    results = json.loads(ran("reclaim", "reset-encoder-cache", "--json", url=filled.url))["results"]
    assert results[0]["freed_bytes"]["components"]["encoder_cache_bytes"] >= CACHE_LEAST
    since = ran("status", "--since", "before the reset", url=filled.url, status=None)  # the host may be full
    assert ": ready" in since
    assert "reset_encoder_cache done" in since
    assert "- encoder cache" in since


async def test_check_finds_nothing_wrong(filled):
    findings = json.loads(ran("check", "--json", url=filled.url))["findings"]
    levels = {finding["name"]: finding["level"] for finding in findings}
    # The tests' engine is started by a module of theirs: such a command line does not say whether it opens a gRPC port.
    assert {name for name, level in levels.items() if level in ("fail", "skip")} <= {"gRPC"}
    assert levels["extension"] == levels["ranks"] == levels["thresholds"] == levels["exposure"] == "ok"
    assert levels["policy"] == "note"


@pytest.mark.parametrize("command", [["top"], ["status"], ["check"], ["reclaim"], ["mark", "x"]], ids=" ".join)
def test_vllm_itself_is_no_sidecar(engine, command):
    assert "no Highwater sidecar (vLLM itself" in ran(*command, url=engine.url, status=3)

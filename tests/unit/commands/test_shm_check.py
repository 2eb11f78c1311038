"""`highwater check` on `/dev/shm`: before the SIGBUS, and skipped where nobody sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from highwater.diagnose.rules.host import host_findings
from highwater.host.reading import EngineMemorySettings, ShmMemory, ShmOwner
from highwater.host.report import HostReport, report_of
from highwater.units import MIB
from tests.unit.commands.test_setup_checks import facts, result
from tests.unit.host.recorded import reading

NEEDS_664_MIB = EngineMemorySettings(tensor_parallel=2, pipeline_parallel=1, executor="mp", device="cuda")


def host(size: int, free: int, promised: int, engine: EngineMemorySettings | None = None):
    """What a sidecar responds about a `/dev/shm` of so many MiB, and an engine with these settings."""
    owner = ShmOwner(owner="other", files=1, used_bytes=0, promised_bytes=promised * MIB)
    shm = ShmMemory(
        size_bytes=size * MIB, used_bytes=0, free_bytes=free * MIB, owners=(owner,), promised_bytes=promised * MIB
    )
    report = report_of(replace(reading(), shm=shm, engine=engine), judge=host_findings)
    return TypeAdapter(HostReport).dump_python(report, mode="json")


@pytest.mark.parametrize(
    ("given", "level", "word"),
    [
        ({}, "skip", "HIGHWATER_RECORDER_DIR"),
        ({"reading": {"shm": None}}, "skip", "not known"),
        ({"reading": 5}, "skip", "not known"),
        (host(2000, 1900, 100, NEEDS_664_MIB), "ok", "can need 664 MiB, and what NCCL need is not known"),
        (host(2000, 1900, 100), "ok", "no worker reports its settings"),
        (host(64, 4, 100, NEEDS_664_MIB), "fail", "4.0 MiB of 64.0 MiB free, and files in use may still take 100 MiB"),
        (host(64, 4, 100, NEEDS_664_MIB), "fail", "too small by 96.0 MiB"),
        (host(64, 64, 0, NEEDS_664_MIB), "warn", "664 MiB of /dev/shm, which has 64.0 MiB, 64.0 MiB free"),
        (host(64, 64, 0, NEEDS_664_MIB), "warn", "by 600 MiB before a SIGBUS, and what NCCL need is not known"),
    ],
)
def test_the_level_follows_from_what_is_free_promised_and_needed(given, level, word):
    """Files that have promised more than there is are a failure; a rule's sum is a warning."""
    found = result("/dev/shm", facts(host=given))
    assert (found.level, word in found.text) == (level, True), found.text
    assert (found.change is not None and "--shm-size" in found.change) == (level in {"warn", "fail"})

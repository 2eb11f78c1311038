"""Logs as engines and their collectors write them in the field, each with what is right of it (field_cases/)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from highwater.diagnose.evidence import RankEvidence
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.store import IncidentStore
from highwater.http.text.incidents import incident_markdown
from highwater.model.components import account
from highwater.model.engine import EngineStatus
from highwater.model.rank import Device, RankReading, WorkerMemory
from highwater.model.units import GIB
from highwater.process.clocks import Clocks
from tests.fakes.engine import FakeClock
from tests.fakes.incident import AT, evidence

FOLDER = Path(__file__).with_name("field_cases")
ANSWERS: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "answers.toml").read_text())
CONTENTS = {path.stem: path.read_bytes() for path in FOLDER.glob("*.log")}
ENGINE = EngineStatus(url="http://127.0.0.1:8000", state="gone", version="0.32.0", model="m")


def read_of(rank: int, free: float, whole: float, at: float) -> RankReading:
    """A worker's device, and nothing else of it."""
    return account(
        WorkerMemory(
            rank=rank,
            dp_rank=0,
            pid=None,
            taken_at=at,
            device=Device(type="cuda"),
            free_bytes=int(free * GIB),
            used_bytes=int((whole - free) * GIB),
            total_bytes=int(whole * GIB),
        )
    )


async def told_of(
    incidents: Incidents, write: Callable[[bytes], object], content: bytes, answer: dict[str, Any]
) -> list[str]:
    """What is written of a log that is written while its engine ends, or fails to start."""
    await incidents.failed_starts()  # the log is empty, and no engine responds
    write(content)
    if answer["kind"] == "start":
        for start in await incidents.failed_starts(at_once=True):
            given = replace(evidence("start_failed", at=AT, engine=replace(ENGINE, state="starting")), start=start)
            await incidents.open_incident(replace(given, ranks=()))
    else:
        free, whole, *ready = answer["gib"]
        numbers = range(answer.get("ranks", 1))
        ranks = tuple(RankEvidence(rank=n, dp_rank=0, reading=read_of(n, free, whole, AT - 2)) for n in numbers)
        baseline = tuple(read_of(n, was, whole, AT - 600) for n in numbers for was in ready)
        given = evidence("died", at=AT, engine=ENGINE, baseline=baseline, reason="connection refused")
        await incidents.open_incident(replace(given, ranks=ranks))
    await incidents.complete(at_once=True)
    kept = [await incidents.read(headline.id) for headline in await incidents.headlines()]
    return [" ".join(incident_markdown(each).lower().split()) for each in kept if each is not None]


@pytest.fixture
def incidents(tmp_path):
    made = Incidents(IncidentStore(None), engine_log=tmp_path / "engine.log", clocks=Clocks(FakeClock(), FakeClock(AT)))
    yield made
    made.close()


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_log_of_the_field_is_told_rightly(incidents, tmp_path, name):
    answer = ANSWERS[name]
    told = await told_of(incidents, (tmp_path / "engine.log").write_bytes, CONTENTS[name], answer)
    assert len(told) == (answer["kind"] != "orderly")
    for text in told:
        assert [said for said in answer.get("says", ()) if not re.search(said, text)] == [], text
        assert [said for said in answer.get("never", ()) if re.search(said, text)] == [], text


def test_every_log_has_its_answer():
    assert set(CONTENTS) == set(ANSWERS)

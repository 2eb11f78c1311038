"""Versions that differ by one: sidecar, worker package and command line, each the older and each the newer one.

docs/upgrade.md says what these hold. The sidecar is replaced while the engine runs, the worker package only with the
engine: so either may be the older for weeks.
"""

from __future__ import annotations

import json

import pytest

from highwater.diagnose.incidents.store import IncidentStore
from highwater.process.clocks import Clocks
from highwater.process.errors import EngineGarbled, SidecarUnreachable
from highwater.process.state_file import StateFile
from highwater.terminal.client import report_of
from highwater.watch.recorder.folder import RecorderFolder
from highwater.watch.sources import EngineBudgets, Workers
from highwater_worker import MemoryExtension
from tests.fakes.engine import USED_READY
from tests.fakes.ring import HEADER_BYTES, INSTANCE, FakeWriter, header, memory
from tests.unit.terminal.reports import as_json, report
from tests.unit.watch.recorder.test_folder import Machine

NEXT_KEYS = {"added_in_the_next_version": {"deep": [1, None, "x"]}}


def answers(change):
    return lambda given: {"results": [json.dumps(change(dict(one))) for one in given]}


# --- worker calls ---


async def test_a_newer_worker_says_more(engine, fake):
    fake.garble = answers(lambda one: {**one, **NEXT_KEYS})
    workers = (await Workers(engine, EngineBudgets(engine, None)).read()).workers
    assert [worker.used_bytes for worker in workers] == [USED_READY, USED_READY]


@pytest.mark.parametrize("key", ["weights_bytes", "kv_cache_bytes", "encoder_cache", "releasable_bytes"])
async def test_an_older_worker_says_less(engine, fake, key):
    """What is missing is unknown, never 0; everything else is read."""
    fake.garble = answers(lambda one: {name: value for name, value in one.items() if name != key})
    workers = (await Workers(engine, EngineBudgets(engine, None)).read()).workers
    assert [worker.used_bytes for worker in workers] == [USED_READY, USED_READY]
    assert getattr(workers[0], key) is None


async def test_another_schema_is_refused_by_both_numbers(engine, fake):
    fake.garble = answers(lambda one: {**one, "schema": 2})
    with pytest.raises(EngineGarbled, match="the worker extension speaks schema 2, the sidecar 1"):
        await Workers(engine, EngineBudgets(engine, None)).read()


@pytest.mark.parametrize(
    ("op", "payload", "error"),
    [
        ("defragment", "{}", "op 'defragment' is unknown; known: "),
        ("memory", '{"added_in_the_next_version": 1}', "added_in_the_next_version"),
    ],
)
def test_a_newer_sidecar_asks_for_what_this_worker_lacks(op, payload, error):
    """It is told so in an answer: an exception would desynchronise vLLM's queues."""
    answer = json.loads(MemoryExtension().highwater_rpc(op, payload))
    assert (answer["schema"], answer["ok"]) == (1, False)
    assert error in str(answer["error"])


# --- recorder files ---


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "recorder"
    path.mkdir()
    return path


def read(folder):
    machine = Machine(folder.parent)
    recorder = RecorderFolder(folder, INSTANCE, clocks=Clocks(machine.monotonic, machine.clock), proc=machine.proc.path)
    try:
        return recorder.read(), sorted(recorder.problems)
    finally:
        recorder.close()


def test_a_newer_recorder_writes_more(folder):
    writer = FakeWriter(folder, extension="9.9.9", **NEXT_KEYS)
    writer.sample(memory=memory(**NEXT_KEYS), **NEXT_KEYS)
    records, problems = read(folder)
    writer.close()
    assert [record.newest.used_bytes for record in records] == [memory()["used_bytes"]]
    assert problems == []


@pytest.mark.parametrize("key", ["weights_bytes", "kv_cache_bytes", "encoder_cache"])
def test_an_older_recorder_writes_less(folder, key):
    writer = FakeWriter(folder)
    writer.sample(memory={name: value for name, value in memory().items() if name != key})
    records, problems = read(folder)
    writer.close()
    assert [getattr(record.newest, key) for record in records] == [None]
    assert problems == []


@pytest.mark.parametrize("version", [2, 4])
def test_a_file_of_another_format_is_named_and_costs_only_itself(folder, version):
    writer = FakeWriter(folder)
    writer.sample()
    other = folder / f"highwater-{INSTANCE}-77.ring"
    other.write_bytes(header(b"{}", slots=64, version=version).ljust(HEADER_BYTES, b"\0"))
    records, problems = read(folder)
    writer.close()
    assert len(records) == 1
    assert problems == [f"{other.name}: version {version} unknown"]


# --- the command line ---


def test_a_newer_sidecar_reports_more():
    told = as_json(report())
    told |= NEXT_KEYS
    told["engine"] |= NEXT_KEYS
    told["ranks"] = [rank | NEXT_KEYS for rank in told["ranks"]]
    told["policy"] |= NEXT_KEYS
    assert report_of(told) == report_of(as_json(report()))


@pytest.mark.parametrize("key", ["growth", "encoder_cache", "policy", "progress", "start_failure"])
def test_an_older_sidecar_reports_less(key):
    told = {name: value for name, value in as_json(report()).items() if name != key}
    assert report_of(told).engine.state == "ready"


def test_a_report_of_another_schema_is_one_line():
    with pytest.raises(SidecarUnreachable, match="schema 2 and this command reads 1; use the same version of both"):
        report_of(as_json(report()) | {"schema": 2})


# --- what is kept on disk, and read after an upgrade or a way back ---


def test_a_state_file_of_another_schema_is_set_aside(tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"schema": 2, "policy": {"mode": "observe"}}')
    state = StateFile(path)
    assert state.problem is not None
    state.write("policy", {"mode": "act"})
    assert any("observe" in other.read_text() for other in tmp_path.iterdir() if other != path)


def test_an_incident_of_another_schema_is_listed_and_not_read(tmp_path):
    name = "20260101T000000Z-engine-died-abcd"
    (tmp_path / f"{name}.json").write_text(json.dumps({"schema": 99, "id": name}))
    before = list(tmp_path.iterdir())
    shown = IncidentStore(tmp_path).headlines()
    assert list(tmp_path.iterdir()) == before
    assert ["99" in str(one) for one in shown] == [True]

"""Opening, counting and closing: a storm is one incident, and nothing that a dying engine says breaks the telling."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from highwater.diagnose.evidence import RankEvidence
from highwater.diagnose.incidents import diagnosis, incidents
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.incidents.store import IncidentStore
from highwater.diagnose.incidents.watcher import from_history
from highwater.diagnose.log.reader import read_tail
from highwater.diagnose.rules import book
from highwater.host.reading import ProcessMemory
from highwater.host.report import OomKills
from highwater.model.engine import EngineStatus
from highwater.model.policy import PolicyStatus, RuleStatus
from highwater.model.report import Report
from highwater.process.clocks import Clocks
from highwater.watch.history import History
from tests.fakes.engine import FakeClock, FakeEngine
from tests.fakes.incident import AT, entry, event, evidence, rank, reading, series
from tests.fakes.raising import raising
from tests.unit.diagnose.log.test_starts import ENDED, FAILS, NO_ROOM_START, OOM, WAITS, WARM_UP, WORKER, begins


class Told:
    """A sidecar's incidents, on a clock that only a test moves."""

    def __init__(self, folder, log=None, clock=None) -> None:
        self.clock = clock or FakeClock(AT)
        self.store = IncidentStore(folder)
        self.log, self.later = log, []
        self.incidents = Incidents(self.store, engine_log=log, clocks=Clocks(self.clock, self.clock))

    def write(self, *lines: str) -> None:
        with self.log.open("a") as log:
            log.writelines(f"{line}\n" for line in lines)

    def another(self) -> Told:
        """The next sidecar's, on the same clock."""
        self.later.append(Told(self.store.folder, self.log, self.clock))
        return self.later[-1]

    async def open(self, kind="died", *ranks, **changes):
        return await self.incidents.open_incident(evidence(kind, *ranks, **{"at": self.clock.now} | changes))

    async def fail(self, *lines: str, seconds: float = 60.0) -> None:
        """A start that fails, and is opened as the incident watcher opens it."""
        self.clock.advance(seconds)
        self.write(*lines)
        for start in await self.incidents.failed_starts(at_once=True):
            await self.open("start_failed", rank(), engine=EngineStatus(url="http://e", state="starting"), start=start)

    async def counts(self) -> list[int]:
        return [headline.count for headline in reversed(await self.incidents.headlines())]

    async def ids(self):
        return [headline.id for headline in await self.incidents.headlines()]

    async def only(self):
        (headline,) = await self.incidents.headlines()
        return headline


@pytest.fixture(params=["folder", "memory"])
def told(request, tmp_path) -> Told:
    return Told(tmp_path if request.param == "folder" else None)


@pytest.fixture
def filed(tmp_path) -> Told:
    return Told(tmp_path)


@pytest.fixture
def logged(tmp_path) -> Told:
    """In memory, beside a log that is empty yet."""
    log = tmp_path / "engine.log"
    log.write_text("")
    return Told(None, log)


@pytest.fixture
def starting(tmp_path):
    """In a folder, beside a log of starts; what it and those after it hold open is closed."""
    made = Told(tmp_path, tmp_path / "engine.log")
    made.log.touch()
    yield made
    for one in (made, *made.later):
        one.incidents.close()


async def test_an_incident_holds_what_was_known(told):
    policy = PolicyStatus(
        level="urgent",
        mode="act",
        summary="short by 900 MiB on rank 0",
        rules=(RuleStatus(name="device", signal="device_used_ratio", high_water=0.9, low_water=0.8, phase="urgent"),),
    )
    known = rank(series=series(reading(), [1, 2, 3]), entries=(entry(),), stack=("a.py:1 f",), doing="in a step")
    events = (event("second", AT - 1, kind="state"), event("first", AT - 9, kind="policy", rule="device"))
    headline, is_new = await told.open("died", known, policy=policy, events=events, reason="exit -9")
    incident = await told.incidents.read(headline.id)
    assert is_new
    assert headline.id == "20261121T143233Z-died"
    assert (incident.kind, incident.at, incident.last_at, incident.count, incident.ended_at) == (
        "died",
        AT,
        AT,
        1,
        None,
    )
    assert incident.summary.endswith(". What the sidecar saw: exit -9")
    assert (incident.engine.state, incident.engine.version, incident.engine.requests_running) == ("gone", "0.32.0", 3)
    assert incident.ranks == (known,)
    assert [happened.summary for happened in incident.events] == ["first", "second"]
    assert incident.decisions[0].rule == "device"
    assert incident.policy.rules[0].phase == "urgent"
    assert {finding.name for finding in incident.findings} >= {"policy", "device_had_room"}


async def test_without_a_log_that_is_said(filed):
    await filed.open()
    incident = await filed.incidents.read((await filed.only()).id)
    assert incident.messages == ()
    assert "engine_log is not set" in incident.notes[0]
    assert "set it (HIGHWATER_ENGINE_LOG) to the file that vLLM's output goes to" in incident.notes[0]


async def test_the_log_is_matched(tmp_path):
    (tmp_path / "engine.log").write_text("INFO fine\nEncoder cache miss for ab\n")
    told = Told(None, tmp_path / "engine.log")
    headline, _ = await told.open()
    incident = await told.incidents.read(headline.id)
    assert [message.name for message in incident.messages] == ["encoder_cache_miss"]
    assert "the log says that a worker lacked an encoder output" in incident.summary
    assert incident.notes == ()
    (tmp_path / "engine.log").unlink()
    told.clock.advance(100)
    headline, _ = await told.open()
    assert "no such file" in (await told.incidents.read(headline.id)).notes[0]


# --- storms ---


async def test_a_storm_is_one_incident(told):
    first, _ = await told.open()
    for _ in range(1000):
        told.clock.advance(0.5)
        headline, is_new = await told.open(reason="later")
        assert not is_new
    assert headline.id == first.id
    listed = await told.only()
    assert (listed.count, listed.at, listed.last_at) == (1001, AT, AT + 500)
    incident = await told.incidents.read(first.id)
    assert (incident.count, incident.last_at) == (1001, AT + 500)
    assert incident.reason == ""  # the evidence of the first, which is nearest to the cause


async def test_a_storm_is_not_written_a_thousand_times(filed, monkeypatch):
    writes = []
    write = filed.store.write
    monkeypatch.setattr(filed.store, "write", lambda incident: (writes.append(incident.count), write(incident)))
    for _ in range(101):
        await filed.open()
        filed.clock.advance(0.1)
    assert len(writes) <= 3
    assert (await filed.only()).count == 101
    await filed.incidents.close_all()
    assert writes[-1] == 101


async def test_what_the_log_says_later_is_added(logged):
    headline, _ = await logged.open("hung")
    logged.log.write_text("No available shared memory broadcast block found in 60 seconds.\n")
    logged.clock.advance(30)
    await logged.open("hung")
    assert [known.name for known in (await logged.incidents.read(headline.id)).messages] == ["broadcast_block_wait"]
    logged.log.write_text("Encoder cache miss\n")
    await logged.incidents.close_all()
    assert [known.name for known in (await logged.incidents.read(headline.id)).messages] == ["broadcast_block_wait"]


async def test_a_minute_of_silence_makes_two(told):
    await told.open()
    told.clock.advance(60)
    _, is_new = await told.open()
    assert is_new
    assert await told.ids() == ["20261121T143333Z-died", "20261121T143233Z-died"]


async def test_kinds_do_not_mix(told):
    await told.open("out_of_memory")
    await told.open("died")
    assert await told.ids() == ["20261121T143233Z-out-of-memory", "20261121T143233Z-died"]


async def test_ready_ends_all_that_is_open(told):
    await told.open("out_of_memory")
    told.clock.advance(30)
    await told.open("died")
    told.clock.advance(61)
    await told.open("died")
    told.clock.advance(5)
    ended = await told.incidents.close_all()
    assert {headline.ended_at for headline in ended} == {AT + 96}
    assert len(ended) == 3
    assert await told.incidents.close_all() == ()
    assert {headline.ended_at for headline in await told.incidents.headlines()} == {AT + 96}
    assert (await told.incidents.read(ended[0].id)).ended_at == AT + 96
    told.clock.advance(1)
    assert (await told.open("died"))[1]


async def test_the_findings_of_what_is_open_are_at_hand(told):
    for kind in ("out_of_memory", "died"):
        headline, _ = await told.open(kind)
    names = [one.name for one in told.incidents.open_findings]
    assert {one.name for one in (await told.incidents.read(headline.id)).findings} <= set(names)
    assert len(names) == len(set(names))
    await told.incidents.close_all()
    assert told.incidents.open_findings == ()


async def test_a_death_right_after_a_hang_is_one_incident(told):
    pids = {"series": series(reading(), [1, 2, 3]), "stack": ("a.py:1 f",)}
    hang, _ = await told.open("hung", rank(**pids), rank(reading(1)), reason="rank 1 is dead")
    told.clock.advance(7)
    death, is_new = await told.open("died", rank(series=series(reading(), [3])), reason="nothing answers any more")
    assert (death.id, death.kind, is_new, await told.ids()) == (hang.id, "died", True, [hang.id])
    incident = await told.incidents.read(hang.id)
    first, second = incident.ranks
    assert (incident.at, incident.reason) == (AT + 7, "rank 1 is dead; then: nothing answers any more")
    (ended,) = [one for one in incident.findings if one.name == "hang_ended"]
    assert (ended.weight, ended.title) == ("clue", "it had hung for 7.0 s before")
    assert (len(first.series), first.stack, second.rank) == (3, ("a.py:1 f",), 1)
    assert (told.incidents.counts["hung"], told.incidents.counts["died"]) == (1, 0)
    await told.open("died")
    assert (await told.only()).count == 2


async def test_the_log_read_late_keeps_the_death(logged):
    hang, _ = await logged.open("hung")
    logged.clock.advance(3)
    await logged.open("died")
    logged.log.write_text("Encoder cache miss for ab\n")
    await logged.incidents.complete(at_once=True)
    incident = await logged.incidents.read(hang.id)
    assert (incident.kind, bool(incident.messages)) == ("died", True)


async def test_what_the_log_says_after_the_end_is_not_of_it(logged):
    hang, _ = await logged.open("hung")
    last = "No available shared memory broadcast block found in 60 seconds.\n"
    logged.log.write_text(last)
    await logged.incidents.close_all()
    logged.log.write_text(f"{last}Encoder cache miss for ab\n")
    await logged.incidents.complete(at_once=True)
    incident = await logged.incidents.read(hang.id)
    assert [known.name for known in incident.messages] == ["broadcast_block_wait"]
    assert incident.ended_at == AT


async def test_the_log_of_a_storm_that_goes_on_counts_again(logged):
    storm, _ = await logged.open("out_of_memory")
    await logged.incidents.close_all()
    logged.clock.advance(2)
    _, is_new = await logged.open("out_of_memory")
    logged.log.write_text("Encoder cache miss for ab\n")
    await logged.incidents.complete(at_once=True)
    assert (is_new, len((await logged.incidents.read(storm.id)).messages)) == (False, 1)


@pytest.mark.parametrize(
    ("written", "known"),
    [("", []), ("No available shared memory broadcast block found in 60 seconds.\n", ["broadcast_block_wait"])],
    ids=["nothing yet", "its cause"],
)
async def test_a_log_rotated_after_the_end_adds_and_takes_nothing(tmp_path, written, known, logged):
    logged.log.write_text(written)
    hang, _ = await logged.open("hung")
    await logged.incidents.close_all()
    logged.log.rename(tmp_path / "engine.log.1")
    logged.log.write_text("Encoder cache miss for ab\n")
    await logged.incidents.complete(at_once=True)
    assert [message.name for message in (await logged.incidents.read(hang.id)).messages] == known


async def test_a_probe_that_ends_a_hang_is_said_with_why_it_hung(told):
    hang, _ = await told.open("hung", stopped=(ProcessMemory(role="engine_core", name="EngineCore", pid=7),))
    told.clock.advance(124)
    death, _ = await told.open("died")
    assert death.id == hang.id
    assert death.summary.startswith(
        "The engine died: it was ended from outside, as a liveness probe does, after it had hung for 2 min 4 s; "
        "EngineCore was stopped"
    )


@pytest.mark.parametrize(
    ("line", "kills"),
    [("CUDA out of memory. Tried to allocate 2.00 GiB", None), ("", OomKills(count=1, where="counted"))],
)
async def test_an_end_that_has_a_reason_was_not_from_outside(line, kills, logged):
    await logged.open("hung")
    logged.clock.advance(124)
    logged.log.write_text(
        f"(Worker pid=7) ERROR 11-21 14:32:33 [worker.py:1] torch.OutOfMemoryError: {line}\n" if line else ""
    )
    death, _ = await logged.open("died", oom_kills=kills)
    assert "outside" not in death.summary


async def test_a_death_after_the_engine_was_ready_again_is_an_incident_of_its_own(told):
    await told.open("hung")
    await told.incidents.close_all()
    told.clock.advance(5)
    await told.open("died")
    assert [headline.kind for headline in await told.incidents.headlines()] == ["died", "hung"]


async def test_ready_with_nothing_open_costs_nothing(filed, monkeypatch):
    await filed.incidents.close_all()
    monkeypatch.setattr(incidents.asyncio, "to_thread", raising(AssertionError("a thread was asked")))
    for _ in range(3):
        assert await filed.incidents.close_all() == ()


async def test_out_of_memory_outlives_ready(told):
    await told.open("out_of_memory")
    for _ in range(10):
        told.clock.advance(5)
        await told.incidents.close_all()
        told.clock.advance(5)
        _, is_new = await told.open("out_of_memory")
        assert not is_new
    assert ((await told.only()).count, (await told.only()).ended_at) == (11, None)


async def test_two_in_one_second_have_two_names(told):
    for _ in range(3):
        await told.open()
        await told.incidents.close_all()
    first = "20261121T143233Z-died"
    assert await told.ids() == [f"{first}-3", f"{first}-2", first]


async def test_openings_at_the_same_time_are_one(told):
    seen = await asyncio.gather(*(told.open() for _ in range(8)))
    assert sum(is_new for _, is_new in seen) == 1
    assert (await told.only()).count == 8


# --- another sidecar's ---


async def test_the_next_sidecar_goes_on(tmp_path):
    first = Told(tmp_path)
    headline, _ = await first.open()
    second = Told(tmp_path)
    second.clock.advance(30)
    again, is_new = await second.open()
    assert (again.id, is_new, again.count) == (headline.id, False, 2)
    third = Told(tmp_path)
    third.clock.advance(90)
    assert [ended.id for ended in await third.incidents.close_all()] == [headline.id]
    assert (await Told(tmp_path).only()).ended_at == AT + 90


async def test_one_that_is_gone_is_not_brought_back(filed, tmp_path):
    headline, _ = await filed.open()
    (tmp_path / f"{headline.id}.json").unlink()
    filed.clock.advance(10)
    await filed.open()
    assert [ended.id for ended in await filed.incidents.close_all()] == [headline.id]
    assert await filed.ids() == []


async def test_one_that_is_spoilt_is_left_alone(filed, tmp_path):
    headline, _ = await filed.open()
    (tmp_path / f"{headline.id}.json").write_text("mine")
    filed.clock.advance(10)
    await filed.open()
    await filed.incidents.close_all()
    assert (tmp_path / f"{headline.id}.json").read_text() == "mine"


# --- foreign words ---

NASTY = "</script><script>alert(1)</script>\x1b[2J\u202e\ud800\n" * 40


async def test_foreign_words_come_in_plain(told):
    known = rank(
        reading(device=replace(reading().device, name=NASTY), host=NASTY),
        doing=NASTY,
        stack=(NASTY,) * 99,
        entries=(entry(NASTY),) * 99,
        status=NASTY,
    )
    headline, _ = await told.open(
        "died",
        known,
        engine=EngineStatus(url=NASTY, state="gone", version=NASTY, model=NASTY, hint=NASTY),
        events=(event(NASTY, kind="state"),) * 999,
        reason=NASTY,
    )
    incident = await told.incidents.read(headline.id)
    (seen,) = incident.ranks
    words = [incident.engine.model, incident.reason, seen.doing, seen.status, seen.reading.device.name]
    words += [seen.entries[0].mm_hash, seen.stack[0], incident.events[0].summary, incident.summary]
    assert all(text.isprintable() and len(text) < 2000 for text in words)
    assert (len(seen.stack), len(seen.entries), len(incident.events)) == (16, 20, 200)
    assert told.store.read(headline.id) == incident


async def test_what_cannot_be_diagnosed_is_kept_all_the_same(told, monkeypatch, caplog):
    monkeypatch.setattr(diagnosis, "diagnose", raising(ZeroDivisionError))
    headline, _ = await told.open()
    incident = await told.incidents.read(headline.id)
    assert incident.findings == ()
    assert any("could be diagnosed" in note for note in incident.notes)
    assert "ZeroDivisionError" in caplog.text


async def test_a_rule_that_raises_costs_only_its_own_finding(told, monkeypatch, caplog):
    whole = await told.incidents.read((await told.open())[0].id)
    rule = book.Rule(raising(ZeroDivisionError), frozenset({"incident"}))
    monkeypatch.setattr(book, "RULES", (rule, *book.RULES, rule))
    told.clock.advance(100.0)
    incident = await told.incidents.read((await told.open())[0].id)
    assert [one.name for one in incident.findings] == [one.name for one in whole.findings]
    assert [note for note in incident.notes if "not all" in note] == [
        "not all numbers could be diagnosed; the sidecar's log says why"
    ]
    assert caplog.text.count("Traceback") == 2


# --- evidence from what is there anyway ---


def test_evidence_comes_from_the_history():
    clock = FakeClock(AT)
    fake = FakeEngine(clock=clock)
    history = History(100, clocks=Clocks(wall=clock))
    for _ in range(3):
        history.add(Report(taken_at=clock.now, stale=False, engine=evidence().engine, ranks=fake.readings()))
        clock.advance(1)
    ranks = fake.readings()
    former = replace(ranks[0], pid=1)
    made = from_history((former, ranks[1]), history.readings(0.0, 0.0)[1])
    assert [(known.rank, len(known.series)) for known in made] == [(0, 0), (1, 3)]
    first = made[1].series[0]
    assert (first.at, first.used_bytes) == (AT, ranks[1].used_bytes)
    assert first.components == ranks[1].components
    assert first.torch.reserved_bytes == ranks[1].torch.reserved_bytes
    assert made[1].reading == ranks[1]


@pytest.mark.parametrize(
    ("given", "name"),
    [((0, None), "rank 0"), ((1, 0), "rank 1"), ((1, 2), "rank 2.1"), ((None, None), "rank ?")],
)
def test_ranks_have_names(given, name):
    number, dp_rank = given
    assert RankEvidence(rank=number, dp_rank=dp_rank).name == name


# --- an orderly end ---

STOPPED = "(APIServer pid=1) INFO:     Shutting down\n(APIServer pid=1) INFO:     Application shutdown complete.\n"


async def test_an_orderly_end_by_the_log_is_no_incident(tmp_path):
    (tmp_path / "engine.log").write_text(STOPPED)
    told = Told(None, tmp_path / "engine.log")
    assert await told.open("died", rank(reading(used=62_300 * 1024 * 1024))) is None
    assert await told.ids() == []


@pytest.mark.parametrize("has_folder", [True, False])
async def test_what_the_log_says_late_withdraws_an_incident(tmp_path, has_folder):
    log = tmp_path / "engine.log"
    log.write_text("")
    told = Told(tmp_path if has_folder else None, log)
    headline, _ = await told.open()
    assert told.incidents.counts["died"] == 0  # a counter that falls is a restart to Prometheus
    log.write_text(STOPPED)
    withdrawn = await told.incidents.complete(at_once=True)
    assert [one.id for one in withdrawn] == [headline.id]
    assert (await told.ids(), told.incidents.counts["died"], told.incidents.is_one_open) == ([], 0, False)
    assert await told.incidents.read(headline.id) is None


@pytest.mark.parametrize(
    "last",
    ["", "(EngineCore pid=9) ERROR 11-21 14:32:33 [core.py:1512] RuntimeError: CUDA driver error: out of memory\n"],
)
async def test_a_death_without_an_orderly_end_stays(last, logged):
    await logged.open()
    logged.log.write_text(last + (STOPPED if last else ""))
    assert await logged.incidents.complete(at_once=True) == ()
    assert ((await logged.only()).kind, logged.incidents.counts["died"]) == ("died", 1)


async def test_a_hang_that_somebody_ends_is_no_orderly_end(logged):
    await logged.open("hung")
    logged.clock.advance(100)
    logged.log.write_text(STOPPED)
    assert await logged.open("died") is not None


async def test_a_log_that_begins_late_is_told(logged):
    headline, _ = await logged.open()
    assert "it has no line of this run" in headline.summary
    logged.log.write_text("(APIServer pid=1) ERROR 11-21 14:32:33 [async_llm.py:480] AsyncLLM output_handler failed.\n")
    await logged.incidents.complete(at_once=True)
    incident = await logged.incidents.read(headline.id)
    assert "device memory was not short" in incident.summary
    assert (await logged.only()).summary == incident.summary
    assert incident.notes == ()


async def test_a_log_that_is_rotated_meanwhile_takes_nothing_back(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("(EngineCore pid=9) INFO 11-21 14:32:33 [core.py:120] hello\n")
    told = Told(None, log)
    headline, _ = await told.open()
    log.write_text("")
    await told.incidents.complete(at_once=True)
    assert (await told.incidents.read(headline.id)).summary == headline.summary
    assert "device memory was not short" in headline.summary


# --- starts that fail, and what the log says of an end ---


async def test_a_message_of_an_earlier_life_is_no_cause(starting):
    starting.write(OOM)
    await starting.incidents.begin_life()
    starting.write(WORKER)
    headline, _ = await starting.open()
    assert [message.name for message in (await starting.incidents.read(headline.id)).messages] == ["worker_died"]
    assert read_tail(starting.log)[0] != []


async def test_a_start_that_fails_the_same_way_within_the_hour_is_counted(starting):
    for pid in range(1, 201):
        await starting.fail(*begins(pid), *NO_ROOM_START)
    assert await starting.counts() == [200]
    (headline,) = await starting.incidents.headlines()
    assert (headline.kind, headline.at, headline.last_at) == ("start_failed", AT + 60, starting.clock.now)
    assert headline.summary == "The engine did not start: the log says that nothing is left for the KV cache"
    await starting.fail(*begins(201), WARM_UP, ENDED)
    assert await starting.counts() == [200, 1]
    await starting.fail(*begins(202), WARM_UP, ENDED, seconds=3601.0)
    assert await starting.counts() == [200, 1, 1]


async def test_starts_that_raise_differently_are_an_incident_each_in_whatever_order(starting):
    raised = ["FileNotFoundError: /models/x", "ValueError: no quantization foo", "ValueError: port {n} is taken"]
    for number in range(9):
        error = raised[number % 3].format(n=8000 + number)
        trace = [
            f"{FAILS}{line}" for line in ("EngineCore failed to start.", "Traceback (most recent call last):", error)
        ]
        await starting.fail(*begins(number + 1), *trace, ENDED)
    assert await starting.counts() == [3, 3, 3]
    summaries = " ".join(one.summary for one in await starting.incidents.headlines())
    assert all(error.format(n=8002) in summaries for error in raised)


async def test_after_the_engine_was_ready_it_is_another_incident(starting):
    await starting.fail(*begins(1), *NO_ROOM_START)
    await starting.incidents.close_all()
    await starting.fail(*begins(2), *NO_ROOM_START)
    assert await starting.counts() == [1, 1]


async def test_a_sidecar_that_starts_tells_no_start_again(starting):
    await starting.fail(*begins(1), *NO_ROOM_START)
    again = starting.another()
    await again.fail()
    assert await starting.counts() == [1]
    await again.fail(*begins(2), *NO_ROOM_START)
    assert await again.counts() == [2]


# --- the last lines ---


async def test_the_log_is_read_once_more_after_five_seconds(starting):
    headline, _ = await starting.open()
    starting.write(OOM, WORKER.replace("None", "-9"))
    assert not starting.incidents.is_late_due
    starting.clock.advance(4.9)
    assert not starting.incidents.is_late_due
    starting.clock.advance(0.1)
    assert starting.incidents.is_late_due
    await starting.incidents.complete()
    assert not starting.incidents.is_late_due
    incident = await starting.incidents.read(headline.id)
    assert [message.name for message in incident.messages] == ["cuda_out_of_memory", "worker_died"]
    assert incident.summary.startswith("The engine died: the log says that PyTorch found no room on the GPU")
    assert [listed.summary for listed in await starting.incidents.headlines()] == [incident.summary]
    assert "ended_by_signal" in {finding.name for finding in incident.findings}
    assert (incident.id, incident.count, incident.at) == (headline.id, 1, headline.at)


async def test_what_was_counted_meanwhile_stays(starting):
    headline, _ = await starting.open()
    starting.clock.advance(1.0)
    await starting.open()
    starting.write(OOM)
    await starting.incidents.close_all()
    await starting.incidents.complete(at_once=True)
    incident = await starting.incidents.read(headline.id)
    assert (incident.count, incident.ended_at) == (2, starting.clock.now)
    assert [message.name for message in incident.messages] == ["cuda_out_of_memory"]


async def test_where_the_log_says_no_more_nothing_is_written(starting, monkeypatch):
    starting.write(OOM)
    await starting.open()
    writes = []
    monkeypatch.setattr(starting.incidents._store, "write", writes.append)
    starting.clock.advance(5.0)
    await starting.incidents.complete()
    assert writes == []


async def test_of_a_hang_the_log_is_read_again_after_vllm_says_so(starting):
    headline, _ = await starting.open("hung")
    starting.clock.advance(5.0)
    await starting.incidents.complete()
    starting.write(WAITS)
    starting.clock.advance(69.0)
    assert not starting.incidents.is_late_due
    starting.clock.advance(1.0)
    await starting.incidents.complete()
    assert [message.name for message in (await starting.incidents.read(headline.id)).messages] == [
        "broadcast_block_wait"
    ]


# --- how many ---


async def test_incidents_are_counted_by_kind_and_a_restart_remembers(starting, tmp_path):
    """Also those that made room: a count that falls would look like a burst of new ones."""
    store = IncidentStore(tmp_path, keep=2)
    incidents = Incidents(store, clocks=Clocks(wall=starting.clock))
    assert incidents.counts == {"died": 0, "hung": 0, "out_of_memory": 0, "start_failed": 0}
    for _ in range(5):
        starting.clock.advance(100.0)
        await incidents.open_incident(evidence("died", at=starting.clock.now))
    await incidents.open_incident(evidence("died", at=starting.clock.now))  # counted there
    await incidents.complete(at_once=True)
    assert incidents.counts["died"] == 5
    assert len(await incidents.headlines()) == 2
    again = Incidents(IncidentStore(tmp_path, keep=2), clocks=Clocks(wall=starting.clock))
    assert again.counts == {"died": 5, "hung": 0, "out_of_memory": 0, "start_failed": 0}

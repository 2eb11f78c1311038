"""The control plane on a real port, every path of it, with a fake engine behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import pytest_asyncio

from highwater.act.rules import PolicySettings
from highwater.engine.client import Engine
from highwater.http.services import MAX_WAITING
from highwater.model.engine import Progress
from highwater.server.main import CONTROL_BODY_BYTES, create_app
from highwater.server.settings import Settings
from highwater.server.sidecar import Sidecar
from tests.fakes.engine import CACHED, IMAGE_BYTES, IMAGES, TOTAL, USED_AFTER, USED_READY, FakeEngine
from tests.http.conftest import serving, status_of
from tests.patience import LIMIT_SECONDS, until

TOKEN = "correct-horse-battery"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
ENCODER_BYTES = 2 * IMAGES * IMAGE_BYTES
OWN_PATHS = {
    "/memory": {"get"},
    "/memory/budget": {"get"},
    "/memory/encoder-cache": {"get"},
    "/memory/encoder-cache/restore": {"post"},
    "/memory/requests": {"get"},
    "/memory/history": {"get"},
    "/memory/growth": {"get"},
    "/memory/findings": {"get"},
    "/memory/host": {"get"},
    "/memory/events": {"get"},
    "/memory/incidents": {"get"},
    "/memory/incidents/{incident_id}": {"get"},
    "/memory/marks": {"post"},
    "/memory/plan": {"post"},
    "/memory/reclaim": {"post"},
    "/memory/snapshot": {"post"},
    "/memory/snapshot/stacks": {"post"},
    "/memory/snapshots": {"get"},
    "/memory/snapshots/{name}": {"get"},
    "/reset_mm_cache": {"post"},
    "/reset_prefix_cache": {"post"},
    "/reset_encoder_cache": {"post"},
    "/policy": {"get", "put"},
    "/metrics": {"get"},
    "/livez": {"get"},
    "/readyz": {"get"},
    "/health/deep": {"get"},
    "/server_info": {"get"},
}
RULE = {"name": "cache", "signal": "encoder_cache_bytes", "high_water": 2**30, "low_water": 0}


@contextlib.asynccontextmanager
async def alive(app: Sidecar) -> AsyncIterator[None]:
    """The lifespan, as a server drives it."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, inbox.get, outbox.put))
    inbox.put_nowait({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        inbox.put_nowait({"type": "lifespan.shutdown"})
        assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
        await task


@dataclass
class Running:
    """A sidecar before a fake engine."""

    fake: FakeEngine
    app: Sidecar
    client: httpx.AsyncClient
    port: int

    async def poll(self) -> None:
        await self.app.services.poller.poll()

    async def raw(self, method: str, target: str, *headers: tuple[str, str], body: bytes = b"") -> int:
        return await status_of(self.port, method, target, *headers, body=body)


@contextlib.asynccontextmanager
async def sidecar_before(
    fake: FakeEngine, *, engine_port: int | None = None, request_seconds: float = LIMIT_SECONDS, **options: Any
) -> AsyncIterator[Running]:
    """The sidecar on a real port; without the engine's port it reaches the fake in process, and cannot proxy."""
    # Polls only when a test asks; rules only where a test brings some.
    quiet = {
        "poll_seconds": 60.0,
        "policy": PolicySettings(rules=()),
        "proxy": {"connect_seconds": LIMIT_SECONDS},
        # Tests of what a call does need no token; those of who may call bring one.
        "trust_loopback": not {"admin_token", "admin_token_file"} & {*options},
        **options,
    }
    settings = Settings(engine_url=f"http://127.0.0.1:{engine_port or 8000}", **quiet)
    # The deadline of ordinary requests to the engine is no setting: 5 s, for which a busy machine may stand still.
    with patch.dict(Engine.__init__.__kwdefaults__, request_seconds=request_seconds):
        app = create_app(settings, transport=fake.transport() if engine_port is None else None)
    async with (
        alive(app),
        serving(app) as port,
        # Without certificates to verify by: to load them takes longer than most tests.
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            trust_env=False,
            verify=False,  # noqa: S501 - no TLS
            timeout=LIMIT_SECONDS,
        ) as client,
    ):
        await app.services.poller.poll()
        yield Running(fake, app, client, port)


@contextlib.asynccontextmanager
async def both_on_ports(**settings: Any) -> AsyncIterator[Running]:
    """Nothing replaced: sidecar, control connection, proxy, engine."""
    fake = FakeEngine()
    async with serving(fake) as engine_port, sidecar_before(fake, engine_port=engine_port, **settings) as sidecar:
        yield sidecar


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def running(fake):
    async with sidecar_before(fake) as sidecar:
        yield sidecar


# For tests that only ask, or only look at whether something came through: one sidecar for all of them.
shares = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _open():
    async with both_on_ports() as sidecar:
        yield sidecar


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _guarded():
    async with both_on_ports(admin_token=TOKEN) as sidecar:
        yield sidecar


@pytest.fixture
def shared(_open):
    """Without a token; nothing has been asked of the engine yet."""
    _open.fake.calls.clear()
    return _open


@pytest.fixture
def guarded(_guarded):
    """With an admin token; nothing has been asked of the engine yet."""
    _guarded.fake.calls.clear()
    return _guarded


def error(answer: httpx.Response) -> tuple[int, str]:
    """Status and message, of the one shape that every error has."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return answer.status_code, body["error"]["message"]


@shares
async def test_the_paths_are_the_promised_ones(shared):
    page = (await shared.client.get("/memory/openapi.json")).json()
    assert {path: set(methods) for path, methods in page["paths"].items()} == OWN_PATHS
    assert "/collective_rpc" in (await shared.client.get("/openapi.json")).json()["paths"]


# --- /memory ---


@shares
async def test_the_report_over_a_real_connection(shared):
    report = (await shared.client.get("/memory")).json()
    assert (report["engine"]["state"], report["ranks_reported"]) == ("ready", 2)
    assert 0 < report["sidecar_started_at"] < report["taken_at"]
    assert report["engine"]["url"].startswith("http://127.0.0.1:")


async def test_the_report_counts_what_passed_the_proxy():
    async with both_on_ports() as sidecar:
        for path in ("/health", "/v1/models"):
            assert (await sidecar.client.get(path)).is_success
        traffic = sidecar.app.services.exporter.counters.traffic
        await until(lambda: traffic.requests_ended == 1 and not traffic.under_way)
        report = (await sidecar.client.get("/memory")).json()
        assert report["proxy"] == {"requests_ended": 1, "requests_under_way": 0}
    async with sidecar_before(FakeEngine(), proxy={"enabled": False}) as watching:
        assert (await watching.client.get("/memory")).json()["proxy"] is None


async def test_the_report_in_json(running):
    running.fake.serve_images()
    await running.poll()
    answer = await running.client.get("/memory")
    report = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert set(report) == {
        *("schema", "taken_at", "age_seconds", "stale", "engine", "ranks_expected", "ranks_reported", "ranks"),
        *("ranks_missing", "progress", "start_failure", "encoder_cache", "host", "growth", "policy"),
        *("sidecar_started_at", "proxy", "door", "now", "verdict", "rank_order", "relief", "incident"),
    }
    assert (report["schema"], report["stale"], report["ranks_expected"]) == (1, False, 2)
    rank = report["ranks"][0]
    assert (rank["used_bytes"], sum(rank["components"].values())) == (USED_AFTER, USED_AFTER)
    device = {"type": "npu", "index": 0, "physical_index": 0, "name": "Ascend910B3", "uuid": "npu-0-0"}
    assert rank["device"] == device
    assert (rank["releasable_bytes"], rank["components"]["torch_cached_bytes"]) == (CACHED, CACHED)
    assert rank["trimmable_bytes"] == (IMAGES - 1) * IMAGE_BYTES
    assert rank["host_memory"]["pinned_bytes"] == running.fake.workers[0].pinned
    assert report["engine"]["capabilities"]["is_paused"] is True
    assert report["growth"]["since_ready_bytes"] == ENCODER_BYTES
    assert (report["policy"]["level"], report["encoder_cache"]["entries"]) == ("calm", IMAGES)
    assert (rank["source"], report["ranks_missing"], report["progress"]) == ("rpc", [], None)


@pytest.fixture
def _no_worker_is_silent(monkeypatch):
    """However long the loop stands still between what a worker writes and what is read of it."""
    monkeypatch.setattr("highwater.watch.recorder.rank._LATE_SECONDS", 600.0)


@pytest.mark.usefixtures("_no_worker_is_silent")
async def test_the_report_of_recorded_workers(tmp_path):
    fake = FakeEngine(tensor_parallel=1, data_parallel=2)
    async with sidecar_before(fake, recorder_dir=tmp_path) as running:
        missing = (await running.client.get("/memory")).json()["ranks_missing"]
        assert [(rank["dp_rank"], rank["status"], rank["pid"]) for rank in missing] == [(1, "unheard", 4243)]
        fake.record()
        await running.poll()
        report = (await running.client.get("/memory")).json()
        history = (await running.client.get("/memory/history?recorded=true")).json()
    assert [(rank["dp_rank"], rank["source"]) for rank in report["ranks"]] == [(0, "rpc"), (1, "recorder")]
    assert (report["ranks_missing"], report["progress"]["verdict"]) == ([], "idle")
    assert [(rank["dp_rank"], rank["pid"]) for rank in history["recorded"]] == [(0, 4242), (1, 4243)]
    assert history["recorded"][0]["samples"][-1]["used_bytes"] == USED_READY


@shares
async def test_without_recorders_there_is_nothing_recorded(shared):
    status, message = error(await shared.client.get("/memory/history?recorded=true"))
    assert (status, "recorder_dir" in message) == (503, True)


@shares
@pytest.mark.parametrize(
    ("query", "accept", "kind"),
    [
        ("", "*/*", "application/json"),
        ("", "text/plain", "text/plain; charset=utf-8"),
        ("", "text/plain, application/json", "application/json"),
        ("?format=text", "*/*", "text/plain; charset=utf-8"),
        ("?format=text", "application/json", "text/plain; charset=utf-8"),
        ("?format=json", "text/plain", "application/json"),
    ],
)
async def test_the_report_as_text(shared, query, accept, kind):
    answer = await shared.client.get(f"/memory{query}", headers={"Accept": accept})
    assert answer.headers["content-type"] == kind
    if kind.startswith("text"):
        assert answer.text.startswith("FINE: ")
        assert "53.37" in answer.text


async def test_what_changed_since_a_mark(running):
    made = await running.client.post("/memory/marks", json={"name": "before bench"})
    assert (made.status_code, made.json()["ranks"]) == (201, [0, 1])
    running.fake.serve_images()
    await running.poll()
    since = (await running.client.get("/memory", params={"since": "before bench"})).json()["since"]
    assert since["mark"] == "before bench"
    assert [rank["used_bytes"] for rank in since["ranks"]] == [IMAGES * IMAGE_BYTES] * 2
    assert since["ranks"][0]["components"]["weights_bytes"] == 0


async def test_a_mark_is_taken_now(running):
    running.fake.serve_images(1)
    await running.client.post("/memory/marks", json={"name": "one"})
    running.fake.serve_images(1)
    await running.poll()
    since = (await running.client.get("/memory?since=one")).json()["since"]
    assert since["ranks"][0]["used_bytes"] == IMAGE_BYTES


# --- /memory/encoder-cache ---


async def test_the_entries_of_the_encoder_cache(running):
    running.fake.serve_images(2, size=10)
    running.fake.serve_images(1, size=30)
    first, second = (await running.client.get("/memory/encoder-cache?limit=2")).json()["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert [entry["bytes"] for entry in first["entries"]] == [30, 10]
    assert (first["entries_total"], first["device_bytes"], first["capacity_embeds"]) == (3, 50, 16384)
    assert {"mm_hash", "shape", "dtype", "age_seconds", "residency", "referenced"} <= set(first["entries"][0])


async def test_the_entries_of_one_rank_by_age(running):
    running.fake.serve_images(3, size=10)
    worker = running.fake.workers[1]
    worker.seen_at = {name: 1000.0 * number for number, name in enumerate(worker.entries)}
    (rank,) = (await running.client.get("/memory/encoder-cache?rank=1&sort=age&limit=2")).json()["ranks"]
    assert [entry["mm_hash"][-1] for entry in rank["entries"]] == ["0", "1"]
    assert rank["rank"] == 1


async def test_without_the_token_no_worker_is_asked_for_entries():
    fake = FakeEngine()
    fake.serve_images(3)
    async with sidecar_before(fake, admin_token=TOKEN) as sidecar:
        asked = len(fake.ops())
        empty = (await sidecar.client.get("/memory/encoder-cache?rank=0")).json()
        assert (empty["ranks"], empty["age_seconds"], "highwater token" in empty["note"]) == ([], None, True)
        assert len(fake.ops()) == asked
        whole = (await sidecar.client.get("/memory/encoder-cache?limit=2", headers=ADMIN)).json()
        assert fake.ops()[asked:] == ["encoder_cache"]
        told = (await sidecar.client.get("/memory/encoder-cache?limit=2")).json()
        again = (await sidecar.client.get("/memory/encoder-cache?limit=2")).json()
        assert fake.ops()[asked:] == ["encoder_cache"]
    assert (whole["note"], whole["age_seconds"] < 30, "as last read" in told["note"]) == (None, True, True)
    mine, theirs = ([entry["mm_hash"] for entry in answer["ranks"][0]["entries"]] for answer in (whole, told))
    assert [len(name) for name in theirs] == [8, 8]
    # No part of the hash: whoever has an image can make its hash, and would know that somebody sent it.
    assert not any(short in hash_ for short in theirs for hash_ in mine)
    assert again["ranks"][0]["entries"] == told["ranks"][0]["entries"]
    assert {**told["ranks"][0], "entries": None} == {**whole["ranks"][0], "entries": None}


@pytest.mark.usefixtures("_no_worker_is_silent")
async def test_entries_of_recorders_need_no_worker(tmp_path):
    fake = FakeEngine()
    fake.serve_images(3)
    async with sidecar_before(fake, admin_token=TOKEN, recorder_dir=tmp_path) as sidecar:
        fake.record()
        await sidecar.poll()
        told = (await sidecar.client.get("/memory/encoder-cache?limit=2")).json()
        whole = (await sidecar.client.get("/memory/encoder-cache?limit=2", headers=ADMIN)).json()
        assert "encoder_cache" not in fake.ops()
    assert [(rank["rank"], rank["entries_total"], len(rank["entries"])) for rank in told["ranks"]] == [
        (0, 3, 2),
        (1, 3, 2),
    ]
    assert (whole["note"], told["note"]) == (None, "with the admin token mm_hash is whole")
    assert {entry["mm_hash"] for entry in whole["ranks"][0]["entries"]} <= {*fake.workers[0].entries}
    assert [len(entry["mm_hash"]) for entry in told["ranks"][0]["entries"]] == [8, 8]


@pytest.mark.usefixtures("_no_worker_is_silent")
async def test_entries_of_one_recorder_are_not_hidden_by_old_answers(tmp_path):
    fake = FakeEngine()
    fake.serve_images(3)
    fake.workers[1].recorder.refuses = "OSError: no space left on device"
    async with sidecar_before(fake, admin_token=TOKEN, recorder_dir=tmp_path) as sidecar:
        fake.record()
        await sidecar.poll()
        one = (await sidecar.client.get("/memory/encoder-cache")).json()
        await sidecar.client.get("/memory/encoder-cache", headers=ADMIN)
        fake.serve_images(2)
        fake.record()
        sidecar.app.services.entries._recorded = None  # a second later
        await sidecar.poll()
        asked = fake.ops().count("encoder_cache")
        two = (await sidecar.client.get("/memory/encoder-cache")).json()
        assert fake.ops().count("encoder_cache") == asked
    assert [(rank["rank"], rank["entries_total"]) for rank in one["ranks"]] == [(0, 3)]
    assert one["note"] == "the entries of rank 1 are not known; with the admin token mm_hash is whole"
    assert [(rank["rank"], rank["entries_total"]) for rank in two["ranks"]] == [(0, 5), (1, 3)]
    assert two["note"].startswith("as last read")


async def test_entries_of_workers_that_are_gone_are_not_told_as_those_of_new_ones():
    fake = FakeEngine()
    fake.serve_images(3)
    async with sidecar_before(fake, admin_token=TOKEN) as sidecar:
        await sidecar.client.get("/memory/encoder-cache", headers=ADMIN)
        assert (await sidecar.client.get("/memory/encoder-cache")).json()["ranks"]
        fake.start_again()
        await sidecar.poll()
        assert (await sidecar.client.get("/memory/encoder-cache")).json()["ranks"] == []


async def test_entries_without_the_extension_are_not_available():
    async with sidecar_before(FakeEngine(extension=None)) as running:
        status, message = error(await running.client.get("/memory/encoder-cache"))
    assert status == 503
    assert "--worker-extension-cls highwater_worker.MemoryExtension" in message


async def test_entries_of_an_engine_that_is_gone_are_not_available(running):
    running.fake.down = True
    assert error(await running.client.get("/memory/encoder-cache"))[0] == 503


# --- history, events ---


async def test_the_history_since_a_mark_and_by_step(running):
    await running.client.post("/memory/marks", json={"name": "m"})
    running.fake.serve_images()
    await running.poll()
    whole = (await running.client.get("/memory/history")).json()
    used = [reading["ranks"][0]["used_bytes"] for reading in whole["readings"]]
    assert (set(used[:-1]), used[-1]) == ({USED_READY}, USED_AFTER)
    assert [mark["name"] for mark in whole["marks"]] == ["m"]
    assert [event["kind"] for event in whole["events"]] == ["mark", "state"]
    since = (await running.client.get("/memory/history?since=m")).json()
    assert [reading["ranks"][0]["used_bytes"] for reading in since["readings"]] == [USED_AFTER]
    thinned = (await running.client.get("/memory/history?step=86400")).json()
    assert (len(thinned["readings"]), thinned["step"]) == (1, 86400.0)
    later = (await running.client.get(f"/memory/history?since={whole['now'] + 60}")).json()
    assert (later["readings"], later["events"]) == ([], [])


async def test_events_newest_first(running):
    for name in "abc":
        await running.client.post("/memory/marks", json={"name": name})
    events = (await running.client.get("/memory/events?limit=2")).json()["events"]
    assert [event["summary"].partition(" at")[0] for event in events] == ["mark 'c'", "mark 'b'"]


async def test_reports_and_events_live(running):
    headers = {"Accept": "text/event-stream"}
    async with running.client.stream("GET", "/memory/events", headers=headers) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        messages = messages_of(stream)
        kind, report = await anext(messages)
        assert (kind, report["ranks"][0]["used_bytes"]) == ("report", USED_READY)
        running.fake.serve_images()
        await running.client.post("/memory/marks", json={"name": "live"})
        kind, report = await anext(messages)
        assert (kind, report["ranks"][0]["used_bytes"]) == ("report", USED_AFTER)
        kind, event = await anext(messages)
        assert (kind, event["kind"]) == ("event", "mark")
        running.app.begin_stop()
        assert [message async for message in messages] == []


async def messages_of(stream: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    kind = ""
    async for line in stream.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


async def test_a_reader_that_leaves_is_forgotten(running):
    async with running.client.stream("GET", "/memory/events", headers={"Accept": "text/event-stream"}) as stream:
        await anext(messages_of(stream))
        assert len(running.app.services.history._watchers) == 1
    for _ in range(200):
        await running.client.get("/livez")
        if not running.app.services.history._watchers:
            break
    assert not running.app.services.history._watchers


# --- reclaim ---


async def test_reclaim_gives_back_and_tells(running):
    running.fake.serve_images()
    await running.poll()
    answer = await running.client.post("/memory/reclaim")
    body = answer.json()
    assert (answer.status_code, body["mode"], body["dry_run"]) == (200, "safe", False)
    release, encoder = body["results"]
    assert (release["remedy"], release["freed_bytes"]["total"]) == ("release", 2 * CACHED)
    assert (encoder["remedy"], encoder["freed_bytes"]["total"]) == ("reset_encoder_cache", ENCODER_BYTES)
    assert [rank["used_bytes"] for rank in encoder["after"]] == [USED_READY - CACHED] * 2
    assert encoder["freed_bytes"]["ranks"][1]["components"]["encoder_cache_bytes"] == IMAGES * IMAGE_BYTES
    assert running.fake.resets() == ["release", "/reset_encoder_cache", "release"]


async def test_reclaim_in_the_order_asked_for(running):
    body = {"remedies": ["reset_prefix_cache", "release"], "mode": "now"}
    results = (await running.client.post("/memory/reclaim", json=body)).json()["results"]
    assert [result["remedy"] for result in results] == ["reset_prefix_cache", "release"]
    assert running.fake.resets() == ["/reset_prefix_cache", "release"]


async def test_a_dry_run_does_nothing(running):
    answer = await running.client.post("/memory/reclaim", json={"dry_run": True})
    assert [result["outcome"] for result in answer.json()["results"]] == ["observed", "observed"]
    assert running.fake.resets() == []


async def test_all_refused_is_a_conflict():
    async with sidecar_before(FakeEngine("0.12.0")) as running:
        answer = await running.client.post("/memory/reclaim", json={"remedies": ["reset_encoder_cache"]})
        events = (await running.client.get("/memory/events")).json()["events"]
    assert answer.status_code == 409
    assert "no /reset_encoder_cache" in answer.json()["results"][0]["reason"]
    assert (events[0]["kind"], events[0]["trigger"]) == ("refusal", "reclaim")


# --- drop-ins ---


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("reset_mm_cache", ""),
        ("reset_prefix_cache", "reset_running_requests=true&reset_external=%66alse"),
        ("reset_encoder_cache", ""),
    ],
)
async def test_a_drop_in_is_vllms_own_and_more(running, name, query):
    """Some clients send a body, which vLLM does not read."""
    answer = await running.client.post(f"/{name}?mode=now&{query}&force=false", json={"model": "m"})
    body = answer.json()
    (call,) = running.fake.asked(f"/{name}")
    assert (call.query, call.body) == (query, b"")
    assert (answer.status_code, body["outcome"], body["remedy"]) == (200, "done", name)
    assert body.get("success") is (True if name == "reset_prefix_cache" else None)
    assert len(body["before"]) == len(body["after"]) == 2
    assert body["frees"]
    assert body["does_not_free"]
    assert running.fake.resets() == [f"/{name}"]


async def test_the_finding_of_the_story(running):
    running.fake.serve_images()
    body = (await running.client.post("/reset_mm_cache")).json()
    assert body["freed_bytes"]["total"] == 0
    assert [rank["used_bytes"] for rank in body["after"]] == [USED_AFTER] * 2
    assert "device memory" in body["does_not_free"]


async def test_the_engines_own_error_passes(running):
    running.fake.failing["/reset_prefix_cache"] = 500
    answer = await running.client.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()["outcome"]) == (500, "failed")


@pytest.mark.parametrize(("version", "way"), [("0.12.0", "0.25.1 and newer"), ("0.23.0", "0.25.1 and newer")])
async def test_a_drop_in_is_refused_where_it_hangs_the_engine(version, way):
    async with sidecar_before(FakeEngine(version)) as running:
        status, message = error(await running.client.post("/reset_mm_cache"))
        assert status == 409
        assert all(words in message for words in ("can hang without end", way, "?force=true"))
        assert running.fake.resets() == []
        assert error(await running.client.post("/reset_mm_cache?mode=safe"))[0] == 409
        assert running.fake.resets() == []
        assert (await running.client.post("/reset_mm_cache?force=true")).status_code == 200


async def test_a_safe_drop_in_tells_its_moment(running):
    safe = (await running.client.post("/reset_mm_cache?mode=safe")).json()
    assert (safe["outcome"], safe["quiesced_by"], safe["held_seconds"] >= 0) == ("done", "gate", True)


async def test_a_safe_prefix_reset_never_preempts(running):
    """vLLM can throw running requests out for it; that and mode=safe exclude each other."""
    answer = await running.client.post("/reset_prefix_cache?mode=safe&reset_running_requests=true")
    status, message = error(answer)
    assert (status, "reset_running_requests" in message, running.fake.resets()) == (409, True, [])


async def test_a_trim_with_its_target(running):
    running.fake.serve_images()
    wish = {"remedy": "trim_encoder_cache", "keep_bytes": 10 * IMAGE_BYTES}
    (result,) = (await running.client.post("/memory/reclaim", json={"remedies": [wish]})).json()["results"]
    assert (result["outcome"], len(result["detail"])) == ("done", 2)
    assert result["detail"][0]["spilled_bytes"] == (IMAGES - 10) * IMAGE_BYTES
    cache = (await running.client.get("/memory")).json()["encoder_cache"]
    assert (cache["host_bytes"], cache["spills"]) == (2 * (IMAGES - 10) * IMAGE_BYTES, IMAGES - 10)
    restored = (await running.client.post("/memory/encoder-cache/restore")).json()
    assert [rank["restored_entries"] for rank in restored["ranks"]] == [IMAGES - 10] * 2
    assert (await running.client.get("/memory")).json()["encoder_cache"]["host_bytes"] == 0


@pytest.mark.parametrize(
    ("path", "words"),
    [("/reset_mm_cache", "the engine is gone"), ("/memory/reclaim", "The engine has been dead for ")],
)
async def test_an_engine_that_is_down_is_503_and_an_event(running, path, words):
    running.fake.down = True
    await running.poll()
    status, message = error(await running.client.post(path))
    assert status == 503
    assert message.startswith(words)
    events = (await running.client.get("/memory/events")).json()["events"]
    assert {event["result"]["outcome"] for event in events if event["kind"] == "reset"} == {"failed"}


async def test_an_engine_that_goes_in_the_middle_of_a_reset_is_503(running):
    running.fake.late = {"/reset_encoder_cache"}
    answer = await running.client.post("/reset_encoder_cache")
    assert (answer.status_code, answer.json()["outcome"]) == (503, "failed")
    assert "no answer in time" in answer.json()["reason"]


# --- policy ---


async def test_the_policy_is_shown_with_its_state():
    async with sidecar_before(FakeEngine(), policy=PolicySettings()) as running:
        policy = (await running.client.get("/policy")).json()
    assert (policy["mode"], [rule["name"] for rule in policy["rules"]]) == ("act", ["device"])
    assert (policy["rules"][0]["high_water"], policy["rules"][0]["low_water"]) == (None, None)
    assert (policy["status"]["level"], policy["status"]["actions_last_hour"]) == ("calm", 0)
    (rule,) = policy["status"]["rules"]
    assert (rule["phase"], [rank["free_bytes"] for rank in rule["ranks"]]) == ("calm", [TOTAL - USED_READY] * 2)
    assert policy["last_decisions"] == []


async def test_a_changed_policy_acts(running):
    put = await running.client.put("/policy", json={"rules": [RULE]})
    assert (put.status_code, put.json()["rules"][0]["remedies"]) == (
        200,
        ["trim_encoder_cache", "reset_encoder_cache"],
    )
    running.fake.serve_images()
    async with running.client.stream("GET", "/memory/events", headers={"Accept": "text/event-stream"}) as stream:
        messages = messages_of(stream)
        await anext(messages)
        await running.poll()
        while not (await anext(messages))[1].get("summary", "").startswith("trim_encoder_cache done"):
            pass
    decisions = (await running.client.get("/policy")).json()["last_decisions"]
    assert [decision["kind"] for decision in decisions] == ["reset", "policy", "policy"]
    assert decisions[1]["summary"].startswith("memory: fine -> short: encoder_cache_bytes is ")
    assert running.fake.resets() == ["trim", "release"]


async def test_what_is_left_out_of_a_change_stays(running):
    await running.client.put("/policy", json={"rules": [RULE], "mode": "observe"})
    policy = (await running.client.put("/policy", json={"mode": "act"})).json()
    assert ([rule["name"] for rule in policy["rules"]], policy["mode"]) == (["cache"], "act")
    policy = (await running.client.put("/policy", json={"rules": []})).json()
    assert (policy["rules"], policy["mode"]) == ([], "act")


# --- metrics, health ---


async def test_metrics_are_of_the_last_report(running):
    """A scrape of ours asks nobody anything; tests/http/test_scrapers.py has the engine's part."""
    calls = len(running.fake.calls)
    answer = await running.client.get("/metrics?engine=0")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    (used,) = re.findall(r'^highwater_device_memory_used_bytes{.*rank="0"} (.*)$', answer.text, re.MULTILINE)
    assert float(used) == USED_READY
    assert "vllm:" not in answer.text
    assert len(running.fake.calls) == calls


async def test_health_tells_the_two_apart(running):
    assert (await running.client.get("/readyz")).json() == {"ready": True, "engine": "ready", "reason": None}
    running.fake.down = True
    await running.poll()
    await running.poll()
    assert (await running.client.get("/livez")).status_code == 200
    answer = await running.client.get("/readyz")
    assert (answer.status_code, answer.json()["engine"]) == (503, "gone")
    assert "nothing answers any more" in answer.json()["reason"]


@pytest.mark.parametrize(
    ("state", "ready", "status"),
    [
        *[(state, True, 200) for state in ("ready", "busy", "slow")],
        *[(state, False, 200) for state in ("starting", "paused", "sleeping", "not_answering")],
        *[(state, False, 503) for state in ("stuck", "gone")],
    ],
)
async def test_both_healths_follow_the_verdict(running, state, ready, status):
    """The deep one is for a probe that may restart the engine: 503 only where nothing else helps, and why."""
    poller = running.app.services.poller
    poller.reports.last = replace(
        poller.reports.last, engine=replace(poller.reports.last.engine, state=state, hint="the hint")
    )
    assert (await running.client.get("/readyz")).status_code == (200 if ready else 503)
    answer = await running.client.get("/health/deep")
    judged = (await running.client.get("/memory")).json()["verdict"]
    reason = f"{judged['sentence']} {judged['step'] or ''}".rstrip()
    told = answer.json()
    # The second is of a later moment: "dead for 1 s".
    at_once = [re.sub(r"for \d+ s", "for 0 s", text) for text in (told.pop("reason"), reason)]
    assert (answer.status_code, told) == (status, {"healthy": status == 200, "engine": state})
    assert at_once[0] == at_once[1]


async def test_no_probe_restarts_an_engine_whose_loop_runs_and_schedules_nothing(running):
    """It is out of service, and may go on by itself; what hangs beside that is not spared."""
    poller = running.app.services.poller
    starved = Progress(verdict="stuck", since_seconds=12.0, ranks=(), summary="nothing is scheduled", is_starved=True)
    for state, deep in (("stuck", 200), ("gone", 503)):
        engine = replace(poller.reports.last.engine, state=state)
        poller.reports.last = replace(poller.reports.last, engine=engine, progress=starved)
        assert (await running.client.get("/readyz")).status_code == 503
        assert (await running.client.get("/health/deep")).status_code == deep


async def test_a_dead_engine_leaves_an_incident(running):
    assert (await running.client.get("/memory/incidents")).json()["incidents"] == []
    async with running.client.stream("GET", "/memory/events", headers={"Accept": "text/event-stream"}) as stream:
        messages = messages_of(stream)
        running.fake.down = True
        await running.poll()
        await running.poll()
        while (told := (await anext(messages))[1]).get("kind") != "incident":
            pass
    (listed,) = (await running.client.get("/memory/incidents")).json()["incidents"]
    assert (listed["kind"], told["summary"]) == ("died", f"incident {listed['id']}: {listed['summary']}")
    incident = (await running.client.get(f"/memory/incidents/{listed['id']}")).json()
    assert [rank["reading"]["used_bytes"] for rank in incident["ranks"]] == [USED_READY] * 2


@shares
async def test_what_is_beneath_the_incidents_is_ours(shared):
    for path in ("/memory/incidents/none", "/memory/incidents/a/b", "/memory/incidents/%2e%2e%2fv1%2fmodels"):
        assert error(await shared.client.get(path))[0] == 404
    assert error(await shared.client.delete("/memory/incidents"))[0] == 405
    assert not any("incidents" in call.path or call.path == "/v1/models" for call in shared.fake.calls)


async def test_a_loop_that_ended_is_not_alive(running):
    """Kubernetes restarts the sidecar then."""
    for task in asyncio.all_tasks():
        if task.get_name() == "Poller.run":
            task.cancel()
            await asyncio.wait({task})
    assert (await running.client.get("/livez")).status_code == 503


# --- bad input ---


@shares
@pytest.mark.parametrize(
    ("method", "path"), [(method.upper(), path) for path, methods in OWN_PATHS.items() for method in sorted(methods)]
)
async def test_a_key_that_a_path_does_not_take_makes_no_call_of_it(shared, method, path):
    """But for probes: a load balancer may add one to theirs."""
    before = len(shared.fake.calls)
    answer = await shared.client.request(method, path.format(incident_id="i", name="n") + "?dry-run=%00true&engine_=1")
    if path in {"/livez", "/readyz", "/health/deep"}:
        assert answer.status_code == 200
        return
    status, message = error(answer)
    assert (status, len(shared.fake.calls)) == (422, before)
    assert "dry-run: 'true': the query has no such key" in message
    assert "engine_: '1': the query has no such key" in message


@shares
@pytest.mark.parametrize("path", ["/reset_mm_cache", "/reset_encoder_cache", "/memory/encoder-cache/restore"])
@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded"])
async def test_a_body_with_a_key_that_would_make_it_harmless_elsewhere_is_refused(shared, path, content_type):
    before = len(shared.fake.calls)
    headers = {"Content-Type": content_type}
    answer = await shared.client.post(path, content=b'{"dry_run": true}', headers=headers)
    assert (answer.status_code in {415, 422}, len(shared.fake.calls)) == (True, before)


@shares
@pytest.mark.parametrize(
    ("method", "target", "body", "words"),
    [
        ("POST", "/memory/reclaim", {"remedies": ["reboot"]}, ("'reboot'", "release, trim_encoder_cache")),
        ("POST", "/memory/reclaim", {"remedies": []}, ("remedies", "at least 1")),
        (
            "POST",
            "/memory/reclaim",
            {"remedies": [{"remedy": "trim_encoder_cache", "free_bytes": 1, "keep_bytes": 1}]},
            ("one target at most", "free_bytes, keep_bytes"),
        ),
        (
            "POST",
            "/memory/reclaim",
            {"remedies": [{"remedy": "release", "free_bytes": 1}]},
            ("remedies.0.remedy: 'release' must be 'trim_encoder_cache'",),
        ),
        (
            "POST",
            "/memory/reclaim",
            {"remedies": [{"remedy": "trim_encoder_cache", "free_bytes": -1}]},
            ("remedies.0.free_bytes: -1 must be greater than or equal to 0",),
        ),
        ("POST", "/memory/reclaim", {"remedies": ["release"] * 17}, ("must have at most 16 items, not 17",)),
        (
            "POST",
            "/memory/reclaim?dry_run=true",
            {"remedies": ["release", "trim_encoder_cache", {"remedy": "trim_encoder_cache", "free_bytes": 1}]},
            ("each remedy at most once", "trim_encoder_cache"),
        ),
        ("POST", "/memory/reclaim", {"mode": "hard"}, ("'hard'", "'safe' or 'now'")),
        ("POST", "/memory/reclaim", {"remedy": ["release"]}, ("remedy: there is no such key; did you mean remedies?",)),
        ("POST", "/memory/reclaim?dryrun=true", None, ("dryrun: 'true': the query", "did you mean dry_run?")),
        ("POST", "/memory/snapshot?dry_run=true", None, ("dry_run: 'true': the query", "it belongs in the body")),
        ("POST", "/memory/encoder-cache/restore", {"rank": 0}, ("rank: there is no such key",)),
        ("POST", "/memory/encoder-cache/restore?rank=7", None, ("rank: '7': the query", "takes none")),
        ("POST", "/reset_mm_cache?dry_run=true", None, ("dry_run: 'true': the query", "known: mode, force")),
        ("POST", "/reset_encoder_cache?mdoe=safe", None, ("mdoe: 'safe': the query", "did you mean mode?")),
        ("POST", "/reset_mm_cache", {"dry_run": True}, ("dry_run: vLLM's resets read no body", "?dry_run=true")),
        ("PUT", "/policy", {"rules": [RULE | {"remedys": []}]}, ("rules.0.remedys", "did you mean remedies?")),
        ("POST", "/memory/reclaim", [1], ("body",)),
        ("POST", "/memory/marks", {"name": ""}, ("name", "at least 1")),
        ("POST", "/memory/marks", {"name": "a\nb"}, ("name", "pattern")),
        ("POST", "/memory/marks", {"name": "x" * 129}, ("name", "at most 128")),
        ("POST", "/memory/marks", {}, ("name", "is missing")),
        ("POST", "/memory/marks", None, ("body", "is missing")),
        ("PUT", "/policy", {"rules": [RULE | {"signal": "heat"}]}, ("signal", "'heat'", "device_used_ratio")),
        ("PUT", "/policy", {"rules": [RULE | {"high_water": "4GB"}]}, ("'4GB' must be a number of bytes",)),
        ("PUT", "/policy", {"rules": [RULE, RULE]}, ("rules", "unique", "cache")),
        ("PUT", "/policy", {"rules": [RULE | {"remedies": ["heal"]}]}, ("'heal' is not a remedy", "release")),
        ("PUT", "/policy", {"rules": [RULE] * 33}, ("rules", "at most 32")),
        ("PUT", "/policy", {"mode": "off"}, ("mode", "'off'", "'act' or 'observe'")),
        ("PUT", "/policy", {"modus": "act"}, ("modus", "no such key")),
        ("POST", "/reset_mm_cache?mode=soon", None, ("mode", "'soon'", "'safe' or 'now'")),
        ("POST", "/reset_mm_cache?force=maybe", None, ("force", "'maybe'")),
        ("GET", "/memory?since=never", None, ("since", "'never'", "none yet", "`highwater mark NAME`")),
        ("GET", "/memory?format=xml", None, ("format", "'xml'", "'json' or 'text'")),
        ("GET", "/memory?formt=text", None, ("formt", "no such key")),
        ("GET", "/memory/encoder-cache?rank=7", None, ("rank", "7", "0, 1")),
        ("GET", "/memory/encoder-cache?rank=one", None, ("rank", "'one'")),
        ("GET", "/memory/encoder-cache?limit=-1", None, ("limit", "'-1'")),
        ("GET", "/memory/encoder-cache?sort=hash", None, ("sort", "'hash'", "'bytes' or 'age'")),
        ("GET", "/memory/history?since=never", None, ("since", "'never'", "Unix seconds")),
        ("GET", "/memory/history?since=nan", None, ("since", "'nan'")),
        ("GET", "/memory/history?step=inf", None, ("step", "finite")),
        ("GET", "/memory/history?steps=1", None, ("steps", "no such key")),
        ("GET", "/memory/events?limit=0", None, ("limit", "'0'")),
        ("GET", "/metrics?engine=perhaps", None, ("engine", "'perhaps'")),
        ("GET", "/metrics?engines=1", None, ("engines", "no such key")),
    ],
)
async def test_a_wrong_value_is_named_with_what_would_be_right(shared, method, target, body, words):
    status, message = error(await shared.client.request(method, target, json=body))
    assert status == 422
    assert all(word in message for word in words), message
    assert "after" not in message, "pydantic's own words"
    assert set(shared.fake.resets()) <= {"encoder_cache"}, "a listing may have been asked for, no more"


@shares
@pytest.mark.parametrize("path", ["/memory/reclaim", "/memory/marks"])
@pytest.mark.parametrize("body", [b"{", b"\xff\xfe{", b'{"name": NaN}x', b"\x00", b"{" * 5000])
async def test_malformed_json_is_a_bad_request(shared, path, body):
    answer = await shared.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert error(answer)[0] == 400


@shares
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_no_control_call_needs_is_refused(shared, chunked):

    async def pieces():
        for _ in range(CONTROL_BODY_BYTES // 2**16 + 1):
            yield b"x" * 2**16

    body = pieces() if chunked else b"x" * (CONTROL_BODY_BYTES + 1)
    assert error(await shared.client.post("/memory/marks", content=body))[0] == 413


@shares
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/memory"),
        ("GET", "/memory/reclaim"),
        ("POST", "/policy"),
        ("GET", "/reset_mm_cache"),
        ("PUT", "/dashboard"),
        ("DELETE", "/memory/incidents/ID"),
    ],
)
async def test_another_method_on_our_paths_is_told_with_the_token_or_without(guarded, method, path):
    for headers in ({}, ADMIN):
        answer = await guarded.client.request(method, path, headers=headers)
        status, message = error(answer)
        assert (status, message) == (405, f"{path} does not take {method}; it takes {answer.headers['allow']}")
    assert path not in {call.path for call in guarded.fake.calls}


@shares
@pytest.mark.parametrize(
    ("path", "methods"),
    [("/policy", {"GET", "PUT"}), ("/memory", {"GET"}), ("/memory/reclaim", {"POST"}), ("/dashboard", {"GET", "HEAD"})],
)
async def test_the_methods_of_a_path_are_those_of_all_its_routes(guarded, path, methods):
    assert set((await guarded.client.patch(path)).headers["allow"].split(", ")) == methods


@shares
async def test_no_body_is_read_of_a_call_that_nothing_serves(guarded):
    """Whoever has no token can send as much as they like."""
    read, sent = [], []

    async def receive():
        read.append(True)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "DELETE", "path": "/memory", "query_string": b"", "headers": [], "root_path": ""}
    await guarded.app(scope, receive, send)
    assert (read, sent[0]["status"]) == ([], 405)


@shares
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/docs/oncall.html", "/docs/runbook", "/memory/incident", "/policy/rules"])
async def test_what_only_the_sidecar_could_have_is_not_promised_by_a_setting(guarded, method, path):
    status, message = error(await guarded.client.request(method, path))
    assert status == 404
    assert "extra_paths" not in message
    assert message.startswith(f"the sidecar has no {path}. The sidecar's own: /memory, ")
    for own in re.findall(r" (/[a-z/.]*[a-z/])", message.partition(". ")[2]):
        assert (await guarded.client.get(own)).status_code in {200, 503}, own


@shares
async def test_a_list_is_found_without_its_last_slash(guarded):
    answer = await guarded.client.get("/docs/runbooks", follow_redirects=True)
    assert (answer.status_code, "HighwaterOutOfMemory" in answer.text) == (200, True)


# --- access ---

CONTROL = [
    ("POST", "/memory/marks", {"name": "m"}),
    ("POST", "/memory/reclaim", None),
    ("POST", "/reset_mm_cache", None),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/reset_encoder_cache", None),
    ("PUT", "/policy", {"mode": "observe"}),
    ("GET", "/memory/snapshots", None),
    ("GET", "/server_info", None),
]
READ = [path for path, methods in OWN_PATHS.items() if "get" in methods and "{" not in path]
READ.remove("/memory/snapshots")  # stack traces may stand in them
READ.remove("/server_info")  # and tokens in it


@shares
@pytest.mark.parametrize("mode", ["safe", "now"])
async def test_a_dry_run_is_a_read_and_calls_nobody(guarded, mode):
    events = (await guarded.client.get("/memory/events")).json()
    answer = await guarded.client.post("/memory/reclaim?dry_run=true", json={"mode": mode})
    release, reset = answer.json()["results"]
    assert not {"before", "after"} & {*release, *reset}  # a few bytes without a token must not ask for many
    assert (answer.status_code, release["outcome"], release["can_give_bytes"]) == (200, "observed", 2 * CACHED)
    assert (reset["remedy"], reset["can_give_bytes"]) == ("reset_encoder_cache", 0)
    assert (guarded.fake.calls, (await guarded.client.get("/memory/events")).json()) == ([], events)


@shares
@pytest.mark.parametrize("query", ["", "?dry_run=false", "?dry_run=true&dry_run=false", "?x=dry_run=true", "?%a7=\xa7"])
async def test_what_is_no_dry_run_for_sure_needs_the_token(guarded, query):
    """Before its body is read, which may say what it likes."""
    status, message = error(await guarded.client.post(f"/memory/reclaim{query}", json={"dry_run": True}))
    assert (status, "needs the admin token" in message, guarded.fake.resets()) == (401, True, [])


async def test_a_plan_behind_too_many_others_is_refused_with_a_time_to_come_again(monkeypatch):
    ends = threading.Event()
    monkeypatch.setattr("highwater.http.memory.plan_answer", lambda *_: {"ended": ends.wait(LIMIT_SECONDS)})
    async with sidecar_before(FakeEngine()) as running, asyncio.TaskGroup() as callers:
        asked = [callers.create_task(running.client.post("/memory/plan", json={})) for _ in range(MAX_WAITING + 2)]
        refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        answers = [task.result() for task in refused]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in answers] == [(503, "5")]
        assert answers[0].json()["error"]["code"] == "too_many_waiting"
        ends.set()
    assert sorted(task.result().status_code for task in asked) == [*[200] * (MAX_WAITING + 1), 503]


@shares
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, ('{"max_model_len": 163000}', '{"wish": "')),
        ({"wish": "9" * 1_000}, ("at most 200 characters",)),
        ({"max_model_len": 163_000}, ("no worker has reported its start yet",)),
    ],
)
async def test_a_plan_needs_no_token_and_calls_no_worker_and_says_what_it_lacks(guarded, body, words):
    status, message = error(await guarded.client.post("/memory/plan", json=body))
    assert status == 422
    assert all(word in message for word in words), message
    assert guarded.fake.calls == []


@shares
@pytest.mark.parametrize("path", READ)
async def test_reading_is_open(guarded, path):
    assert (await guarded.client.get(path)).status_code == 200


@shares
@pytest.mark.parametrize("query", ["", "?config_format=json"])
async def test_the_engines_own_configuration_is_for_operators(guarded, query):
    """Tokens are in it (vLLM's hf_token is an ordinary field); its query goes on, and our token does not."""
    for method in ("GET", "HEAD"):
        assert (await guarded.client.request(method, f"/server_info{query}")).status_code == 401
    written_twice = f"http://127.0.0.1:{guarded.port}//server_info{query}"  # as a path alone, httpx reads it as a host
    assert (await guarded.client.get(written_twice)).status_code in {400, 404}
    assert guarded.fake.asked("/server_info") == []
    answer = await guarded.client.get(f"/server_info{query}", headers=ADMIN)
    (call,) = guarded.fake.asked("/server_info")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert isinstance(answer.json()["vllm_config"], dict if query else str)
    assert (TOKEN in str(call), "authorization" in call.headers) == (False, False)


async def test_the_engines_configuration_where_it_has_none_or_is_gone():
    fake = FakeEngine(dev_mode=False)
    async with sidecar_before(fake) as sidecar:
        assert (await sidecar.client.get("/server_info")).status_code == 404
        fake.down = True
        assert error(await sidecar.client.get("/server_info"))[0] == 503

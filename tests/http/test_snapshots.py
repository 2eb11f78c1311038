"""Memory snapshots on a real port: taken, listed and downloaded by callers that may control."""

from __future__ import annotations

import pytest

from tests.fakes.engine import NO_HISTORY, NO_SNAPSHOT, FakeEngine
from tests.http.test_control_plane import TOKEN, error, sidecar_before
from tests.unit.watch.test_snapshots import Writers

NAME = "highwater-snapshot-20200101T000000000Z-0-0-1.pickle"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def fake() -> FakeEngine:
    fake = FakeEngine()
    fake.snapshot = Writers(size=1_000_000, free=10**9)
    return fake


@pytest.fixture
async def running(fake, tmp_path):
    async with sidecar_before(fake, recorder_dir=tmp_path) as sidecar:
        yield sidecar


async def test_stacks_are_recorded_for_a_bounded_time(running, fake):
    asked = []

    def record(_, payload):
        asked.append(payload)
        minutes = payload["minutes"]
        on = {"recording": bool(minutes), "seconds_left": minutes * 60 or None, "entries": payload["entries"]}
        return on | {"was_recording": len(asked) > 2, "elapsed_ms": 0.4}

    fake.stacks = record
    answer = (await running.client.post("/memory/snapshot/stacks")).json()
    assert [(rank["rank"], rank["recording"], rank["seconds_left"]) for rank in answer["ranks"]] == [
        (0, True, 600.0),
        (1, True, 600.0),
    ]
    ended = await running.client.post("/memory/snapshot/stacks", json={"minutes": 0})
    assert [rank["recording"] for rank in ended.json()["ranks"]] == [False, False]
    assert asked == [{"minutes": 10.0, "entries": 50_000}] * 2 + [{"minutes": 0.0, "entries": 50_000}] * 2
    events = (await running.client.get("/memory/events")).json()["events"]
    assert "history of allocations turned on for 10 min on 2 ranks" in {event["summary"] for event in events}


@pytest.mark.parametrize("body", [{"minutes": 61}, {"entries": 0}, {"hours": 1}])
async def test_stacks_are_bounded(running, fake, body):
    assert (await running.client.post("/memory/snapshot/stacks", json=body)).status_code == 422
    assert "record_stacks" not in fake.ops()


async def test_devices_without_a_history_answer_501(running):
    answer = await running.client.post("/memory/snapshot/stacks")
    assert (answer.status_code, error(answer)[1]) == (501, NO_HISTORY)


async def test_a_snapshot_is_taken_listed_and_downloaded(running, tmp_path):
    answer = (await running.client.post("/memory/snapshot")).json()
    assert (answer["schema"], answer["dry_run"], len(answer["ranks"])) == (1, False, 2)
    rank = answer["ranks"][1]
    assert rank == {
        "rank": 1,
        "dp_rank": 0,
        "host": "node-a",
        "path": str(tmp_path / f"highwater-snapshot-{answer['snapshot']}-0-1-4243.pickle"),
        "bytes": 1_000_000,
        "segments": 3,
        "blocks": 9,
        "trace_entries": 0,
        "free_bytes": 10**9,
        "elapsed_ms": 12.5,
        "url": f"/memory/snapshots/highwater-snapshot-{answer['snapshot']}-0-1-4243.pickle",
    }
    listed = (await running.client.get("/memory/snapshots")).json()
    assert (listed["folder"], listed["problem"]) == (str(tmp_path), None)
    assert [file["url"] for file in listed["snapshots"]] == [rank["url"] for rank in answer["ranks"]]
    download = await running.client.get(rank["url"])
    assert download.content == bytes(1_000_000)
    headers = download.headers
    assert (headers["content-type"], headers["content-length"]) == ("application/octet-stream", "1000000")
    assert headers["content-disposition"] == f'attachment; filename="{rank["url"].rpartition("/")[2]}"'
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")


async def test_a_dry_run_tells_the_size(running, tmp_path):
    answer = (await running.client.post("/memory/snapshot", json={"dry_run": True})).json()
    assert (answer["dry_run"], answer["snapshot"]) == (True, None)
    assert [(rank["bytes"], rank["path"], rank["url"]) for rank in answer["ranks"]] == [(1_000_000, None, None)] * 2
    assert list(tmp_path.glob("*.pickle")) == []


async def test_a_file_on_another_machine_has_no_url(running, fake, tmp_path):
    take = fake.snapshot

    def elsewhere(worker, payload):
        answer = take(worker, payload)
        if worker.rank == 1:
            for path in tmp_path.glob("*-0-1-*.pickle"):
                path.unlink()
        return answer

    fake.snapshot = elsewhere
    ranks = (await running.client.post("/memory/snapshot")).json()["ranks"]
    assert [rank["url"] is None for rank in ranks] == [False, True]


async def test_problems_have_their_status(running, fake):
    fake.snapshot.free = 3_999_999
    assert error(await running.client.post("/memory/snapshot"))[0] == 507
    fake.snapshot = None
    assert error(await running.client.post("/memory/snapshot")) == (501, NO_SNAPSHOT)
    fake.down = True
    await running.poll()
    assert error(await running.client.post("/memory/snapshot"))[0] == 503


async def test_without_a_folder_the_setting_is_named(fake):
    async with sidecar_before(fake) as sidecar:
        status, message = error(await sidecar.client.post("/memory/snapshot"))
        assert (status, message.startswith("recorder_dir is not set")) == (409, True)
        listed = (await sidecar.client.get("/memory/snapshots")).json()
        assert listed == {"schema": 1, "snapshots": [], "folder": None, "problem": None}


async def test_what_there_is_none_of_is_not_found(fake, tmp_path):
    (tmp_path / NAME).write_text("secret")
    names = ("x", "..", NAME, f"..%2f{NAME}", f"../{NAME}", f"%2e%2e%2f{NAME}", "%2Fetc%2Fpasswd", f"{NAME}%00")
    async with sidecar_before(fake, recorder_dir=tmp_path / "below", admin_token=TOKEN) as sidecar:
        for name in names:
            known = ("authorization", f"Bearer {TOKEN}")
            assert await sidecar.raw("GET", f"/memory/snapshots/{name}", known) == 404, name
        answer = await sidecar.client.get(f"/memory/snapshots/{NAME}", headers=bearer(TOKEN))
        assert error(answer)[1].startswith("there is no snapshot of that name")


async def test_a_body_that_is_none_is_refused(running, fake):
    for body in ({"dry_run": "maybe"}, {"dryrun": True}, []):
        assert error(await running.client.post("/memory/snapshot", json=body))[0] == 422
    assert "snapshot" not in fake.ops()

"""Snapshots are measured before they are taken, one at a time, listed as they lie there, and not kept forever."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from highwater.process.clocks import Clocks
from highwater.process.errors import NoRoom, NotAvailable, NotOffered, Refused, RequestError
from highwater.watch.snapshots import KEPT, UNFINISHED_SECONDS, Snapshots, pieces
from tests.fakes.engine import NO_SNAPSHOT, Core, FakeWorker, core_on
from tests.fakes.raising import raising

OTHERS = "highwater-snapshot-20200101T000000000Z-0-0-1.pickle"


@dataclass
class Writers:
    """Workers that write so many bytes, and remember what they were asked."""

    size: int = 100
    free: int = 1_000
    asked: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[int, dict[str, str]] = field(default_factory=dict)
    """By rank; not for dry runs."""

    def __call__(self, worker: FakeWorker, payload: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(payload)
        dry = payload.get("dry_run", False)
        path = None
        if not dry and worker.rank in self.errors:
            return {"ok": False, "error": self.errors[worker.rank]}
        if not dry:
            name = f"highwater-snapshot-{payload['name']}-{worker.dp_rank}-{worker.rank}-{worker.pid}.pickle"
            path = Path(payload["directory"], name)
            path.write_bytes(bytes(self.size))
        return {
            "path": None if path is None else str(path),
            "bytes": self.size,
            "segments": 3,
            "blocks": 9,
            "trace_entries": 0,
            "free_bytes": self.free if "directory" in payload else None,
            "notes": [],
            "elapsed_ms": 12.5,
        }


@dataclass
class Scene:
    """The core with snapshots, on the fake's clock."""

    core: Core
    writers: Writers
    snapshots: Snapshots
    folder: Path

    async def take(self, *, dry_run: bool = False) -> Any:
        self.core.clock.advance(1.0)
        return await self.snapshots.take(dry_run=dry_run)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder))


def scene_on(folder: Path | None, **knobs: Any) -> Scene:
    core, writers = core_on(**knobs), Writers()
    core.fake.snapshot = writers
    snapshots = Snapshots(core.engine, core.poller, core.history, folder, clocks=Clocks(wall=core.clock))
    return Scene(core, writers, snapshots, folder or Path("/nowhere"))


@pytest.fixture
async def scene(tmp_path):
    scene = scene_on(tmp_path)
    await scene.core.tick()
    return scene


async def refused(scene: Scene, kind: type[RequestError], *, dry_run: bool = False) -> str:
    with pytest.raises(kind) as caught:
        await scene.take(dry_run=dry_run)
    assert type(caught.value) is kind
    return str(caught.value)


# --- taking ---


async def test_every_rank_writes_one_of_the_same_name(scene):
    taken = await scene.take()
    assert taken.snapshot == "20251120T173322000Z"
    names = [f"highwater-snapshot-{taken.snapshot}-0-{rank}-{4242 + rank}.pickle" for rank in (0, 1)]
    assert scene.names() == names
    assert taken.here == set(names)
    assert [(rank.rank, rank.dp_rank, rank.file_name, rank.bytes) for rank in taken.ranks] == [
        (0, 0, names[0], 100),
        (1, 0, names[1], 100),
    ]
    directory = {"directory": str(scene.folder)}
    assert scene.writers.asked == [directory | {"dry_run": True}] * 2 + [directory | {"name": taken.snapshot}] * 2


async def test_a_snapshot_is_an_event(scene):
    await scene.take()
    assert scene.core.summaries("snapshot") == [
        "memory snapshot 20251120T173322000Z: 2 ranks, 0.0 MiB; the engine stood still for 0.01 s"
    ]


async def test_a_dry_run_writes_nothing_and_is_no_event(scene):
    taken = await scene.take(dry_run=True)
    assert (taken.snapshot, [rank.bytes for rank in taken.ranks], taken.here) == (None, [100, 100], frozenset())
    assert (scene.names(), scene.core.summaries("snapshot")) == ([], [])


async def test_without_a_folder_only_the_size_is_told():
    scene = scene_on(None)
    await scene.core.tick()
    assert "recorder_dir is not set (HIGHWATER_RECORDER_DIR)" in await refused(scene, Refused)
    assert [rank.free_bytes for rank in (await scene.take(dry_run=True)).ranks] == [None, None]
    assert scene.writers.asked == [{"dry_run": True}] * 2
    assert (await scene.snapshots.files.listed(), await scene.snapshots.files.open(OTHERS)) == (([], None), None)


async def test_one_at_a_time(scene):
    scene.core.fake.hang = asyncio.Event()
    first = asyncio.create_task(scene.take())
    while not scene.core.fake.rpcs_in_flight:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0)
    assert "a snapshot is being taken" in await refused(scene, Refused)
    scene.core.fake.hang.set()
    assert len((await first).ranks) == 2
    assert (await scene.take()).snapshot is not None


async def test_all_ranks_together_leave_the_disk_room(scene):
    """Each would fit alone; they write at the same time."""
    scene.writers.free = 2 * 2 * 100 - 1
    assert "the snapshots of 2 ranks" in await refused(scene, NoRoom)
    assert (scene.names(), len(scene.writers.asked)) == ([], 2)
    scene.writers.free += 1
    assert (await scene.take()).snapshot is not None


@pytest.mark.parametrize(
    ("code", "kind"),
    [("unavailable", NotOffered), ("no_space", NoRoom), ("refused", Refused), ("failed", NotAvailable)],
)
async def test_a_workers_error_is_ours(scene, code, kind):
    scene.writers.errors[1] = {"code": code, "message": "so it is"}
    message = "1 of 2 ranks failed; the first error: so it is"
    assert await refused(scene, kind) == message
    assert scene.core.summaries("snapshot") == [f"memory snapshot 20251120T173322000Z failed: {message}"]
    assert len(scene.names()) == 1


async def test_on_cpu_there_is_none(scene):
    scene.core.fake.snapshot = None
    for dry_run in (True, False):
        assert await refused(scene, NotOffered, dry_run=dry_run) == NO_SNAPSHOT
    assert scene.core.summaries("snapshot") == []


async def test_an_engine_that_is_not_there_is_not_asked(scene):
    scene.core.fake.down = True
    await scene.core.tick()
    await scene.core.tick()
    assert (await refused(scene, NotAvailable)).startswith("the engine is gone")
    other = scene_on(scene.folder, extension=None)
    await other.core.tick()
    assert "--worker-extension-cls" in await refused(other, NotAvailable)
    assert scene.writers.asked == other.writers.asked == []


async def test_a_late_one_is_told_as_late(scene):
    scene.core.fake.hang = asyncio.Event()
    message = await refused(scene, NotAvailable)
    assert message.endswith("written all the same, and GET /memory/snapshots lists it then")
    scene.core.fake.hang.set()
    await scene.core.engine.aclose()


async def test_an_answer_that_is_none_is_the_engines_fault(scene):
    scene.writers.size = "many"
    assert (await refused(scene, NotAvailable)).startswith("worker call snapshot: 0.bytes:")


# --- the folder ---


async def test_only_the_newest_are_kept(scene):
    (scene.folder / OTHERS).write_bytes(b"")
    taken = [(await scene.take()).snapshot for _ in range(KEPT + 1)]
    files, problem = await scene.snapshots.files.listed()
    assert [file.snapshot for file in files] == [name for name in reversed(taken[1:]) for _ in range(2)]
    assert ([file.rank for file in files[:2]], problem) == ([0, 1], None)
    assert len(scene.names()) == 2 * KEPT


async def test_the_new_one_is_kept_whatever_the_clock_says(scene):
    """It was set back: by their names all others are newer."""
    for number in range(KEPT + 1):
        (scene.folder / f"highwater-snapshot-2099010{number + 1}T000000000Z-0-0-1.pickle").write_bytes(b"")
    taken = await scene.take()
    snapshots = [file.snapshot for file in (await scene.snapshots.files.listed())[0]]
    assert snapshots == [*(f"2099010{number}T000000000Z" for number in (5, 4, 3)), taken.snapshot, taken.snapshot]


async def test_nothing_else_is_touched(scene):
    (scene.folder / "highwater-0123456789abcdef-1.ring").write_bytes(b"")
    (scene.folder / OTHERS.replace("-1.pickle", "-1.pickle.old")).write_bytes(b"")
    (scene.folder / OTHERS.replace("-1.", "-2.")).mkdir()
    (scene.folder / OTHERS.replace("-1.", "-3.")).symlink_to("/etc/passwd")
    before = scene.names()
    for _ in range(KEPT + 1):
        await scene.take()
    assert set(before) < set(scene.names())
    assert {file.snapshot for file in (await scene.snapshots.files.listed())[0]}.isdisjoint({"20200101T000000000Z"})


async def test_what_was_never_finished_goes_in_an_hour(scene):
    for pid, age in ((1, UNFINISHED_SECONDS + 5), (2, UNFINISHED_SECONDS - 5)):
        path = scene.folder / f".{OTHERS.replace('-1.', f'-{pid}.')}.tmp"
        path.write_bytes(b"")
        os.utime(path, (scene.core.clock.now - age,) * 2)
    await scene.take()
    assert [name for name in scene.names() if name.startswith(".")] == [f".{OTHERS.replace('-1.', '-2.')}.tmp"]


async def test_a_rank_that_nobody_knew_is_listed_as_unknown(scene):
    (scene.folder / OTHERS.replace("-0-0-1", "-x-x-7")).write_bytes(b"abc")
    (scene.folder / OTHERS.replace("-0-0-1", "-3-1-8")).write_bytes(b"abcd")
    files, _ = await scene.snapshots.files.listed()
    assert [(file.dp_rank, file.rank, file.pid, file.bytes) for file in files] == [(None, None, 7, 3), (3, 1, 8, 4)]


async def test_other_data_parallel_engines_files_are_listed(tmp_path):
    scene = scene_on(tmp_path, data_parallel=2)
    await scene.core.tick()
    taken = await scene.take()
    files, _ = await scene.snapshots.files.listed()
    assert [(file.dp_rank, file.rank) for file in files] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank.dp_rank for rank in taken.ranks] == [0, 0]


async def test_a_folder_that_is_not_there_is_empty(scene, tmp_path):
    scene.snapshots.files.folder = tmp_path / "later"
    assert await scene.snapshots.files.listed() == ([], None)
    scene.snapshots.files.folder.write_text("")
    assert (await scene.snapshots.files.listed())[1].startswith("recorder_dir: ")


async def test_a_file_is_read_to_the_size_that_was_told(scene):
    (scene.folder / OTHERS).write_bytes(b"0123456789")
    file, size = await scene.snapshots.files.open(OTHERS)
    with (scene.folder / OTHERS).open("ab") as longer:
        longer.write(b"more")
    assert list(pieces(file, size, 4)) == [b"0123", b"4567", b"89"]
    assert file.closed


@pytest.mark.parametrize("name", ["", "..", f"../{OTHERS}", f"{OTHERS}\n", f".{OTHERS}.tmp", OTHERS.replace("2", "²")])
async def test_no_other_name_is_opened(scene, name):
    assert await scene.snapshots.files.open(name) is None


async def test_a_file_that_our_user_may_not_read_is_no_missing_one(scene, monkeypatch):
    """Another user wrote it, and shares no group with us: the reason names both ways to help that."""
    (scene.folder / OTHERS).write_bytes(b"snapshot")
    monkeypatch.setattr(os, "open", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(Refused, match="run both as one user, or share a group"):
        await scene.snapshots.files.open(OTHERS)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "nothing"])
async def test_only_a_regular_file_is_opened(scene, kind, tmp_path):
    path = scene.folder / OTHERS
    if kind == "link":
        (tmp_path / "secret").write_text("secret")
        path.symlink_to(tmp_path / "secret")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    assert await scene.snapshots.files.open(OTHERS) is None

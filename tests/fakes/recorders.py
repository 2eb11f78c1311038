"""The flight recorders of a fake engine's workers: real rings, in which a sample stands when a test says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.ring import BOOT_ID, HEADER_BYTES, MONO, SLOT_BYTES, WALL, FakeWriter

_STARTED = 123456
_MEMORY = (
    *("total_bytes", "free_bytes", "used_bytes", "torch", "weights_bytes", "kv_cache_bytes"),
    *("encoder_cache", "host_memory"),
)


class FakeProc:
    """A /proc in which only a test's processes are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        boot = path / "sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text(f"{BOOT_ID}\n")

    def begin(self, pid: int, state: str = "S") -> None:
        """It is there; ``T``: and is held by a signal."""
        (self.path / str(pid)).mkdir(exist_ok=True)
        fields = [state, *(["0"] * 18), str(_STARTED), "0"]
        (self.path / str(pid) / "stat").write_text(f"{pid} (VLLM::Worker) {' '.join(fields)}\n")

    def end(self, pid: int) -> None:
        """It is gone."""
        (self.path / str(pid) / "stat").unlink(missing_ok=True)


def monotonic(clock: Callable[[], float]) -> Callable[[], float]:
    """The machine's other clock, which goes with this one."""
    return lambda: MONO + clock() - WALL


@dataclass
class FakeRecorder:
    """One worker's recorder, and what it sees of the worker's steps. It writes only when it is told to.

    Attributes:
        works: Whether it gets to write; a worker that is dead or held does not.
        refuses: Why it does not start.
        step_since: When the current step began; None outside of one. In Unix seconds, as `last_step_at`.
        stack: Where the main thread is.
        torch: Whether it may ask PyTorch's allocator.
    """

    works: bool = True
    refuses: str | None = None
    steps: int = 0
    step_since: float | None = None
    last_step_at: float | None = None
    stack: list[str] | None = None
    torch: bool = True
    options: dict[str, Any] | None = None
    writer: FakeWriter | None = field(default=None, repr=False)
    entries_due: float = -math.inf

    def start(
        self, head: dict[str, Any], payload: dict[str, Any], device: dict[str, Any], now: float
    ) -> dict[str, Any]:
        """The body of the answer to `recorder_start`."""
        options = {"rate": 10.0, "seconds": 120.0} | payload
        already = self.writer is not None and self.options == options and self.writer.path.exists()
        if not already:
            self.stop(now)
            folder = Path(options["directory"])
            folder.mkdir(parents=True, exist_ok=True)
            self.writer = FakeWriter(
                folder,
                slots=math.ceil(options["seconds"] * (options["rate"] + 1)),
                **{key: value for key, value in head.items() if key != "taken_at"},
                instance=options["instance"],
                device=device,
                started_at=now,
                rate=float(options["rate"]),
                seconds=float(options["seconds"]),
            )
            self.options = options
        assert self.writer is not None
        size = HEADER_BYTES + self.writer.slots * SLOT_BYTES
        told = {"path": str(self.writer.path), "bytes": size, "slots": self.writer.slots, "already": already}
        return told | {"notes": [], "elapsed_ms": 1.4}

    def stop(self, now: float) -> dict[str, Any]:
        """The body of the answer to `recorder_stop`."""
        if self.writer is None:
            note = {"name": "stopped", "reason": "no recorder runs"}
            return {"stopped": False, "path": None, "notes": [note]}
        self.writer.stopped(now - WALL)
        return {"stopped": True, "path": str(self.close()), "notes": []}

    def close(self) -> Path | None:
        """What the worker's death does."""
        writer, self.writer, self.options = self.writer, None, None
        if writer is not None:
            writer.close()
        return writer.path if writer is not None else None

    def record(self, memory: dict[str, Any], entries: dict[str, int], now: float) -> None:
        """A sample of now, and once a second the largest entries."""
        if self.writer is None or not self.works:
            return
        known = {name: memory[name] for name in _MEMORY}
        if not self.torch:
            known["torch"] = dict.fromkeys(known["torch"])
        self.writer.sample(now - WALL, memory=known, moving=self._moving(now))
        if now < self.entries_due:
            return
        self.entries_due = now + 1.0
        largest = [
            {"mm_hash": name, "bytes": size, "residency": "device", "age_seconds": 1.0}
            for name, size in entries.items()
        ]
        self.writer.entries(now - WALL, total=len(largest), largest=largest[:10])

    def _moving(self, now: float) -> dict[str, Any]:
        return {
            "steps_begun": self.steps + (self.step_since is not None),
            "steps_ended": self.steps,
            "step_seconds": None if self.step_since is None else now - self.step_since,
            "last_step_mono": None if self.last_step_at is None else MONO + self.last_step_at - WALL,
            "rpc": None,
            "rpc_seconds": None,
            "stack": self.stack,
        }

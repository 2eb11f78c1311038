"""The recorders of a fake engine's workers: real files, in which something stands when a test says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.ring import BOOT_ID, MONO, WALL, FakeWriter, dump, file_bytes

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

    def begin(self, pid: int, state: str = "S", started: int = _STARTED) -> None:
        (self.path / str(pid)).mkdir(exist_ok=True)
        fields = [state, *(["0"] * 18), str(started), "0"]
        (self.path / str(pid) / "stat").write_text(f"{pid} (VLLM (a) Worker) {' '.join(fields)}\n")

    def end(self, pid: int) -> None:
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
        call: What else the engine has called of its worker, since ``call_since``.
        stack: Where the main thread is.
        torch: Whether it knows what PyTorch's allocator says.
        is_out_of_work: Whether the last step had no tokens.
        tokens_at: When a step with tokens ended last; None: it does not say, as an older package.
        phases: Of the worker's start, where a plugin saw them.
    """

    works: bool = True
    refuses: str | None = None
    steps: int = 100
    step_since: float | None = None
    last_step_at: float | None = None
    call: str | None = None
    call_since: float = 0.0
    stack: list[str] | None = None
    torch: bool = True
    is_out_of_work: bool | None = None
    tokens_at: float | None = None
    phases: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] | None = None
    writer: FakeWriter | None = field(default=None, repr=False)
    sampled: object = None
    calls: int = 0

    def start(
        self, head: dict[str, Any], payload: dict[str, Any], device: dict[str, Any], now: float
    ) -> dict[str, Any]:
        """The body of the answer to `recorder_start`."""
        options = {"rate": 10.0, "seconds": 120.0} | payload
        already = self.writer is not None and self.writer.path.exists()
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
            self.options, self.sampled = options, None
        assert self.writer is not None
        assert self.options is not None
        running = self.options["instance"]
        return {
            "path": str(self.writer.path),
            "instance": running,
            "bytes": file_bytes(self.writer.slots),
            "slots": self.writer.slots,
            "already": already,
            "other": running != options["instance"],
            "notes": [],
            "elapsed_ms": 1.4,
        }

    def stop(self, now: float, instance: str | None = None) -> dict[str, Any]:
        """The body of the answer to `recorder_stop`."""
        if self.writer is None or self.options is None:
            note = {"name": "stopped", "reason": "no recorder runs"}
            return {"stopped": False, "path": None, "notes": [note]}
        if instance not in (None, self.options["instance"]):
            note = {"name": "stopped", "reason": "the recorder that runs is somebody else's"}
            return {"stopped": False, "path": str(self.writer.path), "notes": [note]}
        self.writer.stopped(now - WALL, calls=self.calls)
        return {"stopped": True, "path": str(self.close()), "notes": []}

    def close(self) -> Path | None:
        """What the worker's death does."""
        writer, self.writer, self.options = self.writer, None, None
        if writer is not None:
            writer.close()
        return writer.path if writer is not None else None

    def record(self, memory: dict[str, Any], entries: dict[str, int], now: float) -> None:
        """A heartbeat of now; outside of a step a sample before it, where something has happened since the last one."""
        if self.writer is None or not self.works:
            return
        known = {name: memory[name] for name in _MEMORY}
        if not self.torch:
            known["torch"] = dict.fromkeys(known["torch"])
        state = (self.steps, self.last_step_at, _ageless(known), sorted(entries), len(self.phases))
        if self.step_since is not None:
            self.calls += 1
        elif state != self.sampled:
            self.calls, self.sampled = self.calls + 1, state
            self.writer.sample(now - WALL, memory=known, moving=self._moving(now), calls=self.calls)
            rows = [(name, size, now - WALL, False) for name, size in entries.items()]
            self.writer.table(now - WALL, rows, start=self.phases)
        text = None if self.stack is None else dump(*self.stack)
        self.writer.heartbeat(
            now - WALL,
            moving=self._moving(now),
            calls=self.calls,
            **memory["host_memory"],
            free_bytes=memory["free_bytes"],
            dump=text,
        )

    def _moving(self, now: float) -> dict[str, Any]:
        return {
            "steps_begun": self.steps + (self.step_since is not None),
            "steps_ended": self.steps,
            "step_seconds": None if self.step_since is None else now - self.step_since,
            "last_step_mono": None if self.last_step_at is None else MONO + self.last_step_at - WALL,
            "output_seconds": None,
            "rpc": None,
            "rpc_seconds": None,
            "call": self.call,
            "call_seconds": None if self.call is None else now - self.call_since,
            "last_step_empty": self.is_out_of_work,
            "tokens_mono": None if self.tokens_at is None else MONO + self.tokens_at - WALL,
        }


def phase(name: str, at: float, error: str | None = None, *, seconds: float = 2.0) -> dict[str, Any]:
    return {"name": name, "at": at, "seconds": seconds, "used_bytes": 1000, "error": error}


def _ageless(memory: dict[str, Any]) -> dict[str, Any]:
    """What does not change by itself."""
    return memory | {"encoder_cache": memory["encoder_cache"] | {"oldest_age_seconds": None}}

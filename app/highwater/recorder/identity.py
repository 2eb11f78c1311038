"""The writer of a recorder file, by the file's header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from highwater.flaws import flaw
from highwater.readings.rank import Device
from highwater.readings.schema import MAX_NUMBER
from highwater.recorder.untrusted import RingUnusable, is_within_bounds, json_object
from highwater.text.table import rank_title

MAX_RANKS: Final = 4096  # more ranks than any engine has: files may say anything
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Ranks: TypeAlias = Annotated[int, Field(ge=0, le=MAX_RANKS)]
# Names come into logs and sentences for operators: no control characters.
_Word: TypeAlias = Annotated[str, Field(max_length=255, pattern=r"^[ -~]*$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The writer of a recorder file; names and meanings are those of the worker's responses (worker_ext/README.md)."""

    # The name of one life of the engine; the sidecar chose it, or the worker.
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    rank: Count | None = None
    local_rank: Count | None = None
    dp_rank: Count | None = None
    tp_rank: Count | None = None
    pp_rank: Count | None = None
    host: _Word | None = None
    pid: Annotated[int, Field(ge=1, le=2**31 - 1)]  # as the writer's own PID namespace numbers it
    pid_started: Count | None = None  # in ticks since boot: distinguishes a process from a later one with its number
    boot_id: _Word | None = None
    pid_namespace: Count | None = None  # the inode of the writer's PID namespace; `None` from older worker packages
    device: Device
    started_at: Seconds  # Unix seconds
    rate: Annotated[float, Field(gt=0, le=10_000)]  # samples in a second
    seconds: Seconds  # how far the ring reaches back
    extension: _Word | None = None  # the version of the worker extension
    main_thread: Count | None = None  # the number that dumps of stacks give the thread that runs the steps
    ranks_expected: _Ranks | None = None  # how many workers the API server has
    data_parallel: _Ranks | None = None
    pipeline_parallel: _Ranks | None = None
    tensor_parallel: _Ranks | None = None
    model: _Word | None = None
    # Whether the worker has our operations, so that they may be called; `None` where it does not say.
    rpc: bool | None = None
    self_started: bool | None = None  # whether the worker started its recorder by itself, as the engine came up

    @property
    def name(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"rank {rank_title(self.dp_rank, self.rank)} (pid {self.pid}{where})"


_IDENTITY = TypeAdapter(Identity)


def parse_identity(content: bytes, file_name: str) -> Identity:
    """Return the identity in a header. Raises RingUnusable: it is invalid, or does not fit the file's name."""
    given = json_object(content)
    if given is None:
        raise RingUnusable("corrupt identity: it is no JSON object")
    try:
        identity = _IDENTITY.validate_python(given)
    except ValidationError as exc:
        raise RingUnusable(f"corrupt identity: {flaw(exc.errors())}") from exc
    device = identity.device
    if not is_within_bounds(device):
        raise RingUnusable("corrupt identity: a number that nothing has")
    if not all((text or "").isprintable() for text in (device.type, device.name)):
        raise RingUnusable("corrupt identity: device: characters that no name has")
    if file_name != f"highwater-{identity.instance}-{identity.pid}.ring":
        raise RingUnusable("corrupt identity: it is not that of the file's name")
    return identity

"""The dict that takes the place of the engine's encoder cache: some of its values lie in host memory until asked for.

It refuses to lose a key: a spilled entry keeps its key and its place, and every way to its value brings it back to the
device first. The engine never notices, but for the time that takes. The raw values (`dict.items(cache)`) are for our
own code alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, ValuesView
from dataclasses import dataclass
from opcode import opmap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from worker_ext.storages import Tensor

_POP_TOP = opmap["POP_TOP"]
_CACHE = opmap.get("CACHE", 0)


@dataclass(frozen=True)
class Spilled:
    """What stands in the dict for an entry that lies in host memory."""

    host: Tensor
    device: Any
    """Where it came from, and goes back to."""
    host_bytes: int
    """What the copy takes of the host; more than its elements where the allocator rounds up."""
    origin: tuple[str, int]
    """The storage that it was made in: it tells an entry that came back from one made anew."""


@dataclass
class Ledger:
    """What was moved since the engine started, in entries; an entry that went twice counts twice."""

    spills: int = 0
    restores: int = 0
    restore_seconds: float = 0.0


class SpillingDict(dict[Any, Any]):
    """A dict of encoder outputs, some of them in host memory.

    Args:
        contents: What it begins with, in this order.
        to_device: Copies a spilled entry back to its device; may raise, and the entry then stays spilled.
        ledger: Where moves are counted.
        clock: Seconds that only grow.
    """

    __slots__ = ("_clock", "_ledger", "_origins", "_since", "_tick", "_to_device", "_uses")

    def __init__(
        self,
        contents: Mapping[Any, Any],
        to_device: Callable[[Spilled], Tensor],
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(contents)
        self._to_device = to_device
        self._ledger = ledger
        self._clock = clock
        self._since = clock()
        # Counted, not timed: ranks that share a model see the same accesses in the same order, and so agree on which
        # entry was used last, which their clocks do not tell them.
        self._tick = 0
        self._uses: dict[Any, tuple[int, float]] = {}
        self._origins: dict[Any, tuple[str, int]] = {}

    # --- for trim and restore ---

    def last_use(self, key: Hashable) -> int:
        """Return the number of the engine's last access to an entry; 0 where there was none since we watch."""
        use = self._uses.get(key)
        return use[0] if use else 0

    def idle_seconds(self, key: Hashable) -> float:
        """Return the seconds since that access, or since we watch."""
        use = self._uses.get(key)
        return self._clock() - (use[1] if use else self._since)

    def origin(self, key: Hashable) -> tuple[str, int] | None:
        """Return the storage that an entry was made in, None where it still lies there."""
        return self._origins.get(key)

    def put_away(self, spilled: Mapping[Any, Spilled]) -> None:
        """Put entries' copies in host memory in their place. No access of the engine's: their last use stays."""
        for key, value in spilled.items():
            super().__setitem__(key, value)
            self._ledger.spills += 1

    def bring_back(self, key: Hashable, value: Spilled) -> Tensor:
        """Return a spilled entry's value, on its device again; where that fails, it stays spilled and this raises."""
        tensor = self._timed(value)
        super().__setitem__(key, tensor)
        self._origins.setdefault(key, value.origin)  # the first, however often it goes and comes back
        self._ledger.restores += 1
        return tensor

    # --- for the engine: single entries ---

    def __getitem__(self, key: Hashable) -> Any:  # noqa: ANN401 - a dict's values are of any type
        value = super().__getitem__(key)
        if type(value) is Spilled:
            value = self.bring_back(key, value)
        self._tick += 1
        self._uses[key] = self._tick, self._clock()
        return value

    def get(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401 - as above
        """Return an entry's value; asked for by a key that is not there, nothing is brought back."""
        return self[key] if key in self else default  # noqa: SIM401 - it is what is being defined

    def __setitem__(self, key: Hashable, value: object) -> None:
        super().__setitem__(key, value)
        self._origins.pop(key, None)
        self._tick += 1
        self._uses[key] = self._tick, self._clock()

    def setdefault(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401 - as above
        """Return an entry's value, made first where it is not there."""
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: Hashable) -> None:
        super().__delitem__(key)
        self._forget(key)

    def pop(self, key: Hashable, *default: Any) -> Any:  # noqa: ANN401 - as above
        """Take an entry out, and return its value if the caller wants it."""
        value = super().pop(key, *default)
        self._forget(key)
        if type(value) is Spilled and _caller_drops_the_result():
            # As every vLLM and vllm-ascend does up to now: they pop to free (`_update_states`, `free_encoder_cache`).
            # To bring the entry back for that would wait for the device, and allocate on it, for a value that the
            # next instruction throws away.
            return value.host
        return self._last_value(value)

    def popitem(self) -> tuple[Any, Any]:
        """Take the last entry out, and return it."""
        key, value = super().popitem()
        self._forget(key)
        return key, self._last_value(value)

    def _last_value(self, value: Any) -> Any:  # noqa: ANN401 - as above
        if type(value) is not Spilled:
            return value
        try:
            tensor = self._timed(value)
        except Exception:  # noqa: BLE001 - the entry is gone, as it had to: to free must not fail for want of memory
            return value.host  # the same tensor, and all that is left to give
        self._ledger.restores += 1
        return tensor

    def _timed(self, value: Spilled) -> Tensor:
        started = time.perf_counter()
        try:
            return self._to_device(value)
        finally:
            self._ledger.restore_seconds += time.perf_counter() - started

    def _forget(self, key: Hashable) -> None:
        self._uses.pop(key, None)
        self._origins.pop(key, None)

    # --- for the engine: all entries ---

    def clear(self) -> None:
        """Drop everything, wherever it lies."""
        super().clear()
        self._uses.clear()
        self._origins.clear()

    def update(self, *others: Any, **named: Any) -> None:  # noqa: ANN401 - as dict's: a mapping or pairs
        """Put entries in: those of a mapping, pairs, or named ones."""
        # dict's own would write past __setitem__. Pairs are taken one by one: vLLM hands in generators that encode.
        if len(others) > 1:
            raise TypeError(f"update expected at most 1 argument, got {len(others)}")
        for other in others:
            pairs = ((key, other[key]) for key in other.keys()) if hasattr(other, "keys") else other  # noqa: SIM118 - asked of any mapping
            for key, value in pairs:
                self[key] = value
        for name, value in named.items():
            self[name] = value

    # In Python, though it adds nothing: `dict(cache)`, `{**cache}`, `other.update(cache)` copy raw values from a dict
    # whose __iter__ is dict's own (CPython, Objects/dictobject.c, `dict_merge`), and go by keys() and [] otherwise.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def values(self) -> Any:  # noqa: ANN401 - dict's type for it cannot be made in Python
        """Return a view of the values that brings back each as it comes to it."""
        return _Values(self)

    def items(self) -> Any:  # noqa: ANN401 - as above
        """Return a view of the entries that brings back each as it comes to it."""
        return _Items(self)

    def copy(self) -> dict[Any, Any]:
        """Return a plain dict: whoever copies wants the values as they are now, and its copy is not watched."""
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[dict[Any, Any]]]:  # noqa: ANN401 - object's own
        # For copy.copy, copy.deepcopy and pickle: again a plain dict.
        return dict, (dict(self),)

    @classmethod
    def fromkeys(cls, keys: Any, value: Any = None) -> dict[Any, Any]:  # noqa: ANN401 - as dict's
        """Return a plain dict."""
        return dict.fromkeys(keys, value)

    def __or__(self, other: Any) -> Any:  # noqa: ANN401 - as dict's
        return dict(self) | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:  # noqa: ANN401 - as dict's
        return other | dict(self) if isinstance(other, dict) else NotImplemented

    def __ior__(self, other: Any) -> Any:  # noqa: ANN401 - as dict's
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return dict(self) != other

    __hash__ = None  # as dict's

    def __repr__(self) -> str:
        # Without the values: whoever prints a cache does not mean to move it.
        spilled = sum(type(value) is Spilled for value in dict.values(self))
        return f"<{type(self).__name__} of {len(self)} entries, {spilled} of them in host memory>"


# collections.abc's views go through the dict's [], which brings back one entry at a time. Theirs lack __reversed__.
class _Values(ValuesView[Any]):
    def __init__(self, cache: SpillingDict) -> None:
        super().__init__(cache)
        self._cache = cache

    def __reversed__(self) -> Iterator[Any]:
        return (self._cache[key] for key in reversed(self._cache))


class _Items(ItemsView[Any, Any]):
    def __init__(self, cache: SpillingDict) -> None:
        super().__init__(cache)
        self._cache = cache

    def __reversed__(self) -> Iterator[tuple[Any, Any]]:
        return ((key, self._cache[key]) for key in reversed(self._cache))


def _caller_drops_the_result() -> bool:
    """Say whether the next instruction of our caller's caller throws its call's result away: `cache.pop(key, None)`.

    Where that cannot be seen the answer is False, and the result is as good as any dict's.
    """
    frame = sys._getframe(2)
    code, position = frame.f_code.co_code, frame.f_lasti + 2  # instructions are two bytes wide
    while position < len(code) and code[position] == _CACHE:  # room that newer interpreters leave behind a call
        position += 2
    return position < len(code) and code[position] == _POP_TOP

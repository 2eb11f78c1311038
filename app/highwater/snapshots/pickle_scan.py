"""The check of a pickle before anything of it is built: only plain data within bounds passes.

Only the instructions are allowed by which Python writes None, booleans, numbers, text, bytes, lists, tuples and dicts
in protocols 2 to 5. Instructions that name or call a class or a function, or set an object's state, are refused, and so
are counts and depths that no snapshot has: a few bytes of pickle can require gigabytes. Nothing is built here; the
check needs a small integer for each value on the pickle's stack.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from highwater.snapshots import UnsafePickle
from highwater.text.printable import printable


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a pickle; PyTorch's snapshots are far below them."""

    nbytes: int = 256 << 20  # the file's size
    instructions: int = 40_000_000
    depth: int = 32  # of containers within each other: a snapshot's are 6 deep
    stack: int = 20_000  # values that wait for their container: Python writes lists and dicts in batches of 1,000
    memo: int = 10_000_000  # values that the pickle refers back to


BOUNDS: Final = Bounds()

# Instructions with no effect on others, by the bytes of their argument; negative: so many bytes hold its length.
_VALUES: Final = {
    **dict.fromkeys((b"N", b"\x88", b"\x89"), 0),  # None, true, false
    **dict.fromkeys((b"K",), 1),
    **dict.fromkeys((b"M",), 2),
    **dict.fromkeys((b"J",), 4),
    **dict.fromkeys((b"G",), 8),
    **dict.fromkeys((b"\x8a", b"\x8c", b"C"), -1),  # LONG1, SHORT_BINUNICODE, SHORT_BINBYTES
    **dict.fromkeys((b"X", b"B"), -4),  # BINUNICODE, BINBYTES
    **dict.fromkeys((b"\x8d", b"\x8e"), -8),  # BINUNICODE8, BINBYTES8
}
_NAMES: Final = {ord(one.code.encode("latin-1")): one.name for one in pickletools.opcodes}
_MAX_NAME: Final = 100


class _Scan:
    """One pickle's depths: for each value on its stack and in its memo, the levels of containers within it."""

    def __init__(self, data: bytes, bounds: Bounds) -> None:
        self.data = data
        self.bounds = bounds
        self.at = 0
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: dict[int, int] = {}
        self.texts: list[tuple[int, int]] = []
        self.has_ended = False

    def number(self, size: int) -> int:
        """Read an argument: an unsigned little-endian number."""
        start = self.at
        self.skip(size)
        return int.from_bytes(self.data[start : self.at], "little")

    def skip(self, size: int) -> None:
        if self.at + size > len(self.data):
            raise UnsafePickle("the file ends in the middle of an instruction")
        self.at += size

    def pop(self) -> int:
        """Take the uppermost value above the last mark off the stack."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise UnsafePickle("an instruction finds too few values")
        return self.stack.pop()

    def hold(self, depth: int) -> None:
        """Put something of this depth into the uppermost container."""
        if not self.stack:
            raise UnsafePickle("an instruction finds no container")
        self.stack[-1] = self.checked(max(self.stack[-1], depth + 1))

    def checked(self, depth: int) -> int:
        if depth > self.bounds.depth:
            raise UnsafePickle(f"it is nested more than {self.bounds.depth} deep")
        return depth

    def to_mark(self) -> int:
        """Take everything above the last mark off the stack, and return the depth of the deepest."""
        if not self.marks:
            raise UnsafePickle("an instruction finds no mark")
        start = self.marks.pop()
        deepest = max(self.stack[start:], default=-1)
        del self.stack[start:]
        return deepest

    def remember(self, index: int) -> None:
        if index >= self.bounds.memo:
            raise UnsafePickle(f"it refers back to more than {self.bounds.memo:,} values")
        if not self.stack:
            raise UnsafePickle("an instruction finds too few values")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise UnsafePickle("it refers to a value that it does not hold")
        self.stack.append(self.memo[index])

    # --- instructions ---

    def protocol(self) -> None:
        version = self.number(1)
        if not 2 <= version <= 5:  # noqa: PLR2004 - the binary protocols
            raise UnsafePickle(f"its protocol is {version}; PyTorch writes 2 to 5")

    def value(self, size: int, *, is_text: bool) -> None:
        """Skip a number, a text or bytes."""
        length = size if size >= 0 else self.number(-size)
        if is_text:
            self.texts = [*self.texts[-1:], (self.at, length)]
        self.skip(length)
        self.stack.append(0)

    def tuple_of(self, count: int) -> None:
        self.stack.append(self.checked(max(self.pop() for _ in range(count)) + 1))

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.check_key(key)
        self.hold(max(value, key))

    def set_items(self) -> None:
        if self.marks:
            self.check_key(max(self.stack[self.marks[-1] :: 2], default=0))
        self.hold(self.to_mark())

    def check_key(self, depth: int) -> None:
        """Refuse keys that hold containers: a few nested tuples can take hours to hash."""
        if depth > 1:
            raise UnsafePickle("a dict's key holds containers; a snapshot's keys are words")

    def end(self) -> None:
        if len(self.stack) != 1 or self.marks:
            raise UnsafePickle("it ends with other than one value")
        self.has_ended = True


_INSTRUCTIONS: Final[dict[int, Callable[[_Scan], object]]] = {
    ord(b"\x80"): _Scan.protocol,
    ord(b"\x95"): lambda scan: scan.skip(8),  # a frame's length: a hint for reading
    ord(b"("): lambda scan: scan.marks.append(len(scan.stack)),
    ord(b"."): _Scan.end,
    **dict.fromkeys(b"])}", lambda scan: scan.stack.append(0)),
    ord(b"a"): lambda scan: scan.hold(scan.pop()),
    ord(b"e"): lambda scan: scan.hold(scan.to_mark()),
    ord(b"s"): _Scan.set_item,
    ord(b"u"): _Scan.set_items,
    ord(b"t"): lambda scan: scan.stack.append(scan.checked(scan.to_mark() + 1)),
    ord(b"\x85"): lambda scan: scan.tuple_of(1),
    ord(b"\x86"): lambda scan: scan.tuple_of(2),
    ord(b"\x87"): lambda scan: scan.tuple_of(3),
    ord(b"\x94"): lambda scan: scan.remember(len(scan.memo)),
    ord(b"q"): lambda scan: scan.remember(scan.number(1)),
    ord(b"r"): lambda scan: scan.remember(scan.number(4)),
    ord(b"h"): lambda scan: scan.recall(scan.number(1)),
    ord(b"j"): lambda scan: scan.recall(scan.number(4)),
    **{
        ord(code): partial(_Scan.value, size=size, is_text=code in (b"\x8c", b"X", b"\x8d"))
        for code, size in _VALUES.items()
    },
}


def scan(data: bytes, bounds: Bounds = BOUNDS) -> None:
    """Return if the bytes are one pickle of plain data within the bounds.

    Raises:
        UnsafePickle: They are not; the text says what was refused.
    """
    if len(data) > bounds.nbytes:
        raise UnsafePickle(f"it has {len(data):,} bytes; at most {bounds.nbytes:,} are read")
    if data[:1] != b"\x80":
        raise UnsafePickle("it is not a pickle of protocol 2 to 5; PyTorch's snapshots are")
    under_way, count = _Scan(data, bounds), 0
    stack, limit, size = under_way.stack, bounds.instructions, len(data)
    while not under_way.has_ended:
        at = under_way.at
        if at >= size:
            raise UnsafePickle("the file ends before the pickle does")
        instruction = _INSTRUCTIONS.get(data[at])
        if instruction is None:
            name = _NAMES.get(data[at], f"0x{data[at]:02x}")
            raise UnsafePickle(
                f"instruction {name}{_named(under_way, name)} at byte {at:,}: a snapshot is plain data and needs no "
                "such thing"
            )
        under_way.at = at + 1
        instruction(under_way)
        count += 1
        if count > limit:
            raise UnsafePickle(f"it has more than {limit:,} instructions")
        if len(stack) > bounds.stack or len(under_way.marks) > bounds.stack:
            raise UnsafePickle(f"more than {bounds.stack:,} of its values wait for a container")
    if under_way.at != size:
        raise UnsafePickle(f"{size - under_way.at:,} bytes follow the pickle's end")


def _named(under_way: _Scan, name: str) -> str:
    """Return the class or function that an instruction names, where it does."""
    data = under_way.data
    if name in ("GLOBAL", "INST"):
        words = data[under_way.at + 1 : under_way.at + 1 + 2 * _MAX_NAME].split(b"\n")[:2]
    elif name == "STACK_GLOBAL":
        words = [data[start : start + min(length, _MAX_NAME)] for start, length in under_way.texts]
    else:
        return ""
    full_name = ".".join(word.decode("utf-8", "replace")[:_MAX_NAME] for word in words)
    return f" ({printable(full_name, instead='?')})"

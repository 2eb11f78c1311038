"""Whole numbers of bytes and blocks."""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)

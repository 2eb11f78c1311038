"""The part of Python's JSON that is not JSON, refused: NaN and the infinities, which its parser would take."""

from __future__ import annotations

from typing import NoReturn


def refuse_constant(name: str) -> NoReturn:
    """Refuse such a number: the ``parse_constant`` of a decoder.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{name} is not JSON")

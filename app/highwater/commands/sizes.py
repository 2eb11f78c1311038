"""Sizes as a person types them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

import click

from highwater.units import GIB

_Callback: TypeAlias = Callable[[click.Context, click.Parameter, str | None], int | None]
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)([bB]?)\s*")
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size_given(text: str) -> int:
    """Return a size in bytes: ``1GiB``, ``512MiB``, ``1.5GB``, or plain. Raises ValueError for others, and zero."""
    from pydantic import ByteSize, TypeAdapter, ValidationError  # `highwater plan` loads without it

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as exc:
        raise ValueError(f"{text!r} is not a size; one is 1GiB, 512MiB or 1.5GB") from exc
    if size < 1:
        raise ValueError(f"{text!r} is zero; one is 1GiB, 512MiB or 1.5GB")
    return size


def vllm_size(text: str) -> int:
    """Return a size: ``64GiB``, ``24GB``, plain bytes, or as vLLM takes them (``10G``, ``10g``). Raises ValueError.

    vLLM's own letters (engine/arg_utils.py, human_readable_int): small ones count in thousands, capital ones in 1024.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size; write it as 64GiB, 24GB, 10G or in bytes")
    letter = match[2]
    is_binary = match[3] or (letter.isupper() and not match[4])
    unit = (1024 if is_binary else 1000) ** _POWERS[letter.lower()]
    # Whole numbers stay exact, however large.
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise ValueError(f"{text!r} is zero; a size of 1 byte or more is needed")
    return size


def _count(text: str) -> int:
    """Return a whole number, written as vLLM takes it (``32k``, ``32K``). Raises ValueError."""
    if "." not in text and "b" not in text.lower():
        with suppress(ValueError):
            return vllm_size(text)
    raise ValueError(f"{text!r} is no count of 1 or more; write it as 32768, 32K (times 1024) or 32k (times 1000)")


def _callback(read: Callable[[str], int]) -> _Callback:
    def size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
        try:
            return None if value is None else read(value)
        except ValueError as exc:
            raise click.BadParameter(str(exc), context, parameter) from exc

    return size


def device_size(text: str) -> int:
    """Return a device's memory. Raises ValueError for a size that none has: somebody left the unit out."""
    size = vllm_size(text)
    if size < GIB:
        meant = f"; {text.strip()}GiB?" if text.strip().isdecimal() else ""
        raise ValueError(f"{text!r} is {size:,} bytes, less than any card has{meant}")
    return size


size_option: Final = _callback(size_given)
vllm_size_option: Final = _callback(vllm_size)
count_option: Final = _callback(_count)
device_size_option: Final = _callback(device_size)

"""Sizes as a person types them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import click

_Callback: TypeAlias = Callable[[click.Context, click.Parameter, str | None], int | None]


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


def _callback(read: Callable[[str], int]) -> _Callback:
    def size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
        try:
            return None if value is None else read(value)
        except ValueError as exc:
            raise click.BadParameter(str(exc), context, parameter) from exc

    return size


size_option: Final = _callback(size_given)

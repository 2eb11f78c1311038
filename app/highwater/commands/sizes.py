"""Sizes as a person types them."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError


def size_given(text: str) -> int:
    """A size as typed, in bytes: ``1GiB``, ``512MiB``, ``1.5GB``, or plain bytes.

    Raises:
        ValueError: It is not a size, or it is zero.
    """
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as exc:
        raise ValueError(f"{text!r} is no size; one is 1GiB, 512MiB or 1.5GB") from exc
    if size < 1:
        raise ValueError(f"{text!r} is nothing; one is 1GiB, 512MiB or 1.5GB")
    return size

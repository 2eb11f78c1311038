"""A rule's waters as a person reads them, and sizes as a person types them."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

from app.policy import FALLING_SIGNALS
from app.units import share_text, size_text


def signal_text(signal: str, value: float | None) -> str:
    """The value of a policy's signal in its unit."""
    return share_text(value) if signal.endswith("_ratio") else size_text(value)


def waters_text(signal: str, high: float | None, low: float | None) -> str:
    """Where a rule acts and where it stops, in its signal's unit; empty where that is not known yet."""
    if high is None or low is None:
        return ""
    word = "acts below" if signal in FALLING_SIGNALS else "acts at"
    return f"{word} {signal_text(signal, high)}, stops at {signal_text(signal, low)}"


def size_given(text: str) -> int:
    """A size as typed, in bytes: ``1GiB``, ``512MiB``, ``1.5GB``, or plain bytes.

    Raises:
        ValueError: It is none, or nothing at all.
    """
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as exc:
        raise ValueError(f"{text!r} is no size; one is 1GiB, 512MiB or 1.5GB") from exc
    if size < 1:
        raise ValueError(f"{text!r} is nothing; one is 1GiB, 512MiB or 1.5GB")
    return size

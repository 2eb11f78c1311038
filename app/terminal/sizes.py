"""Sizes, shares and spans of time as a person reads them, and sizes as a person types them."""

from __future__ import annotations

from pydantic import ByteSize, TypeAdapter, ValidationError

from app.policy import FALLING_SIGNALS

UNKNOWN = "-"
_KIB, _MIB, _GIB = 1024, 1024**2, 1024**3
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0


def size_text(size: float | None, *, signed: bool = False) -> str:
    """Bytes in the unit that fits: ``56.41 GiB``, ``268 MiB``, ``12 KiB``, ``0 B``."""
    if size is None:
        return UNKNOWN
    sign, small = "+" if signed else "", abs(size)
    # Beyond 999.5 MiB it would read as 1000 MiB.
    if small >= 999.5 * _MIB:
        return f"{size / _GIB:{sign}.2f} GiB"
    if small >= _MIB:
        return f"{size / _MIB:{sign}.{0 if small >= 100 * _MIB else 1}f} MiB"
    if small >= _KIB:
        return f"{size / _KIB:{sign}.0f} KiB"
    return f"{size:{sign}.0f} B" if size else "0 B"


def share_text(share: float | None) -> str:
    """A ratio in percent: ``93.9 %``."""
    return UNKNOWN if share is None else f"{share:.1%}".replace("%", " %")


def signal_text(signal: str, value: float | None) -> str:
    """The value of a policy's signal in its unit."""
    return share_text(value) if signal.endswith("_ratio") else size_text(value)


def waters_text(signal: str, high: float | None, low: float | None) -> str:
    """Where a rule acts and where it stops, in its signal's unit; empty where that is not known yet."""
    if high is None or low is None:
        return ""
    word = "acts below" if signal in FALLING_SIGNALS else "acts at"
    return f"{word} {signal_text(signal, high)}, stops at {signal_text(signal, low)}"


def span_text(seconds: float | None) -> str:
    """A span of time by its two largest units: ``4 s``, ``12 m 30 s``, ``1 h 20 m``, ``3 d 4 h``."""
    if seconds is None:
        return UNKNOWN
    for unit, large, small, divisor in ((_DAY, "d", "h", _HOUR), (_HOUR, "h", "m", _MINUTE), (_MINUTE, "m", "s", 1.0)):
        if seconds >= unit:
            rest = int(seconds % unit // divisor)
            return f"{int(seconds // unit)} {large} {rest} {small}" if rest else f"{int(seconds // unit)} {large}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"  # noqa: PLR2004 - one decimal while it matters


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

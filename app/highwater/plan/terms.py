"""Types and names that several modules of a plan share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

# How a figure is known, best first: the engine's own number, a formula that is vLLM's own, a value that was measured,
# an estimate between bounds.
Grade: TypeAlias = Literal["engine", "exact", "measured", "estimated"]
GRADES: Final[tuple[Grade, ...]] = ("engine", "exact", "measured", "estimated")

# The numbers of a version of vLLM: 0.20.1 is (0, 20, 1). A minor release, (0, 20), compares with it too.
Release: TypeAlias = tuple[int, ...]

# A config.json, or a part of it, as it was read.
Config: TypeAlias = Mapping[str, Any]

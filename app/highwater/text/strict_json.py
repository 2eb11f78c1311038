"""JSON from outside, as the standard has it: Python's own parser takes ``NaN`` and ``Infinity`` too."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value.

    Raises:
        ValueError: It is not JSON, or nested too deeply for the parser.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

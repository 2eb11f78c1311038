"""A function that fails, in place of one of the system's or of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises, whatever it is called with."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail

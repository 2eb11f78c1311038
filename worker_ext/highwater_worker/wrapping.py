"""Wraps methods of a live worker on the instance, so that the engine's calls pass through this package.

The engine calls its workers' methods by name, so an attribute of the instance comes before the class's method. Nothing
here keeps the worker alive: a wrapper is held by the worker alone, and reaches the method through a weak reference.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def wrap_method(worker: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:  # noqa: ANN401 - vLLM's worker, of any version
    """Put `make(method)` in the place of `worker.name`; return False if the worker has no such method.

    `make` gets the method as the engine would have called it. Its replacement must pass arguments, result and
    exceptions on unchanged, and must not hold the worker.
    """
    method = _without_owner(worker, name)
    if method is None:
        return False
    wrapper = make(method)
    functools.update_wrapper(wrapper, method)
    setattr(worker, name, wrapper)
    return True


def notice_calls(
    worker: Any,  # noqa: ANN401 - as above
    name: str,
    *,
    before: Callable[..., object] = lambda *_, **__: None,
    after: Callable[..., object] = lambda *_, **__: None,
) -> None:
    """Have calls of `worker.name` noticed: `before` gets their arguments, `after` what they return and the arguments.

    What these two raise is dropped: a fault of this package must not fail the engine's call.
    """

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
            with suppress(Exception):
                before(*arguments, **named)
            returned = method(*arguments, **named)
            with suppress(Exception):
                after(returned, *arguments, **named)
            return returned

        return noticed

    wrap_method(worker, name, make)


def unwrap_method(worker: Any, name: str, wrapper: object) -> None:  # noqa: ANN401 - as above
    """Put back the method that `wrapper` replaced; inside a foreign wrapper it stays."""
    if vars(worker).get(name) is not wrapper:
        return
    inner = getattr(wrapper, "__wrapped__", None)
    if inner is None or getattr(inner, "_highwater_from_class", False):
        delattr(worker, name)
    else:
        setattr(worker, name, inner)


def _without_owner(worker: Any, name: str) -> Callable[..., Any] | None:  # noqa: ANN401 - as above
    own = vars(worker).get(name)
    if own is not None:
        return own if callable(own) else None
    bound = getattr(worker, name, None)
    function = getattr(bound, "__func__", None)
    if function is None or getattr(bound, "__self__", None) is not worker:
        return bound if callable(bound) else None
    reference = weakref.ref(worker)

    @functools.wraps(function)
    def method(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the method's own
        return function(reference(), *arguments, **named)

    method._highwater_from_class = True  # type: ignore[attr-defined]  # a mark for `unwrap_method`
    return method

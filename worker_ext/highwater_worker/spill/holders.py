"""Finding other references to an object before it is replaced: their holders would go on with the old one."""

from __future__ import annotations

import gc
import sys
from types import FrameType, SimpleNamespace
from typing import Any


def other_holders(owner: object, name: str) -> list[str]:
    """Return the types of the objects, besides its owner, that refer to `owner.name`.

    References are counted first, which takes no time and misses none. Only where there are too many does the garbage
    collector look for them: it walks every object, and sees neither references in C nor objects that the engine has
    frozen (`gc.freeze()` after warming up: vllm 0.32.0 v1/worker/gpu_worker.py:1082, `compile_or_warm_up_model`). A
    frame is not a holder: it belongs to a call that ends.
    """
    if is_held_once(owner, name):
        return []
    found = gc.get_referrers(getattr(owner, name))
    own: list[Any] = [owner, getattr(owner, "__dict__", None)]
    kinds = sorted({type(holder).__name__ for holder in found if not _is_one_of(holder, own)} - {FrameType.__name__})
    if not kinds and gc.get_freeze_count():
        return ["something that cannot be seen"]
    return kinds


def is_held_once(owner: object, name: str) -> bool:
    """Return whether nothing but its owner refers to `owner.name`; a frame of a call under way counts here too."""
    # The same expression on an object that is surely held once says how many references the expression makes itself.
    return _references(owner, name) <= _references(SimpleNamespace(held={}), "held")


def _references(owner: object, name: str) -> int:
    return sys.getrefcount(getattr(owner, name))


def _is_one_of(value: object, others: list[Any]) -> bool:
    return any(value is other for other in others)

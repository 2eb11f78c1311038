"""The KV cache as its engine describes it: each layer's share of a block, and the groups that they form.

Layers that are equal are described once, in runs, so that a model of hundreds of layers stays a few hundred bytes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from highwater_worker.attributes import look_up, whole
from highwater_worker.errors import UnreadableError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_KINDS = 24
"""Layers that differ from one another; no model known has more than a handful."""
MAX_RUNS = 512
MAX_GROUPS = 64
_MAX_FIELDS = 32
_MAX_TEXT = 60


def describe_layers(specs: Mapping[str, object]) -> dict[str, Any]:
    """Return `kinds` (each different layer once) and `runs` (kind and count, in the model's order).

    Args:
        specs: What `get_kv_cache_spec` returns: by layer name, vLLM's own description (vllm 0.12.0
            v1/kv_cache_interface.py:20, vllm 0.32.0 v1/kv_cache_interface.py:165, `KVCacheSpec`).

    Raises:
        UnreadableError: There are more kinds or runs than a file has room for.
    """
    kinds: list[dict[str, Any]] = []
    runs: list[list[int]] = []
    for spec in specs.values():
        described = describe_spec(spec)
        if described not in kinds:
            kinds.append(described)
        kind = kinds.index(described)
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
        if len(kinds) > MAX_KINDS or len(runs) > MAX_RUNS:
            raise UnreadableError(f"the model's {len(specs)} layers differ too often to be described")
    return {"kinds": kinds, "runs": runs}


def describe_groups(groups: Iterable[object]) -> list[dict[str, Any]]:
    """Return each group's common description and its number of layers.

    Raises:
        UnreadableError: There are more groups than a file has room for.
    """
    described = [
        {**describe_spec(look_up(group, "kv_cache_spec")), "layers": len(look_up(group, "layer_names") or ())}
        for group in groups
    ]
    if len(described) > MAX_GROUPS:
        raise UnreadableError(f"{len(described)} groups are too many to be described")
    return described


def describe_spec(spec: object) -> dict[str, Any]:
    """Return a layer's description: the name of its class as `kind`, its size as `page_bytes`, and its own fields.

    Every field that has a plain value is taken as it is called, so that a kind of layer that is new in a later vLLM
    is described too; of a data type its size is taken, as `dtype_bytes`.
    """
    described: dict[str, Any] = {"kind": type(spec).__name__}
    with suppress(Exception):  # computed: a kind of layer may have none, or compute it of what is not there
        described["page_bytes"] = whole(getattr(spec, "page_size_bytes", None))
    for name, value in list(getattr(spec, "__dict__", {}).items())[:_MAX_FIELDS]:
        plain = _plain(value)
        size = whole(getattr(value, "itemsize", None))
        if size is not None:
            described[f"{name}_bytes"] = size
        elif isinstance(value, tuple) and value and all(hasattr(one, "itemsize") for one in value):
            described[f"{name}_bytes"] = [whole(one.itemsize) for one in value]
        elif plain is not None:
            described[name] = plain
    return described


def _plain(value: object) -> Any:  # noqa: ANN401 - a number, a text, or a list of lists of numbers
    if isinstance(value, bool):
        return value
    if isinstance(value, str):  # an enumeration of texts is its value
        return printable(str(getattr(value, "value", value)), _MAX_TEXT)
    number = whole(value)
    if number is not None:
        return number
    if isinstance(value, (list, tuple)):
        plain = [_plain(one) for one in value[:_MAX_FIELDS]]
        return None if any(one is None for one in plain) else plain
    # A fraction, such as the tokens of a state; nested objects and mappings are not a layer's geometry.
    parts = whole(getattr(value, "numerator", None)), whole(getattr(value, "denominator", None))
    return f"{parts[0]}/{parts[1]}" if None not in parts else None

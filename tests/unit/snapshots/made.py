"""Snapshots in the shape that `torch.cuda.memory._snapshot` documents: laid out by hand, or of any layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

MIB = 1 << 20
_STATES = {"live": "active_allocated", "pending": "active_pending_free", "free": "inactive"}


def frames(*names: str) -> list[dict[str, Any]]:
    """A stack, innermost first, of functions in the engine's model file; PyTorch's own first."""
    own = [{"name": name, "filename": "/site-packages/vllm/model_runner.py", "line": 7} for name in names]
    return [{"name": "empty", "filename": "/site-packages/torch/functional.py", "line": 1}, *own]


def block(size: int, state: str = "live", stack: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """A block; `stack` None: the history was off."""
    made = {"size": size, "requested_size": size, "state": _STATES[state], "frames": stack or []}
    return made | more


def segment(blocks: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A segment of these blocks, whose sums follow from them."""
    start = more.get("address", 0x7F00_0000_0000)
    addresses = itertools.accumulate((one["size"] for one in blocks), initial=start)
    held = [one for one in blocks if one["state"] == "active_allocated"]
    return {
        "device": 0,
        "address": start,
        "total_size": sum(one["size"] for one in blocks),
        "allocated_size": sum(one["size"] for one in held),
        "active_size": sum(one["size"] for one in blocks if one["state"] != "inactive"),
        "requested_size": sum(one["requested_size"] for one in held),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [one | {"address": address} for one, address in zip(blocks, addresses, strict=False)],
    } | more


def snapshot(segments: Sequence[dict[str, Any]], trace: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The whole, with the history of device 0."""
    return {
        "segments": list(segments),
        "device_traces": [list(trace)],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False},
        "external_annotations": [],
    }


def fragmented(holes: int = 57, hole: int = 83 * MIB) -> dict[str, Any]:
    """59.38 GiB reserved and 54.77 allocated: 4.61 GiB in holes between tensors, each too small for 180 MiB."""
    stack = frames("encode", "execute_model")
    total, free = round(59.38 * 1024) * MIB, holes * hole
    holed = [
        segment([block(hole, "free"), block(17 * MIB, "live", stack)], address=0x7F00_0000_0000 + index * (1 << 30))
        for index in range(holes)
    ]
    rest = total - free - holes * 17 * MIB
    return snapshot([*holed, segment([block(rest, "live", frames("load_model"))], address=0x7E00_0000_0000)])


_SIZES = st.integers(1, 64).map(lambda count: count * 512)
_STACKS = st.sampled_from([[], frames("encode"), frames("load_model", "init")])


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    """Any block."""
    size = draw(_SIZES)
    state = draw(st.sampled_from(sorted(_STATES)))
    rounding = draw(st.integers(0, 511)) if state != "free" else 0
    return block(size, state, draw(_STACKS), requested_size=size - rounding)


@st.composite
def snapshots(draw: st.DrawFn) -> dict[str, Any]:
    """Any snapshot."""
    made = [
        segment(
            draw(st.lists(blocks(), min_size=1, max_size=4)),
            address=index << 30,
            device=draw(st.integers(0, 1)),
            stream=draw(st.sampled_from([0, 0x55AA])),
            segment_type=draw(st.sampled_from(["small", "large"])),
            segment_pool_id=draw(st.sampled_from([(0, 0), (0, 3), (2, 0)])),
            is_expandable=draw(st.booleans()),
        )
        for index in range(draw(st.integers(0, 5)))
    ]
    return snapshot(made)

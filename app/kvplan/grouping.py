"""Layers to groups: the layers that share block tables, and the size of each layer's page.

Follows `get_kv_cache_groups` of vllm/v1/core/kv_cache_utils.py step by step. Where vLLM would stop with an error
whatever the bytes, a `PlanError` says which layers cannot be served together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import starmap

from kvplan import Limits, PlanError, ceil_div
from kvplan.generations import Generation
from kvplan.specs import (
    AttentionLayer,
    ChunkedLocal,
    FullAttention,
    Layers,
    LayerSpec,
    MambaState,
    MlaAttention,
    SlidingWindow,
)


class _UnequalPages(PlanError):
    """The pages of two layers cannot be made equal; newer versions may promote all to full attention instead."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    layers: Layers  # as the cache manager sees them; in a group that is not mixed all are equal
    is_mixed: bool = False  # its layers are of one type and of several sizes, each with memory of its own
    padding_layers: int = 0  # the layers whose room it wastes, to be as large as the other groups

    @property
    def spec(self) -> LayerSpec:
        """One of its layers: all of them need the same number of blocks."""
        return next(iter(self.layers.values()))

    @property
    def kind(self) -> str:
        return "mixed" if self.is_mixed else self.spec.kind

    def page_bytes(self, names: Collection[str] | None = None) -> int:
        """Return the bytes that one block takes in the layers named; None: in all its layers."""
        return sum(spec.page_bytes for name, spec in self.layers.items() if names is None or name in names)


def group_layers(layers: Layers, limits: Limits, generation: Generation) -> tuple[LayerGroup, ...]:
    """Divide the layers of a whole model, of all its pipeline stages, into groups.

    Raises PlanError: vLLM of this version cannot serve these layers together.
    """
    for name, spec in layers.items():
        if not spec.kind:
            raise PlanError(f"layer {name}: a cache of the kind {type(spec).__name__} cannot be planned")
    if not limits.hybrid_manager:
        layers = _unified(layers, generation)
    if not layers:
        return ()
    merged = _merged(list(layers.values()), generation)
    if merged is not None:
        return (LayerGroup(dict.fromkeys(layers, merged)),)
    if _is_one_type(layers, generation):
        return (LayerGroup(layers, is_mixed=True),)
    try:
        layers = _with_equal_pages(layers, generation)
    except _UnequalPages:
        # Sliding window layers are promoted beside MLA layers (`_try_get_full_allocation_fallback_groups`).
        kinds = {type(spec) for spec in layers.values()}
        if not generation.promotes_beside_mla or not {MlaAttention, SlidingWindow} <= kinds or ChunkedLocal in kinds:
            raise
        layers = _promoted(layers, generation)
        if not _is_one_type(layers, generation):
            raise
        return (LayerGroup(layers, is_mixed=True),)
    return _groups_of_equal_pages(layers, generation)


def _merged(specs: Sequence[LayerSpec], generation: Generation) -> LayerSpec | None:
    """Return the one spec that all can share (`KVCacheSpec.merge`), or None where they cannot."""
    first = specs[0]
    if isinstance(first, MlaAttention):
        if any(not isinstance(spec, MlaAttention) or spec.cache_dtype != first.cache_dtype for spec in specs):
            return None
        # Before 0.27 the sizes were not compared: all were allocated as the first one.
        return None if generation.merge_compares_mla and any(spec != first for spec in specs) else first
    if not isinstance(first, FullAttention):
        return first if all(spec == first for spec in specs) else None
    full = [spec for spec in specs if isinstance(spec, FullAttention) and not isinstance(spec, MlaAttention)]
    if len(full) < len(specs) or any(_shape(spec, generation) != _shape(first, generation) for spec in full):
        # vLLM checks the windows first: two of them stop it even where nothing else could be merged.
        if len(full) == len(specs):
            _one_window(full)
        return None
    window, chunk = _one_window(full)
    if window is not None and chunk is not None:
        return None
    return replace(first, window=window, chunk=chunk)


def _shape(spec: FullAttention, generation: Generation) -> FullAttention:
    value = spec.head_size_v if generation.merge_compares_value_size else None
    value = None if value == spec.head_size else value
    return replace(spec, window=None, chunk=None, head_size_v=value)


def _one_window(specs: Sequence[FullAttention]) -> tuple[int | None, int | None]:
    windows = {spec.window for spec in specs if spec.window is not None}
    chunks = {spec.chunk for spec in specs if spec.chunk is not None}
    for what, sizes in (("windows", windows), ("chunks", chunks)):
        if len(sizes) > 1:
            raise PlanError(
                f"sliding_window: layers with {what} of {sorted(sizes)} tokens cannot share one group; "
                "vLLM needs its hybrid KV cache manager for them"
            )
    return next(iter(windows), None), next(iter(chunks), None)


def _is_one_type(layers: Layers, generation: Generation) -> bool:
    """Return whether all layers need the same tokens, of any size (`UniformTypeKVCacheSpecs.is_uniform_type`)."""
    specs = list(layers.values())
    first = specs[0]
    if any(spec.block_size != first.block_size for spec in specs):
        return False
    if isinstance(first, FullAttention):
        return all(isinstance(spec, FullAttention) for spec in specs)
    if any(type(spec) is not type(first) for spec in specs):
        return False
    return all(_type_key(spec, generation) == _type_key(first, generation) for spec in specs)


def _type_key(spec: LayerSpec, generation: Generation) -> object:
    match spec:
        case SlidingWindow():
            return spec.window
        case ChunkedLocal():
            return spec.chunk
        case MambaState() if generation.mamba_uniform_page:
            return spec.speculative_blocks, spec.checkpoint_blocks, spec.page_bytes
        case MambaState():
            return spec.speculative_blocks
    return None


def _with_equal_pages(layers: Layers, generation: Generation) -> Layers:
    """Make every layer's page as large as the largest (`unify_kv_cache_spec_page_size`)."""
    largest = max(spec.page_bytes for spec in layers.values())
    if all(spec.page_bytes == largest for spec in layers.values()):
        return layers

    def equalled(name: str, spec: LayerSpec) -> LayerSpec:
        if spec.page_bytes == largest:
            return spec
        if isinstance(spec, MambaState) and generation.pads_mamba:
            return replace(spec, page_bytes_padded=largest)
        problem = (
            f"layer {name}: vLLM {generation.version} cannot make its page of {spec.page_bytes} bytes equal to the "
            f"largest, of {largest} bytes; another --block-size or KV cache dtype may make them divide"
        )
        if largest % spec.page_bytes == 0:
            grown = replace(spec, block_size=spec.block_size * (largest // spec.page_bytes))
            if grown.page_bytes == largest:
                return grown
            # A page that is padded, or a state, does not grow with its block: an assertion of vLLM's fails.
            raise PlanError(problem)
        if isinstance(spec, AttentionLayer) and (
            (generation.pads_pages == "by_stride" and spec.indexes_by_block_stride)
            or (generation.pads_pages == "all_but_mla" and not isinstance(spec, MlaAttention))
        ):
            return replace(spec, page_bytes_padded=largest)
        raise _UnequalPages(problem)

    return dict(zip(layers, starmap(equalled, layers.items()), strict=True))


def _groups_of_equal_pages(layers: Layers, generation: Generation) -> tuple[LayerGroup, ...]:
    """Cut each type of layer into groups of one size (`_get_kv_cache_groups_uniform_page_size`)."""
    equal: dict[LayerSpec, list[str]] = {}
    for name, spec in layers.items():
        equal.setdefault(spec, []).append(name)
    # The layers that may share a group, each bucket with their specs.
    buckets: list[tuple[list[str], list[LayerSpec]]] = []
    for spec, names in equal.items():
        for known, specs in buckets if generation.merges_windows else ():
            try:
                is_shared = _merged([*specs, spec], generation) is not None
            except PlanError:
                is_shared = False
            if is_shared:
                known.extend(names)
                specs.append(spec)
                break
        else:
            buckets.append((names, [spec]))
    smallest, largest = (f(len(names) for names, _ in buckets) for f in (min, max))
    size = largest if largest < smallest * generation.padding_threshold else smallest
    groups = []
    for names, specs in buckets:
        spec = _merged(specs, generation) or specs[0]
        count = ceil_div(len(names), size)
        # Every count-th layer, not runs of them: each pipeline stage then has its part of every group.
        groups += [LayerGroup(dict.fromkeys(names[i::count], spec)) for i in range(count)]
    return tuple(replace(group, padding_layers=size - len(group.layers)) for group in groups)


def _unified(layers: Layers, generation: Generation) -> Layers:
    """Promote windows and chunks to full attention (`unify_hybrid_kv_cache_specs`), as without the hybrid manager."""
    if _is_uniform(layers, generation):
        return layers
    promoted = _promoted(layers, generation)
    if not _is_uniform(promoted, generation):
        kinds = sorted({spec.kind for spec in layers.values()})
        raise PlanError(
            f"disable_hybrid_kv_cache_manager: layers of the kinds {', '.join(kinds)} cannot be served without the "
            "hybrid KV cache manager; leave the flag out"
        )
    return promoted


def _is_uniform(layers: Layers, generation: Generation) -> bool:
    return not layers or _merged(list(layers.values()), generation) is not None or _is_one_type(layers, generation)


def _promoted(layers: Layers, generation: Generation) -> Layers:
    full_blocks = {spec.block_size for spec in layers.values() if isinstance(spec, FullAttention)}
    if not full_blocks:
        return layers
    block = next(iter(full_blocks)) if generation.promoted_take_block and len(full_blocks) == 1 else None
    promoted: dict[str, LayerSpec] = {}
    for name, spec in layers.items():
        promoted[name] = spec
        if not isinstance(spec, SlidingWindow | ChunkedLocal):
            continue
        keeps_value = ("sliding", "all") if isinstance(spec, SlidingWindow) else ("all",)
        full = FullAttention(
            block_size=block or spec.block_size,
            kv_heads=spec.kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v if generation.promoted_keep_value_size in keeps_value else None,
            element_bytes=spec.element_bytes,
            token_head_bytes=spec.token_head_bytes,
            indexes_by_block_stride=spec.indexes_by_block_stride and generation.release >= (0, 28, 0),
            window=spec.window if isinstance(spec, SlidingWindow) else None,
            chunk=spec.chunk if isinstance(spec, ChunkedLocal) else None,
        )
        padded = spec.page_bytes_padded if generation.promoted_keep_padding else None
        if padded is not None and generation.promoted_take_block:
            padded = max(padded, full.content_bytes)
        promoted[name] = full if padded is None else replace(full, page_bytes_padded=padded)
    return promoted


def merge_workers(workers: Sequence[Layers]) -> Layers:
    """Return the layers of a whole model; raises PlanError where two workers have different layers of one name."""
    merged: dict[str, LayerSpec] = {}
    for worker in workers:
        for name, spec in worker.items():
            if merged.setdefault(name, spec) != spec:
                raise PlanError(f"layer {name}: differs between the workers; vLLM does not support that")
    return merged

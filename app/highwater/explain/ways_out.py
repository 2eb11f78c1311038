"""Ways out where a command line does not fit, or only just: each is asked before it is named; tables and wishes too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from highwater.explain.command_line import Line
from highwater.explain.roads import Answer, CannotBeAskedError, Road, config_of, why_refused
from highwater.explain.wish import AnsweredPool, Flags, Granted, Images, ImageTokens, Wish, changes, grant
from kvplan import PlanError

TIGHT: Final = 2.0
"""Fewer requests of the whole length at once than this: one that is long makes the others wait."""
RANKS: Final = (1, 2, 4, 8)
# The flags that all of a start's figures depend on, and those that all but its weights do.
OF_ALL: Final = ("tensor_parallel_size", "pipeline_parallel_size", "quantization", "dtype", "speculative_config")
OF_PEAK: Final = ("max_num_batched_tokens", "max_num_seqs", "limit_mm_per_prompt", "enforce_eager")
_SEEN: Final = 1 << 50  # bytes enough for any layers to be seen


@dataclass(frozen=True, slots=True)
class Asking:
    """One command line on one card, asked again and again with other flags."""

    road: Road
    line: Line
    question: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, flags: Flags, **more: Any) -> Answer:  # noqa: ANN401 - JSON
        """Return the answer with other flags, for which what was measured may not hold. Raises PlanError: none."""
        question = {**self.question, **more}
        if "measured" in question:
            line = self.line.settled()
            for name, value in flags.items():
                is_limit = isinstance(value, Mapping)  # of a wish's images, which was searched with what was measured
                if not is_limit and str(value) != (line.value(name) or default_of(name)):
                    question["measured"] = carried(question["measured"], name)
        return self.road.ask(self.line.changed(flags), **question)


def default_of(name: str) -> str | None:
    return "1" if name.endswith("parallel_size") else None


def carried(measured: Mapping[str, int], name: str) -> dict[str, int]:
    """Return what of a start's parts holds where a flag has another value, by its name."""
    lost = measured.keys() if name in OF_ALL else measured.keys() - {"weights"} if name in OF_PEAK else ()
    return {part: size for part, size in measured.items() if part not in lost}


def status_of(asking: Asking, flags: Flags) -> tuple[str, Answer]:
    """Return an answer's status and the answer; ``refused`` where a flag is refused in another way."""
    try:
        answer = asking.ask(flags)
    except CannotBeAskedError:
        return "cannot_be_asked", {}
    except PlanError:
        return "refused", {}
    return answer["status"], answer


def is_tight(answer: Answer) -> bool:
    """Return whether ways out may help: it is refused, may not fit, or holds fewer than two whole requests."""
    kv = answer.get("kv_cache") or {}
    if answer["status"] in ("refused", "does_not_fit", "may_not_fit"):
        return True
    return answer["status"] == "fits" and (kv.get("max_concurrency") or TIGHT) < TIGHT


def steps_of(answer: Answer) -> list[tuple[Flags, str]]:
    """Return other flags that make room beside those of an answer, the smallest change first, with the reasons."""
    cache, ranks = config_of(answer, "cache"), config_of(answer, "parallel").get("tensor_parallel_size")
    share = cache.get("gpu_memory_utilization") if answer.get("budget") else None
    return changes(share, cache.get("cache_dtype"), int(ranks or 1))


def ways_out(asking: Asking, answer: Answer) -> Iterator[dict[str, Any]]:
    """Yield other flags under which it fits, the smallest change first, with what the KV cache then holds."""
    for length in _lengths(asking, answer):
        status, again = status_of(asking, {"max_model_len": length})
        if status == "fits":
            yield _way({"max_model_len": length}, again)
            break
    others, total = asking.question.get("in_use_bytes"), asking.question.get("device_bytes")
    steps = [flags for flags, _ in steps_of(answer)]
    if others and total:  # vLLM starts with no larger share than the others leave
        steps.insert(0, {"gpu_memory_utilization": math.floor(100 * max(total - others, 0) / total) / 100})
    for flags in steps:
        status, again = status_of(asking, flags)
        if status == "fits":
            yield _way(flags, again)


def _lengths(asking: Asking, answer: Answer) -> Iterator[int]:
    """Yield the longest lengths that may fit: of the likely bytes, then of the fewest."""
    if answer["status"] == "fits":
        return
    kv, flags = answer.get("kv_cache") or {}, dict[str, Any]()
    if not kv and asking.line.settled().value("max_model_len") is not None:  # refused before any layer was seen
        flags = {"max_model_len": "auto"}
        kv = status_of(asking, flags)[1].get("kv_cache") or {}
    # Of `auto`, the length is the one that vLLM chose.
    name = "max_model_len" if flags else "max_model_len_that_fits"
    if longest := kv.get(name):
        yield int(longest)
    if kv.get("available_bytes_low"):
        bound = asking.ask(flags, kv_cache_bytes=kv["available_bytes_low"])["kv_cache"]
        if longest := bound.get(name):
            yield int(longest)


def _way(flags: Flags, answer: Answer) -> dict[str, Any]:
    kv = answer["kv_cache"]
    return {"flags": dict(flags), "max_concurrency": kv["max_concurrency"], "max_model_len": kv["max_model_len"]}


def table(asking: Asking, length: int) -> dict[str, Any]:
    """Return the requests at once by length and TP: None where vLLM refuses, `?` where that is open."""
    lengths = [length * times // 4 for times in (1, 2, 4, 8, 16) if length * times // 4]

    def cell(flags: Flags) -> float | str | None:
        status, answer = status_of(asking, flags)
        is_open = status in ("may_not_fit", "not_known", "cannot_be_asked")
        return answer["kv_cache"]["max_concurrency"] if status == "fits" else "?" if is_open else None

    rows = [
        {"max_model_len": each,
         "max_concurrency": [cell({"max_model_len": each, "tensor_parallel_size": tp}) for tp in RANKS]}
        for each in lengths
    ]  # fmt: skip
    return {"tensor_parallel_size": list(RANKS), "rows": rows}


def grant_asked(asking: Asking, wish: Wish, answer: Answer) -> Granted:
    """Find the smallest command line in which a wish fits, by asking for each. Raises PlanError: it cannot be planned.

    ``answer`` is that of the command line as it is. Where no bytes are known, those that the wish needs are added.
    """
    is_open = answer["status"] == "not_known"
    if wish.images is not None and answer.get("encoder", {}) is None:
        model = answer.get("architecture") or "the model"
        raise PlanError(f"wish: {wish.images.count} images: {model} takes none; wish for conversations alone")

    known: dict[str, AnsweredPool] = {}

    def pool(flags: Flags) -> AnsweredPool:
        """Return the KV cache of the fewest bytes; a search comes back to the same flags."""
        if (key := json.dumps(flags, sort_keys=True)) not in known:
            found: Answer = {"status": "fits", "kv_cache": {}} if is_open else _answered(asking.ask(flags))
            kv = layers = found["kv_cache"]
            if not kv.get("max_concurrency"):  # it is refused: its layers are those of a cache that is large enough
                layers = _answered(asking.ask(flags, kv_cache_bytes=_SEEN))["kv_cache"]
            size, each = layers["bytes_per_block"], round(layers["blocks"] / layers["max_concurrency"])
            left = kv.get("available_bytes_low", kv.get("available_bytes"))
            blocks = wish.conversations * each + 1 if left is None else left // size
            known[key] = AnsweredPool(
                blocks=blocks, bytes_per_block=size, blocks_per_request=each, fits=found["status"] == "fits"
            )
        return known[key]

    granted = grant(wish, pool, steps_of(answer), image=image_tokens(asking, wish.images))
    if not is_open:
        is_estimated = answer.get("kv_cache", {}).get("grades", {}).get("available_bytes") == "estimated"
        bound = " There are at least " if is_estimated else " There are "
        return replace(granted, proof=granted.proof.replace(" There are ", bound))
    if granted.chosen is None:
        return granted
    needed = granted.chosen.needed_bytes
    return replace(
        granted,
        proof=granted.proof.partition(" There are ")[0],
        chosen=replace(granted.chosen, flags={**granted.chosen.flags, "kv_cache_memory_bytes": needed}),
        reasons={**granted.reasons, "kv_cache_memory_bytes": "as much as the conversations take; on each rank"},
    )


def _answered(answer: Answer) -> Answer:
    if "kv_cache" not in answer:
        raise PlanError(f"wish: vLLM does not plan it: {why_refused(answer)}")
    return answer


def image_tokens(asking: Asking, images: Images | None) -> ImageTokens | None:
    """Return the tokens of an image of a wish, as vLLM's own processor makes them. Raises PlanError: not known."""
    if images is None or images.tokens is not None:
        tokens = None if images is None else images.tokens
        return None if tokens is None else ImageTokens(embeddings=tokens, prompt_tokens=tokens)
    if images.width is None:
        raise PlanError(f"wish: {images.count} images: of what size? As in '{images.count} images of 1080p'")
    answer = asking.ask({}, images=[[images.width, images.height]], kv_cache_bytes=_SEEN)
    found: Mapping[str, Any] = next(iter(answer.get("images") or ()), {})
    if "prompt_tokens" not in found:
        why = found.get("error") or "only a vLLM that is asked counts them"
        raise PlanError(
            f"wish: the tokens of {images.count} images of {images.width}x{images.height} are not known: {why}; give"
            f" them, as in '{images.count} images of 2040 tokens'"
        )
    return ImageTokens(embeddings=found["embeddings"], prompt_tokens=found["prompt_tokens"])

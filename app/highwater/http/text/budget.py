"""An explained engine as text: a bar with the budget line, tables that add up, and the paragraph to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from highwater.diagnose.rules.book import Explained
from highwater.explain.budget import BudgetPart, RankBudget
from highwater.explain.explanation import EncoderView, PoolView, tightest
from highwater.http.text.budget_bar import BudgetBar
from highwater.model.units import UNKNOWN, gib_text, size_text, table

# Of a comparison's table; what is longer is a sentence, and stands below it.
MAX_CELL: Final = 40
_REQUESTED: Final = {"cpu": ("engine", "requested_cpu_memory"), "remainder": ("exact", "total x utilization")}


def budget_text(answer: Explained) -> str:
    explanation, ranks = answer.explanation, answer.explanation.ranks
    version = f"vLLM {explanation.vllm_version or '(version unknown)'}"
    ascend = f", vllm-ascend {explanation.ascend_version}" if explanation.ascend_version else ""
    what = explanation.model or explanation.architecture or ""
    state = "" if answer.engine_state is None else f": {answer.engine_state}"
    parts = [f"{version}{ascend} {what}".rstrip() + state, *explanation.problems]
    rank = tightest(ranks)
    if rank is not None:
        bar = BudgetBar(
            title=f"{rank.name}, {gib_text(rank.total_bytes)}",
            parts=[(part.key, part.title, part.bytes) for part in rank.parts],
            requested_bytes=rank.requested_bytes,
            outside_bytes=rank.outside_bytes,
        )
        rows = [["total", *(gib_text(one.total_bytes) for one in ranks), "engine", "init_snapshot.total_memory"]]
        if any(one.requested_bytes is not None for one in ranks):
            share = "" if ranks[0].utilization is None else f" = total x {ranks[0].utilization:g}"
            rows.append(["outside the budget", *(gib_text(one.outside_bytes) for one in ranks), "exact", "the rest"])
            grade, source = _REQUESTED.get(ranks[0].counting or "", ("engine", "requested_memory"))
            rows.append([f"requested{share}", *(gib_text(one.requested_bytes) for one in ranks), grade, source])
        for key in dict.fromkeys(part.key for one in ranks for part in one.parts):
            known, cells = _sizes(ranks, key)
            rows.append([f"- {known.title}", *cells, known.grade, known.source])
        formula = "" if ranks[0].formula is None else f"\n{ranks[0].formula}"
        parts += [bar.text(), table(["budget", *_names(ranks), "grade", "vLLM's name"], rows, words=2) + formula]
        rows = []
        for key in dict.fromkeys(part.key for one in ranks for part in one.uncounted):
            known, cells = _sizes(ranks, key)
            rows.append([known.title, *cells, known.why])
        if rows:
            rows.append(["left outside the budget", *(gib_text(one.left_bytes) for one in ranks), ""])
            parts.append(table(["counted nowhere", *_names(ranks), "what it is"], rows, words=1))
        rows = []
        for one in ranks:
            for row in one.observed:
                sizes = map(gib_text, (row.profiled_bytes, row.observed_bytes, row.risk_bytes))
                rows.append([f"{one.label} {row.title}", *sizes, ", ".join(row.settings)])
        headers = ["rank, seen since the start", "profiled", "observed", "risk", "covered by"]
        parts += [table(headers, rows, words=1) if rows else "", *(_pool(pool) for pool in explanation.pools)]
        parts.append(_encoder(explanation.encoder))
        variables = list(dict.fromkeys(name for one in ranks for name in one.environment))
        rows = [[name, *(one.environment.get(name) or UNKNOWN for one in ranks)] for name in variables]
        parts.append(table(["environment of the worker", *_names(ranks)], rows) if rows else "")
        lines = []
        for finding in answer.findings:
            lines.append(f"{finding.weight}: {finding.title}. {finding.text}")
            lines += [f"    {advice.text}{advice.costs}" for advice in finding.advice]
        parts += ["\n".join(lines), explanation.paragraph]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sizes(ranks: Sequence[RankBudget], key: str) -> tuple[BudgetPart, list[str]]:
    parts = [rank.part(key) for rank in ranks]
    known = next(part for part in parts if part is not None)
    return known, [UNKNOWN if part is None else gib_text(part.bytes) for part in parts]


def _pool(pool: PoolView) -> str:
    name = "KV cache" if not pool.dp_rank else f"KV cache of engine {pool.dp_rank}"
    rows = [
        ["bytes available", size_text(pool.available_bytes), f"of rank {_number(pool.binding_rank)}, the fewest"],
        ["blocks", _number(pool.blocks), f"{size_text(pool.bytes_per_block)} each"],
        ["tokens", _number(pool.tokens), "as vLLM prints it"],
        ["maximum concurrency", UNKNOWN if pool.max_concurrency is None else f"{pool.max_concurrency:,.2f}",
         f"as vLLM prints it, the null block counted; {size_text(pool.needed_bytes)} each"],
    ]  # fmt: skip
    rows += [
        [f"requests of {one.tokens:,} tokens", _number(one.requests),
         f"{one.blocks:,} blocks, {size_text(one.bytes)} each, while running and at most while cached"]
        for one in pool.conversations
    ]  # fmt: skip
    rows += [
        [f"group of {_number(group.layers)} layers", group.kind,
         f"{_number(group.block_size)} tokens a block, {size_text(group.page_bytes)} a layer"
         + (f", window {group.window:,}" if group.window else "")]
        for group in pool.groups
    ]  # fmt: skip
    if pool.fully_counted_bytes is not None:
        tokens = "" if pool.fully_counted_tokens is None else f"{pool.fully_counted_tokens:,} tokens"
        rows.append(["if all were counted", gib_text(pool.fully_counted_bytes), tokens])
    lines = [table([name, "", ""], rows, words=1)]
    lines += [f"tokens are {pool.tokens_meaning}"] if pool.tokens_meaning else []
    lines += [f"difference: {one}" for one in pool.differences]
    lines += [f"not planned: {pool.problem}"] if pool.problem else []
    lines += [f"note: {pool.note}"] if pool.note else []
    return "\n".join(lines)


def _encoder(encoder: EncoderView | None) -> str:
    if encoder is None:
        return ""
    bound = " or more" if encoder.bytes_grade == "estimated" else ""
    profiled = {
        True: ["yes", f"{_number(encoder.profiled_items)} at once"],
        False: ["no", "the start sized the KV cache without it"],
        None: [UNKNOWN, ""],
    }[encoder.is_profiled]
    rows = [
        ["embeddings in one step", _number(encoder.compute_budget), ""],
        ["embeddings cached", _number(encoder.cache_size), f"{gib_text(encoder.cache_bytes)}{bound} on each rank"],
        ["held now", gib_text(encoder.held_bytes), ""],
        [f"largest {encoder.modality or 'item'}", _number(encoder.item_tokens),
         f"embeddings{encoder.item_side}; {_number(encoder.items_in_cache)} fill the cache"],
        ["profiled", *profiled],
    ]  # fmt: skip
    return table(["encoder", "", ""], rows, words=1)


def comparison_text(before: Explained, after: Explained) -> str:
    rows = comparison(before, after)
    if not before.explanation.ranks and not after.explanation.ranks:
        return "nothing is known of either start, and so of what moved\n"
    if not rows:
        return "nothing moved: both have the same figures and settings\n"
    cells = [row for row in rows if all(len(cell) <= MAX_CELL for cell in row[1:])]
    parts = [table(["what moved", "before", "after", "by"], cells)] if cells else []
    sentences = (row for row in rows if row not in cells)
    parts += [f"{what}\n    before: {one}\n    after:  {two}" for what, one, two, _ in sentences]
    return "\n\n".join(parts) + "\n"


def comparison(old_answer: Explained, new_answer: Explained) -> list[tuple[str, str, str, str]]:
    """Return what differs between two starts: its name, the figure before, the one after, and by how much."""
    before, after = old_answer.explanation, new_answer.explanation
    rows = [
        *_differing("vLLM", before.vllm_version, after.vllm_version),
        *_differing("vllm-ascend", before.ascend_version, after.ascend_version),
    ]
    for name in ("model", "architecture"):
        one, two = getattr(before, name), getattr(after, name)
        # The served model is not known while the engine is unreachable.
        rows += [] if one is None or two is None else _differing(name, one, two)
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "async_scheduling"):
        rows += _differing(name, getattr(before.limits, name, None), getattr(after.limits, name, None))
    for name in dict.fromkeys((*before.parallel, *after.parallel)):
        rows += _differing(name, before.parallel.get(name), after.parallel.get(name))
    old_ranks = {(rank.dp_rank, rank.rank): rank for rank in before.ranks}
    for rank in after.ranks:
        old = old_ranks.pop((rank.dp_rank, rank.rank), None)
        rows += [(rank.name, UNKNOWN, "there", "")] if old is None else _rank_differences(old, rank)
    rows += [(rank.name, "there", UNKNOWN, "") for rank in old_ranks.values()]
    for old_pool, pool in zip(before.pools, after.pools, strict=False):
        for what, name in (("blocks", "blocks"), ("tokens", "tokens"), ("maximum concurrency", "max_concurrency")):
            one, two = getattr(old_pool, name), getattr(pool, name)
            rows += _differing(what, one, two, _number, lambda change: f"{change:+,.2f}".removesuffix(".00"))
        if old_pool.tokens != pool.tokens:
            rows += _differing("what tokens means", old_pool.tokens_meaning or None, pool.tokens_meaning or None)
    return rows


def _rank_differences(before: RankBudget, after: RankBudget) -> Iterator[tuple[str, str, str, str]]:
    old = {part.key: part for part in (*before.parts, *before.uncounted)}
    new = {part.key: part for part in (*after.parts, *after.uncounted)}
    sizes: list[tuple[str, int | None, int | None]] = [
        ("total", before.total_bytes, after.total_bytes),
        ("free at the start", before.init_free_bytes, after.init_free_bytes),
        ("requested", before.requested_bytes, after.requested_bytes),
    ]
    for key in dict.fromkeys((*old, *new)):
        was, now = (parts[key].bytes if key in parts else None for parts in (old, new))
        sizes.append(((new.get(key) or old[key]).title, was, now))
    for what, was, now in sizes:
        yield from _differing(f"{after.name}: {what}", was, now, gib_text, partial(size_text, signed=True))
    yield from _differing(f"{after.name}: formula", before.formula or None, after.formula or None)
    for name in dict.fromkeys((*before.environment, *after.environment)):
        one, two = before.environment.get(name) or None, after.environment.get(name) or None
        yield from _differing(f"{after.name}: {name}", one, two)


def _differing(
    what: str,
    old: Any,  # noqa: ANN401 - any figure or word
    new: Any,  # noqa: ANN401 - likewise
    shown: Callable[[Any], str] = str,
    moved: Callable[[Any], str] | None = None,
) -> list[tuple[str, str, str, str]]:
    if old == new:
        return []
    before, after = (UNKNOWN if one is None else shown(one) for one in (old, new))
    return [(what, before, after, "" if moved is None or old is None or new is None else moved(new - old))]


def _names(ranks: Sequence[RankBudget]) -> list[str]:
    return [rank.name for rank in ranks]


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"

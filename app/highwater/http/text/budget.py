"""An explained engine as text: a bar with the budget line, tables that add up, and the paragraph to paste."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from highwater.diagnose.rules.book import Explained
from highwater.explain.budget import BudgetPart, RankBudget
from highwater.explain.explanation import EncoderView, PoolView, tightest
from highwater.http.text.budget_bar import BudgetBar
from highwater.model.units import UNKNOWN, gib_text, size_text, table

# Of a comparison's table; what is longer is a sentence, and stands below it.
MAX_CELL: Final = 40
_REQUESTED: Final = {"cpu": ("engine", "requested_cpu_memory"), "remainder": ("exact", "total x utilization")}


def budget_text(answer: Explained) -> str:
    explanation = answer.explanation
    version = f"vLLM {explanation.vllm_version or '(version unknown)'}"
    ascend = f", vllm-ascend {explanation.ascend_version}" if explanation.ascend_version else ""
    what = explanation.model or explanation.architecture or ""
    state = "" if answer.engine_state is None else f": {answer.engine_state}"
    parts = [f"{version}{ascend} {what}".rstrip() + state, *explanation.problems]
    rank = tightest(explanation.ranks)
    if rank is not None:
        bar = BudgetBar(
            title=f"{rank.name}, {gib_text(rank.total_bytes)}",
            parts=[(part.key, part.title, part.bytes) for part in rank.parts],
            requested_bytes=rank.requested_bytes,
            outside_bytes=rank.outside_bytes,
        )
        parts += [bar.text(), _parts_table(explanation.ranks), _uncounted_table(explanation.ranks)]
        parts += [_observed_table(explanation.ranks), *(_pool(pool) for pool in explanation.pools)]
        parts += [_encoder(explanation.encoder), _environment(explanation.ranks), _findings(answer)]
        parts.append(explanation.paragraph)
    return "\n\n".join(part for part in parts if part) + "\n"


def _parts_table(ranks: Sequence[RankBudget]) -> str:
    first = ranks[0]
    keys = list(dict.fromkeys(part.key for rank in ranks for part in rank.parts))
    rows = [["total", *(gib_text(rank.total_bytes) for rank in ranks), "engine", "init_snapshot.total_memory"]]
    if any(rank.requested_bytes is not None for rank in ranks):
        share = "" if first.utilization is None else f" = total x {first.utilization:g}"
        rows.append(["outside the budget", *(gib_text(rank.outside_bytes) for rank in ranks), "exact", "the rest"])
        grade, source = _REQUESTED.get(first.counting or "", ("engine", "requested_memory"))
        rows.append([f"requested{share}", *(gib_text(rank.requested_bytes) for rank in ranks), grade, source])
    for key in keys:
        known, cells = _sizes(ranks, key)
        rows.append([f"- {known.title}", *cells, known.grade, known.source])
    formula = "" if first.formula is None else f"\n{first.formula}"
    return table(["budget", *_names(ranks), "grade", "vLLM's name"], rows, words=2) + formula


def _uncounted_table(ranks: Sequence[RankBudget]) -> str:
    keys = list(dict.fromkeys(part.key for rank in ranks for part in rank.uncounted))
    if not keys:
        return ""
    rows = []
    for key in keys:
        known, cells = _sizes(ranks, key)
        rows.append([known.title, *cells, known.why])
    rows.append(["left outside the budget", *(gib_text(rank.left_bytes) for rank in ranks), ""])
    return table(["counted nowhere", *_names(ranks), "what it is"], rows, words=1)


def _sizes(ranks: Sequence[RankBudget], key: str) -> tuple[BudgetPart, list[str]]:
    parts = [rank.part(key) for rank in ranks]
    known = next(part for part in parts if part is not None)
    return known, [UNKNOWN if part is None else gib_text(part.bytes) for part in parts]


def _observed_table(ranks: Sequence[RankBudget]) -> str:
    rows = []
    for rank in ranks:
        for row in rank.observed:
            sizes = (row.profiled_bytes, row.observed_bytes, row.risk_bytes)
            rows.append([f"{rank.label} {row.title}", *map(gib_text, sizes), ", ".join(row.settings)])
    headers = ["rank, seen since the start", "profiled", "observed", "risk", "covered by"]
    return table(headers, rows, words=1) if rows else ""


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


def _environment(ranks: Sequence[RankBudget]) -> str:
    names = list(dict.fromkeys(name for rank in ranks for name in rank.environment))
    rows = [[name, *(rank.environment.get(name) or UNKNOWN for rank in ranks)] for name in names]
    return table(["environment of the worker", *_names(ranks)], rows) if rows else ""


def _findings(answer: Explained) -> str:
    lines = []
    for finding in answer.findings:
        lines.append(f"{finding.weight}: {finding.title}. {finding.text}")
        lines += [f"    {advice.setting}: {advice.change} Cost: {advice.cost}" for advice in finding.advice]
    return "\n".join(lines)


def comparison_text(before: Explained, after: Explained) -> str:
    rows = comparison(before, after)
    if not before.explanation.ranks and not after.explanation.ranks:
        return "nothing is known of either start, and so of what moved\n"
    if not rows:
        return "nothing moved: both have the same figures and settings\n"
    cells = [row for row in rows if _is_short(row)]
    sentences = [row for row in rows if not _is_short(row)]
    parts = [table(["what moved", "before", "after", "by"], cells)] if cells else []
    parts += [f"{what}\n    before: {one}\n    after:  {two}" for what, one, two, _ in sentences]
    return "\n\n".join(parts) + "\n"


def _is_short(row: tuple[str, str, str, str]) -> bool:
    return all(len(cell) <= MAX_CELL for cell in row[1:])


def _moved(one: float | None, two: float | None) -> str:
    return "" if one is None or two is None else f"{two - one:+,.2f}".removesuffix(".00")


def comparison(old_answer: Explained, new_answer: Explained) -> list[tuple[str, str, str, str]]:
    """Return what differs between two starts: its name, the figure before, the one after, and by how much."""
    before, after = old_answer.explanation, new_answer.explanation
    # The served model is not known while the engine is unreachable.
    names = [("model", before.model, after.model), ("architecture", before.architecture, after.architecture)]
    plain = [
        ("vLLM", before.vllm_version, after.vllm_version),
        ("vllm-ascend", before.ascend_version, after.ascend_version),
        *((what, old, new) for what, old, new in names if old is not None and new is not None),
        *((name, getattr(before.limits, name, None), getattr(after.limits, name, None))
          for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "async_scheduling")),
        *((name, before.parallel.get(name), after.parallel.get(name))
          for name in dict.fromkeys((*before.parallel, *after.parallel))),
    ]  # fmt: skip
    rows = [(what, _word(old), _word(new), "") for what, old, new in plain if old != new]
    old_ranks = {(rank.dp_rank, rank.rank): rank for rank in before.ranks}
    for rank in after.ranks:
        old = old_ranks.pop((rank.dp_rank, rank.rank), None)
        if old is None:
            rows.append((rank.name, UNKNOWN, "there", ""))
        else:
            rows += _rank_differences(old, rank)
    rows += [(rank.name, "there", UNKNOWN, "") for rank in old_ranks.values()]
    for old_pool, pool in zip(before.pools, after.pools, strict=False):
        counts = [
            ("blocks", old_pool.blocks, pool.blocks),
            ("tokens", old_pool.tokens, pool.tokens),
            ("maximum concurrency", old_pool.max_concurrency, pool.max_concurrency),
        ]
        rows += [
            (what, _number(one), _number(two), _moved(one, two))
            for what, one, two in counts if one != two
        ]  # fmt: skip
        if old_pool.tokens_meaning != pool.tokens_meaning and old_pool.tokens != pool.tokens:
            rows.append(("what tokens means", old_pool.tokens_meaning or UNKNOWN, pool.tokens_meaning or UNKNOWN, ""))
    return rows


def _rank_differences(before: RankBudget, after: RankBudget) -> list[tuple[str, str, str, str]]:
    name = f"{after.name}: "
    sizes: list[tuple[str, int | None, int | None]] = [
        ("total", before.total_bytes, after.total_bytes),
        ("free at the start", before.init_free_bytes, after.init_free_bytes),
        ("requested", before.requested_bytes, after.requested_bytes),
    ]
    old = {part.key: part for part in (*before.parts, *before.uncounted)}
    new = {part.key: part for part in (*after.parts, *after.uncounted)}
    for key in dict.fromkeys((*old, *new)):
        title = (new.get(key) or old[key]).title
        sizes.append((title, old[key].bytes if key in old else None, new[key].bytes if key in new else None))
    rows = []
    for what, was, now in sizes:
        if was != now:
            moved = "" if was is None or now is None else size_text(now - was, signed=True)
            rows.append((name + what, gib_text(was), gib_text(now), moved))
    if before.formula != after.formula:
        rows.append((name + "formula", before.formula or UNKNOWN, after.formula or UNKNOWN, ""))
    for variable in dict.fromkeys((*before.environment, *after.environment)):
        one, two = before.environment.get(variable), after.environment.get(variable)
        if one != two:
            rows.append((name + variable, one or UNKNOWN, two or UNKNOWN, ""))
    return rows


def _names(ranks: Sequence[RankBudget]) -> list[str]:
    return [rank.name for rank in ranks]


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _word(value: object) -> str:
    return UNKNOWN if value is None else str(value)

"""A running engine beside a command line that vLLM was asked about: part by part, with the flags that move each.

vLLM's answer is a mapping as `python -m highwater_worker.plan` writes it (docs/plan-by-vllm.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from highwater.explain.budget import RankBudget
from highwater.explain.explanation import Explanation, tightest
from highwater.explain.roads import Answer, config_of
from highwater.model.rank import Device
from highwater.model.units import UNKNOWN, gib_text, size_text, table
from highwater_worker.plan.cards import CARDS

Ask: TypeAlias = Callable[[int | None, Mapping[str, int]], Answer]
"""Asks vLLM about the command line, for a card of so many bytes and parts that were measured, in bytes by name."""
_COMMAND = re.compile(r"(\w+=\S*\s+)*(vllm|python[\d.]*)\s|.*\sserve\s", re.DOTALL)
# Where vLLM's answer has the value of a flag.
_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "--max-model-len": ("model", "max_model_len"),
    "--max-num-batched-tokens": ("scheduler", "max_num_batched_tokens"),
    "--max-num-seqs": ("scheduler", "max_num_seqs"),
    "-tp": ("parallel", "tensor_parallel_size"),
    "-pp": ("parallel", "pipeline_parallel_size"),
    "-dp": ("parallel", "data_parallel_size"),
    "--gpu-memory-utilization": ("cache", "gpu_memory_utilization"),
}
_OF_RANKS: Final = frozenset(("-tp", "-pp", "-dp"))
# A title, the parts of both sides that it sums, and the flags that move it.
_PARTS: Final = (
    ("weights", ("weights",), "-tp -pp --quantization --cpu-offload-gb"),
    ("peak activation", ("activation",), "--max-num-batched-tokens --max-num-seqs --limit-mm-per-prompt"),
    ("outside torch, buffers", ("non_torch", "persistent", "consumed", "buffers"),
     "-tp NCCL_BUFFSIZE HCCL_BUFFSIZE"),
    ("graphs", ("graphs",), "--max-num-seqs --enforce-eager --compilation-config"),
)  # fmt: skip
# The same of the KV cache, by the names of a pool's figures, and whether these are bytes.
_OF_POOL: Final = (
    ("KV cache", "available_bytes", "--gpu-memory-utilization --kv-cache-memory-bytes"),
    ("tokens", "tokens", "--gpu-memory-utilization --kv-cache-dtype -tp"),
    ("requests at once", "max_concurrency", "--max-model-len --kv-cache-dtype"),
    ("longest that fits", "max_model_len_that_fits", "--max-model-len --kv-cache-dtype"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One figure of both sides, in bytes or a number; None: not known."""

    what: str
    here: float | None
    there: float | None
    low: int | None
    high: int | None
    grade: str | None  # of ``there``
    moved_by: tuple[str, ...]  # flags that differ, with both values; else those that it depends on


def is_command(text: str) -> bool:
    return _COMMAND.match(text.strip()) is not None


def card_name(explanation: Explanation) -> str | None:
    """Return the short name of the engine's card in the table of cards that can be pretended; None: it has none."""
    device = explanation.ranks[0].device if explanation.ranks else Device()
    short = next((name for name, card in CARDS.items() if card.name == device.name), None)
    return device.traits.pretended_card or short


def ask_beside(explanation: Explanation, ask: Ask) -> Answer:
    """Return vLLM's answer for this engine's card, with what its start measured where the command line keeps it so.

    Memory outside torch is that of as many ranks, graphs are those of the same model and as many requests.
    """
    rank = tightest(explanation.ranks)
    if rank is None:
        return ask(None, {})
    parts = {key: part.bytes for key in ("non_torch", "graphs") if (part := rank.part(key)) is not None}
    measured = {key: size for key, size in parts.items() if size > 0}
    answer = ask(rank.total_bytes, measured)
    model, moved = config_of(answer, "model"), _differing(explanation, rank, answer).keys()
    lost = set(measured) if moved & _OF_RANKS else set()
    is_another = model.get("_architecture", explanation.architecture) != explanation.architecture
    if "--max-num-seqs" in moved or model.get("enforce_eager") or is_another:
        lost.add("graphs")
    held = {key: size for key, size in measured.items() if key not in lost}
    return answer if held == measured else ask(rank.total_bytes, held)


def why_not(answer: Answer) -> str | None:
    """Return why an answer has no figures: a refusal in vLLM's words, or why it cannot be asked; None: it has."""
    status, refusal = str(answer.get("status")).replace("_", " "), answer.get("refusal") or {}
    words = (status, refusal.get("message"), answer.get("error"), answer.get("help"))
    return None if answer.get("kv_cache") else ": ".join(str(word) for word in words if word)


def beside(explanation: Explanation, answer: Answer) -> list[Beside]:
    """Return both sides, each of the rank with the fewest bytes for its KV cache."""
    rank = tightest(explanation.ranks)
    pool = next((one for one in explanation.pools if rank is not None and one.dp_rank == rank.dp_rank), None)
    moved, kv = {} if rank is None else _differing(explanation, rank, answer), answer.get("kv_cache") or {}
    ranks = (answer.get("budget") or {}).get("ranks") or [{}]
    fullest = max(ranks, key=lambda parts: sum(part["bytes"] for part in parts.values()))
    rows = []
    for title, keys, flags in _PARTS:
        here = [part.bytes for part in (() if rank is None else rank.parts) if part.key in keys]
        there = [fullest[key] for key in keys if key in fullest]
        grades = {part["grade"] for part in there}
        rows.append(Beside(
            what=title, here=_sum(here), there=_sum([one["bytes"] for one in there]),
            low=_sum([one["low"] for one in there]), high=_sum([one["high"] for one in there]),
            grade="estimated" if "estimated" in grades else min(grades, default=None), moved_by=_by(flags, moved),
        ))  # fmt: skip
    for title, key, flags in _OF_POOL:
        rows.append(Beside(
            what=title, here=getattr(rank if key == "available_bytes" else pool, key, None), there=kv.get(key),
            low=kv.get(f"{key}_low"), high=kv.get(f"{key}_high"), grade=(kv.get("grades") or {}).get(key),
            moved_by=_by(flags, moved),
        ))  # fmt: skip
    return rows


def beside_text(explanation: Explanation, answer: Answer) -> str:
    """Return both sides as a table, with what vLLM says of the command line."""
    counts = {title for title, key, _ in _OF_POOL if key != "available_bytes"}
    rows = []
    for row in beside(explanation, answer):
        is_count = row.what in counts
        written = "{:,}" if isinstance(row.there, int) else "{:,.2f}"
        sides = (row.here, row.there)
        here, there = (written.format(one) if is_count and one is not None else gib_text(one) for one in sides)
        by = None if row.here is None or row.there is None else row.there - row.here
        known = row.grade or "" if row.low == row.high else f"{gib_text(row.low)} to {gib_text(row.high)}"
        moved = "" if not by else written.replace(":", ":+").format(by) if is_count else size_text(by, signed=True)
        rows.append([row.what, here, there, moved, known, row.moved_by[0]])
    version, refusal = (answer.get("versions") or {}).get("vllm", UNKNOWN), answer["kv_cache"].get("refusal")
    asked = (
        f"this engine, vLLM {explanation.vllm_version or UNKNOWN}, beside that command line, as vLLM {version} answers"
    )
    lines = [f"{asked}: {str(answer.get('status')).replace('_', ' ')}", *([refusal] if refusal else [])]
    lines += ["", table(["", "here", "there", "by", "known", "moved by"], rows, words=2)]
    lines += [
        f"{name.replace('_', ' ')}: {one}" for name in ("guessed", "not_counted") for one in answer.get(name) or ()
    ]
    return "\n".join(lines) + "\n"


def _differing(explanation: Explanation, rank: RankBudget, answer: Answer) -> dict[str, str]:
    found = {}
    for flag, (section, name) in _FLAGS.items():
        here = explanation.parallel.get(name, getattr(explanation.limits, name, None))
        here, there = rank.utilization if section == "cache" else here, config_of(answer, section).get(name)
        if here is not None and there is not None and here != there:
            found[flag] = f"{flag} {here} -> {there}"
    return found


def _by(flags: str, differing: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(differing[flag] for flag in flags.split() if flag in differing) or tuple(flags.split())


def _sum(sizes: Sequence[int]) -> int | None:
    return sum(sizes) if sizes else None

"""A plan's answer on one screen: does it fit, what the KV cache holds, what is left over, and the ways out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from highwater.explain.command_line import Line
from highwater.explain.roads import config_of, why_refused
from highwater.http.text.budget_bar import LOOKS, OUTSIDE, BudgetBar
from highwater.model.units import UNKNOWN, gib_text, size_text
from highwater.model.units import table as text_table

WIDTH, LINES = 100, 24  # one screen
_PARTS: Final = {
    "weights": ("weights", "weights"),
    "activation": ("activation", "peak activation"),
    "non_torch": ("non_torch", "non-torch"),
    "buffers": ("persistent", "buffers"),
    "graphs": ("graphs", "graphs"),
    "kv_cache": ("kv_cache", "KV cache"),
}


def show(answer: Mapping[str, Any]) -> None:
    """Print an answer in the form of docs/plan-by-vllm.md, with what `highwater plan` adds to it."""
    is_wished = "wish" in answer and not (answer.get("kv_cache") or {}).get("on_card")
    said = _verdict_of_a_wish(answer["wish"], answer) if is_wished else verdict(answer)
    who = answer.get("road") or f"vLLM {(answer.get('versions') or {}).get('vllm', '')} itself"
    card, device = answer.get("card") or {}, answer.get("device")
    who += f"; {device['title']}" if device else f"; as on an {card['name']}" if card.get("name") else ""
    lines = [*_wrapped(said).splitlines(), *_wrapped(who).splitlines(), ""]
    if "wish" in answer:
        lines += _wish(answer, answer["wish"])
    elif "table" in answer:
        planned = answer["table"]
        rows = [
            [
                f"{row['max_model_len']:,}",
                *(
                    UNKNOWN if value is None else value if isinstance(value, str) else f"{value:,.1f}"
                    for value in row["max_concurrency"]
                ),
            ]
            for row in planned["rows"]
        ]
        heads = ["requests at once of", *(f"-tp {ranks}" for ranks in planned["tensor_parallel_size"])]
        lines += text_table(heads, rows).splitlines()
        lines.append("? the estimate's bounds leave it open, or it cannot be asked; - vLLM refuses it, or not one fits")
    else:
        lines += _rows(answer)
        lines += _bar(answer)
    told = {"note": "notes", "not counted": "not_counted", "guessed": "guessed"}
    notes = [f"{kind}: {text}" for kind, key in told.items() for text in answer.get(key) or ()]
    if names := answer.get("pretended"):
        absent = [name for name in names if "stand-in" in name]
        present = [*(name for name in names if name not in absent), *([f"{len(absent)} modules"] if absent else [])]
        notes.append(f"pretended (--json): {', '.join(present)}")
    notes = [_wrapped(textwrap.shorten(note, 2 * WIDTH - 10, placeholder=" ...")) for note in notes]
    kept = len(notes[0].splitlines()) + bool(notes[1:]) if notes else 0  # the first says what the card was taken for
    ways = _ways(answer, LINES - len(lines) - kept - bool(lines[-1]))
    lines += [""] if ways and lines[-1] else []
    lines += ways
    room = max(LINES - len(lines), 1)
    taken = [len(note.splitlines()) for note in notes]
    shown = next((n for n in range(len(notes), 0, -1) if sum(taken[:n]) + (n < len(notes)) <= room), 0)
    lines += notes[:shown]
    lines += [f"{len(notes) - shown} {'more ' if shown else ''}notes: --json"] if shown < len(notes) else []
    click.echo("\n".join(lines))


def _ways(answer: Mapping[str, Any], room: int) -> list[str]:
    """Return the ways out, the smallest changes first, as many as there is room for."""
    ways = answer.get("ways_out")
    if not ways:
        none = "No other length, share of the card, type of KV cache or number of ranks that was asked for fits."
        return [none] if ways is not None and answer["status"] != "fits" else []
    most = len(ways) if len(ways) < room else max(room - 2, 1)  # beside the head, and the count of the rest
    widest = max(len(_words(way["flags"])) for way in ways[:most])
    held = (f"{way['max_concurrency']:,.2f} requests of {way['max_model_len']:,} tokens" for way in ways)
    rows = [f"  {_words(way['flags']):<{widest}}  fits: {text}" for way, text in zip(ways[:most], held, strict=False)]
    return ["ways out, each asked:", *rows, *([f"  {len(ways) - most} more: --json"] if len(ways) > most else [])]


def verdict(answer: Mapping[str, Any]) -> str:
    kv, status = answer.get("kv_cache") or {}, answer["status"]
    length = kv.get("max_model_len") or config_of(answer, "model").get("max_model_len")
    request = f"one request of {length:,} tokens" if length else "one request of the whole length"
    needs = f"{request} needs {size_text(kv.get('needed_bytes'))}"
    low, high = kv.get("available_bytes_low"), kv.get("available_bytes_high")
    if (card := kv.get("on_card")) and status != "fits" and (kv.get("needed_bytes") or 0) <= (high or 0):
        return f"{'Does' if status == 'does_not_fit' else 'May'} not fit: {card}"
    if status == "fits":
        held = kv.get("max_concurrency")
        has = kv.get("available_bytes")
        of = f"{needs} of {size_text(has)}" if has else needs if kv.get("needed_bytes") else "vLLM starts"
        at_once = "" if held is None else f"; {held:,.2f} at once"
        return f"Fits: {of}{at_once}. {card or ''}".rstrip()
    if status == "does_not_fit":
        longest = kv.get("max_model_len_that_fits")
        most, likely = ("at most ", "likely ") if high != low else ("", "")  # the longest is that of the likely bytes
        at_most = f"the longest that fits is {likely}{longest:,}" if longest else f"{likely}no length fits"
        missing = size_text(max((kv.get("needed_bytes") or 0) - (high or 0), 0))
        left = f"{needs} of KV cache, and {most}{size_text(high)} are left for it"
        return f"Does not fit: {missing} missing; {left}; {at_most}."
    if status == "may_not_fit":
        return f"May not fit: {needs} of KV cache, and {size_text(low)} to {size_text(high)} are left for it."
    if status == "not_known":
        unknown = (
            "What a start leaves of the card is not known (below); --measured or --kv-cache-memory-bytes gives it."
        )
        nothing = "It was compared with nothing: --device names a card, or its size."
        return f"{needs[:1].upper()}{needs[1:]} of KV cache. {unknown if answer.get('device') else nothing}"
    return f"vLLM refuses it: {why_refused(answer)}"


def _rows(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the KV cache holds; nothing of a start that is refused."""
    kv = answer.get("kv_cache") or {}
    grades: Mapping[str, str] = kv.get("grades") or {}
    rank: Mapping[str, Any] = next(iter(answer.get("ranks") or ()), {})
    if kv.get("available_bytes") is not None:
        low, high = kv.get("available_bytes_low"), kv.get("available_bytes_high")
        bounds = f" ({size_text(low)} to {size_text(high)})" if low != high and low is not None else ""
        yield _row("KV cache of a rank", f"{size_text(kv['available_bytes'])}{bounds}, {grades['available_bytes']}")
    elif rank.get("weights"):
        yield _row("weights of a rank", size_text(_figure(rank["weights"])["bytes"]))
    if kv.get("blocks") is not None and kv.get("tokens") is not None:
        low, high = kv.get("blocks_low"), kv.get("blocks_high")
        bounds = f" ({low:,} to {high:,})" if low != high and low else ""  # a refused start makes none
        yield _row("  tokens", f"{kv['tokens']:,} as vLLM prints them")
        yield _row(
            "  blocks", f"{kv['blocks']:,}{bounds} of {kv['block_size']} tokens, {kv['bytes_per_block']:,} bytes"
        )
        yield _row("  requests at once", f"{kv['max_concurrency']:,.2f}; one needs {size_text(kv['needed_bytes'])}")
    elif kv.get("bytes_per_block") is not None:
        yield _row("one block", f"{kv['block_size']} tokens, {kv['bytes_per_block']:,} bytes")
    if (budget := answer.get("budget")) is not None:
        share = config_of(answer, "cache")["gpu_memory_utilization"]
        outside = size_text(budget["total_bytes"] - budget["requested_bytes"])
        yield _row("bound by", f"--gpu-memory-utilization {share:g}; {outside} outside, for others and late graphs")
    elif kv.get("available_bytes") is not None and "changed" not in answer:  # those of a running engine are measured
        yield _row("bound by", "the bytes that were given for the KV cache")


def _bar(answer: Mapping[str, Any]) -> list[str]:
    """Draw the rank that binds, as `highwater explain` draws a running one."""
    budget = answer.get("budget")
    if budget is None:
        return []
    total, requested = budget["total_bytes"], budget["requested_bytes"]
    sizes = [{name: _figure(part)["bytes"] for name, part in rank.items()} for rank in budget["ranks"]]
    order = list(_PARTS)
    sizes = [
        dict(sorted(each.items(), key=lambda part: order.index(part[0]) if part[0] in order else len(order)))
        for each in sizes
    ]
    number = max(range(len(sizes)), key=lambda each: sum(sizes[each].values()))
    left = max(requested - sum(sizes[number].values()), 0)
    bar = BudgetBar(
        title=f"rank {number}, {gib_text(total)}",
        parts=[(*_PARTS.get(name, (name, name)), size) for name, size in {**sizes[number], "kv_cache": left}.items()],
        requested_bytes=requested,
        outside_bytes=total - requested,
    )
    console = Console(highlight=False, width=WIDTH)
    return ["", *(in_colours(bar, console) or bar.text(with_sizes=True)).split("\n"), ""]


def in_colours(bar: BudgetBar, console: Console) -> str:
    """Return it for a terminal; empty where that has no colours, or there is nothing to draw."""
    segments = bar.segments(console.width - 2)
    if console.color_system is None or console.no_color or not segments:
        return ""
    cells, legend = Text(), Text()
    for (key, count), (_, title, size) in zip(segments, bar.drawn, strict=True):
        cells.append(("░" if key == OUTSIDE else "█") * count, LOOKS[key][1])
        legend.append("■ ", LOOKS[key][1]).append(f"{title} {gib_text(size)}   ")
    with console.capture() as drawn:
        if line := bar.line(segments, f"budget {gib_text(bar.requested_bytes)} ", "▼"):
            console.print(Text(line))
        console.print(cells, no_wrap=True, overflow="crop")
        console.print(legend)
    return drawn.get().rstrip("\n")


def _figure(part: Any) -> Mapping[str, Any]:  # noqa: ANN401 - JSON: an object, or a row of its values
    return part if isinstance(part, Mapping) else {"bytes": part[0]}


def _verdict_of_a_wish(wish: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    chosen, asked = wish["chosen"], wish["wish"]
    what = f"{asked['conversations']} x {asked['tokens']:,} tokens"
    if chosen is None:
        return f"Does not fit: {what}, and no other flags that were tried make it fit."
    needs = f"{what} need {size_text(chosen['needed_bytes'])}"
    if "kv_cache_memory_bytes" in chosen["flags"]:
        return f"{needs} on each rank; no device was named, so nothing was compared."
    available = (answer.get("kv_cache") or {}).get("available_bytes") or chosen["available_bytes"]
    parallel = config_of(answer, "parallel") or answer.get("flags") or {}
    ranks = parallel.get("tensor_parallel_size", 1) * parallel.get("pipeline_parallel_size", 1)
    room = f"{size_text(available)} on each of {ranks} ranks" if ranks > 1 else size_text(available)
    if not wish["fits"]:
        return f"Does not fit as it is; with {chosen['why']} it fits: {needs} of {room}."
    return f"Fits: {needs} of {room}."


def _wish(answer: Mapping[str, Any], wish: Mapping[str, Any]) -> list[str]:
    chosen, image = wish["chosen"], wish["image"]
    lines = _wrapped(wish["proof"] if wish["fits"] else f"As it is, {wish['proof']}").splitlines()
    if image is not None:
        lines.append(f"An image is {image['prompt_tokens']:,} tokens, {image['embeddings']:,} in the encoder cache.")
    if chosen is not None:
        lines += ["", f"  {answer['command_line']}", ""]
        lines += [f"  --{name.replace('_', '-')}: {why}" for name, why in wish["reasons"].items()]
    if wish["nearest"]:
        lines += ["", "Nearest:", *(f"  {option['why']}: {option['command_line']}" for option in wish["nearest"])]
    return lines


def _words(flags: Mapping[str, Any]) -> str:
    return " ".join(Line((), {}).changed(flags).words)


def _row(title: str, value: str) -> str:
    return f"{title:<20}{value}"


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_on_hyphens=False)

"""A measured load as Markdown: its tables, the findings, what was done; and the reports' files. Decides nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final

from highwater.diagnose.case import of_load
from highwater.diagnose.evidence import AFTER, BEFORE, PEAK, Experiment, Moment, highest, host_used, part_of, total
from highwater.diagnose.finding import COMPONENT_MEANING, all_advice
from highwater.diagnose.rules.book import judged
from highwater.http.text.markdown import block, chart, code, moment, section, table, text
from highwater.model.components import COMPONENT_NAMES, component_title
from highwater.model.policy import signal_traits
from highwater.model.rank import RankKey, RankReading, device_title
from highwater.model.units import MIB, UNKNOWN, gib_text, mib, span_text
from highwater.process.errors import HighwaterError
from highwater.terminal.measure.load import shown_command

# More ranks than these are shown on demand, below the sum of all.
RANKS_SHOWN = 2
MAX_EVENTS = 40
WEIGHT_WORDS: Final[Mapping[str, str]] = {"likely": "act on it", "clue": "worth a look", "note": "good to know"}
_HASH_LENGTH = 16
_ZERO: Final = "0.0"
_Figure = Callable[[RankReading], int | None]
# Beside the components, of each rank.
_MORE: Final[Mapping[str, _Figure]] = {
    "free": lambda rank: rank.free_bytes,
    "torch reserved": lambda rank: rank.torch.reserved_bytes,
    "torch allocated": lambda rank: rank.torch.allocated_bytes,
    "torch peak allocated": lambda rank: rank.torch.peak_allocated_bytes,
    "host rss": lambda rank: rank.host_memory.rss_bytes,
    "host used": host_used,
}
# Beside the components, which `diagnose.finding.COMPONENT_MEANING` explains.
_MEANINGS: Final[Sequence[tuple[str, str]]] = (
    ("used", "What the driver counts on the device, other processes included; on CPU the worker's resident set."),
    (
        "peak under load",
        "Each rank at its highest reading from the load's start to the reading after it, and what that was made of.",
    ),
    (
        "freed",
        "In use before the remedy less after it, traffic's part included: negative where traffic took more meanwhile. "
        "MiB changed counts from the moment before, so with what moved between two remedies. An event names first what "
        "the remedy itself gave back (credited_bytes), then what is less in use now.",
    ),
    ("torch reserved", "What PyTorch's allocator holds of the device: allocated, and the allocator reserve."),
    ("torch peak allocated", "PyTorch's own record since the engine started; it also knows what no reading saw."),
    ("host rss", "The worker's resident set on the host."),
    ("host used", "In use where the worker runs: of its control group, or of the machine. Other processes count."),
    (UNKNOWN, "Not known, which is not the same as nothing."),
)


def report(experiment: Experiment, *, written_at: float) -> str:
    found = judged(of_load(experiment))
    findings = []
    for one in found:
        settings = ", ".join(code(each.setting) for each in one.advice)
        see = f" See: {settings}." if settings else ""
        # A capital, unless it begins with a name.
        title = one.title if "_" in one.title.partition(" ")[0] else one.title[:1].upper() + one.title[1:]
        findings.append(f"- **{text(title)}** ({WEIGHT_WORDS[one.weight]}). {text(one.text)}{see}")
    changes = (f"- {code(one.setting)}: {text(one.change)} *Costs:* {text(one.cost)}" for one in all_advice(found))
    readings = [reading for seen in experiment.moments for reading in seen.ranks]
    has_torch = any(reading.torch.reserved_bytes is not None for reading in readings)
    of_components = [
        (component_title(name), meaning)
        for name, meaning in COMPONENT_MEANING.items()
        if any(part_of(reading, name) is not None for reading in readings)
    ]
    meanings = [
        f"- {text(name)}: {text(meaning)}"
        for name, meaning in (_MEANINGS[0], *of_components, *_MEANINGS[1:])
        if has_torch or not name.startswith("torch ")
    ]
    engine, load, events = experiment.engine, experiment.load, experiment.events[-MAX_EVENTS:]
    listed = [
        [f"{one.at - load.started_at:+,.1f} s", code(one.kind, 20), code(one.trigger or "", 20), code(one.summary, 200)]
        for one in events
    ]
    caption = "Every event from the load's start on"
    if len(events) < len(experiment.events):
        caption = f"The last {len(events)} of {len(experiment.events)} events"
    happened = f"{caption}:\n\n{table(['after the start', 'kind', 'by', 'what'], listed, left=(1, 2, 3))}"
    how = "was interrupted" if load.interrupted else "ended"
    by = f" (signal {load.signal_name})" if load.signal_name else ""
    ended = f"It {how} after {load.seconds:,.1f} s with exit code {load.exit_code}{by}."
    device = " ".join(part for part in (device_title(experiment.device), experiment.device.name) if part)
    parts = [
        f"# {code(experiment.name, 120)}",
        f"vLLM {code(engine.version or '(version unknown)')} with {code(engine.model or '(model unknown)')} on "
        f"{_ranks(experiment)} ({code(device, 120)}), {moment(experiment.load.started_at)}",
        _figures(experiment),
        *section("The load", [block(shown_command(load.command), "sh"), ended]),
        *section("What the numbers say", ["\n".join(findings) or "Nothing that is known stands out."]),
        *section("Where the memory was", _tables(experiment)),
        *section("Timeline", _timeline(experiment)),
        *section("Remedies", _remedies(experiment)),
        *section("Encoder cache", _encoder_cache(experiment)),
        *section("What happened meanwhile", [happened] if events else []),
        *section("What to change", ["\n".join(changes)]),
        *section("Set-up", ["\n".join(_setup(experiment))]),
        *section("What the numbers mean", ["\n".join(meanings)]),
        *section("Not known, or not done", map(text, experiment.notes)),
        "---",
        text(f"Highwater {experiment.version}, written by highwater measure at {moment(written_at)}"),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _figures(experiment: Experiment) -> str:
    columns: list[tuple[str, str, str]] = []
    used, fullest = highest(experiment.ranks(PEAK), lambda reading: reading.used_bytes) or (0, None)
    if fullest is not None:
        whole = fullest.total_bytes
        share = f" of {gib_text(whole)}, {used / whole:.1%}" if whole else ""
        columns.append(("peak under load", gib_text(used), f"{fullest.name}{share}"))
    grown = experiment.change(BEFORE, AFTER, "used_bytes")
    columns.append(("growth", gib_text(grown, signed=True), f"before to after the load, {_ranks(experiment)}"))
    if experiment.remedies:
        relieved = experiment.after_remedies
        moved = experiment.change(AFTER, relieved[-1].name, "used_bytes") if relieved else None
        done = sum(result.outcome == "done" for result in experiment.remedies)
        tried = len(experiment.remedies) + len(experiment.not_tried)
        given = gib_text(None if moved is None else -moved)
        columns.append(("given back", given, f"by {done} of {tried} remedies"))
    how = f"{'interrupted, ' if experiment.load.interrupted else ''}{experiment.load.exit_text}"
    columns.append(("load", span_text(round(experiment.load.seconds)), how))
    titles, numbers, words = zip(*columns, strict=True)
    rows = [[f"**{text(number)}**" for number in numbers], [text(word) for word in words]]
    return table(titles, rows, left=range(len(titles)))


# --- tables of moments ---


def _tables(experiment: Experiment) -> Iterator[str]:
    keys = list(dict.fromkeys(reading.key for seen in experiment.moments for reading in seen.ranks))
    folded = len(keys) > RANKS_SHOWN
    if folded:
        whose = f"all {len(experiment.ranks(BEFORE))} ranks together"
        yield from (f"{title}:\n\n{grid}" for title, grid in _both(experiment, keys, whose))
    for key in keys:
        reading = next(rank for seen in experiment.moments if (rank := seen.rank(key)) is not None)
        of = f", of {mib(reading.total_bytes)}" if reading.total_bytes else ""
        for title, grid in _both(experiment, [key], f"{reading.name}{of}"):
            details = f"<details><summary>{title}</summary>\n\n{grid}\n\n</details>"
            yield details if folded else f"{title}:\n\n{grid}"


def _both(experiment: Experiment, keys: Sequence[RankKey], whose: str) -> Iterator[tuple[str, str]]:
    # Components without any known figure are left out.
    known = [
        name for name in COMPONENT_NAMES if any(_part(seen, keys, name) is not None for seen in experiment.moments)
    ]
    for caption, grid in (("MiB in use", _in_use), ("MiB changed", _changed)):
        yield text(f"{caption}, {whose}"), grid(experiment, keys, ["used_bytes", *known])


def _in_use(experiment: Experiment, keys: Sequence[RankKey], names: Sequence[str]) -> str:
    rows = [[_row_title(name), *(mib(_part(seen, keys, name)) for seen in experiment.moments)] for name in names]
    if len(keys) == 1:
        ranks = [seen.rank(keys[0]) for seen in experiment.moments]
        more = [[title, *(mib(read(rank) if rank else None) for rank in ranks)] for title, read in _MORE.items()]
        # On CPU a worker's resident set is what is used.
        hidden = {"host rss"} if experiment.device.traits.is_host_memory else set()
        rows += [row for row in more if row[0] not in hidden and set(row[1:]) != {UNKNOWN}]
    return _grid([seen.title for seen in experiment.moments], rows)


def _changed(experiment: Experiment, keys: Sequence[RankKey], names: Sequence[str]) -> str:
    """Return the change of each step from one moment to the next: growth is positive, and so is what was freed."""
    relieved = [seen.name for seen in experiment.after_remedies]
    columns = [
        ("to the peak", BEFORE, PEAK, 1),
        ("growth", BEFORE, AFTER, 1),
        *((f"{end.removeprefix('after ')} freed", start, end, -1) for start, end in pairwise([AFTER, *relieved])),
        *(("overall", BEFORE, end, 1) for end in relieved[-1:]),
    ]

    def cell(start: str, end: str, name: str, sign: int) -> str:
        change = experiment.change(start, end, name, keys)
        return UNKNOWN if change is None else _moved(sign * change, signed=sign > 0)

    rows = [[_row_title(name), *(cell(start, end, name, sign) for _, start, end, sign in columns)] for name in names]
    return _grid([title for title, *_ in columns], rows)


def _part(seen: Moment, keys: Sequence[RankKey], name: str) -> int | None:
    ranks = [seen.rank(key) for key in keys]
    return total(part_of(rank, name) if rank is not None else None for rank in ranks)


def _grid(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    strong, *others = [list(map(text, row)) for row in rows]
    return table(["MiB", *map(text, titles)], [[f"**{cell}**" for cell in strong], *others])


def _moved(size: int | None, *, signed: bool = False) -> str:
    shown = mib(size, signed=signed)
    # A change that rounds to 0 has no sign.
    return _ZERO if shown.lstrip("+-") == _ZERO else shown


def _row_title(name: str) -> str:
    return "used" if name == "used_bytes" else component_title(name)


# --- the rest ---


def _timeline(experiment: Experiment) -> Iterator[str]:
    fullest = max(
        experiment.series.values(),
        key=lambda ranks: max((each.used_bytes or 0 for each in ranks), default=0),
        default=(),
    )
    points = [(each.taken_at, each.used_bytes / MIB) for each in fullest if each.used_bytes is not None]
    if len(points) < 2 or points[-1][0] <= points[0][0]:  # noqa: PLR2004 - one reading is no line
        return
    readings = sum(map(len, experiment.series.values()))
    how = "the workers' recorders" if experiment.recorded else "the sidecar's polls"
    longest = f"; the longest time without one was {experiment.gaps[0].seconds:.0f} s" if experiment.gaps else ""
    yield f"{readings:,} readings by {how}{longest}. In each step the highest one is drawn."
    yield chart(f"MiB in use, {fullest[0].name}", points)
    start = points[0][0]
    seen = [(experiment.load.started_at, "load starts"), (experiment.load.ended_at, "load ends")]
    seen += [(each.at, each.title) for each in experiment.after_remedies if each.at is not None]
    key = ", ".join(f"{title} at {at - start:.1f} s" for at, title in seen if start <= at <= points[-1][0] + 1.0)
    yield text(f"The moments in it: {key}. The axis upwards does not begin at 0.")


def _remedies(experiment: Experiment) -> Iterator[str]:
    headers = ["remedy", "outcome", "less in use, MiB", "took, s", "requests held, s", "why, or what moved (in MiB)"]
    rows = []
    for result in experiment.remedies:
        moved = {component_title(name): _moved(getattr(result.freed_components, name)) for name in COMPONENT_NAMES}
        parts = [f"{name} {part}" for name, part in moved.items() if part not in {_ZERO, UNKNOWN}]
        rows.append(
            [
                text(result.remedy),
                text(result.outcome),
                _moved(result.freed_bytes) if result.outcome == "done" else UNKNOWN,
                f"{result.seconds:.2f}",
                UNKNOWN if result.held_seconds is None else f"{result.held_seconds:.2f}",
                code(result.reason, 300) if result.reason else ", ".join(parts) or "nothing moved",
            ]
        )
    left_out = ["interrupted", UNKNOWN, UNKNOWN, UNKNOWN, "Ctrl-C came before it, or before its response"]
    rows += [[name, *left_out] for name in experiment.not_tried]
    if rows:
        yield f"One by one, in safe mode:\n\n{table(headers, rows, left=(0, 1, 5))}"


def _encoder_cache(experiment: Experiment) -> Iterator[str]:
    if not experiment.caches:
        return
    rows = [
        [title, _number(now.entries), mib(now.device_bytes), mib(now.host_bytes), _number(now.capacity_embeds)]
        for title, now in ((cache.title, cache.totals) for cache in experiment.caches)
    ]
    headers = ["moment", "entries", "device, MiB", "host, MiB", "capacity, embeddings"]
    yield f"Of the rank that holds most; every tensor-parallel rank holds a full copy:\n\n{table(headers, rows)}"
    fullest = max(experiment.caches, key=lambda cache: cache.totals.held_bytes)
    if fullest.largest:
        listed = [
            [
                code(each.mm_hash, _HASH_LENGTH),
                mib(each.bytes),
                _number(each.embeds),
                code(each.residency or UNKNOWN, 20),
                UNKNOWN if each.age_seconds is None else span_text(each.age_seconds),
            ]
            for each in fullest.largest
        ]
        headers = ["mm_hash", "MiB", "embeddings", "residency", "age, at least"]
        yield f"The largest entries {fullest.title}:\n\n{table(headers, listed, left=(0, 3))}"


def _setup(experiment: Experiment) -> Iterator[str]:
    engine = experiment.engine
    yield f"- engine: {code(f'vLLM {engine.version or UNKNOWN} at {engine.url}')}"
    yield f"- model: {code(engine.model or UNKNOWN)}"
    yield f"- device: {code(f'{device_title(experiment.device)} {experiment.device.name or str()}')}"
    yield f"- ranks: {len(experiment.ranks(BEFORE))}"
    budget = next((reading.budget for reading in experiment.ranks(BEFORE) if reading.budget.requested_bytes), None)
    if budget is not None:
        share = f" ({budget.gpu_memory_utilization:g} of the device)" if budget.gpu_memory_utilization else ""
        yield f"- vLLM's share of a device: {gib_text(budget.requested_bytes)}{share}"
    for flag, value in experiment.settings.items():
        yield f"- {code(flag)}: {code(value, 200)}"
    yield f"- sidecar: {code(experiment.sidecar_url)}"
    yield f"- policy: {text(experiment.policy.mode) if experiment.policy is not None else UNKNOWN}"
    for rule in experiment.policy.rules if experiment.policy is not None else ():
        waters = [gib_text(size) for size in sorted({one.high_free_bytes for one in rule.ranks if one.high_free_bytes})]
        if waters:
            high_water = f"under {' or '.join(waters)}"
        elif rule.high_water is None:
            high_water = "by the engine's plan"
        else:
            traits = signal_traits(rule.signal)
            water = f"{rule.high_water:g}" if traits.is_ratio else gib_text(round(rule.high_water))
            high_water = f"{'<=' if traits.falls else '>='} {water}"
        remedies = ", ".join(remedy.name for remedy in rule.remedies)
        yield f"- {code(f'rule {rule.name}', 80)}: {code(f'{rule.signal} {high_water}: {remedies}', 200)}"


def _number(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def _ranks(experiment: Experiment) -> str:
    count = len(experiment.ranks(BEFORE))
    return f"{count} rank{'' if count == 1 else 's'}"


# --- the files: checked before the load, written after it, and never over another file by accident ---

SUFFIXES: Final = (".html", ".md")


class CannotWriteReport(HighwaterError):
    """A report cannot be written there; the message is one line that says why, and what to do."""


class ReportFiles:
    """The two files of one experiment.

    ``out`` is their path with or without one of the suffixes, or a folder (``None``: the working folder), in which the
    name is made of the time (``now``, Unix seconds). Raises CannotWriteReport: nothing can be written there, or a file
    exists and ``force`` does not replace it.
    """

    def __init__(self, out: Path | None, *, force: bool, now: float) -> None:
        self._force = force
        self._stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%d-%H%M%SZ")
        try:
            if out is None or out.is_dir():
                stem = (out or Path.cwd()).absolute() / f"highwater-{self._stamp}"
            else:
                stem = (out.with_suffix("") if out.suffix.lower() in SUFFIXES else out).absolute()
            self.paths = tuple(stem.with_name(stem.name + suffix) for suffix in SUFFIXES)
            for path in self.paths:
                if path.is_dir():
                    raise CannotWriteReport(
                        f"{path} is a folder; --out takes the path of a file, with or without .html or .md"
                    )
                if path.exists() and not force:
                    raise CannotWriteReport(f"{path} is there already; --force replaces it, another --out leaves it")
            if not (stem.parent.is_dir() and os.access(stem.parent, os.W_OK | os.X_OK)):
                raise CannotWriteReport(
                    f"the report cannot be written into {stem.parent}: it is missing or not writable; --out names "
                    "another place"
                )
        except OSError as exc:  # a folder on the way that cannot be searched, a name that is too long
            raise CannotWriteReport(
                f"the report cannot be written to {out}: {exc.strerror}; --out names another place"
            ) from exc

    def write(self, texts: Mapping[str, str]) -> tuple[Path, ...]:
        """Write each text, beside a file that came there meanwhile. Raises CannotWriteReport where that failed."""
        written = []
        for wanted, suffix in zip(self.paths, SUFFIXES, strict=True):
            path = wanted
            try:
                try:
                    file = path.open("w" if self._force else "x", encoding="utf-8")
                except FileExistsError:
                    path = path.with_name(f"{path.stem}-{self._stamp}-{secrets.token_hex(2)}{path.suffix}")
                    file = path.open("x", encoding="utf-8")
                with file:
                    file.write(texts[suffix])
            except OSError as exc:
                raise CannotWriteReport(f"{path} could not be written: {exc.strerror}") from exc
            written.append(path)
        return tuple(written)

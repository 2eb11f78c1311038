"""An experiment as a document: the story's tables, what they say, and what was done. Formats, and decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from app.attribution import COMPONENTS
from app.experiment.command_line import shown_command
from app.experiment.document import (
    Block,
    Changes,
    Command,
    Document,
    Facts,
    Figures,
    Findings,
    Foreign,
    Heading,
    Inline,
    Paragraph,
    Table,
)
from app.experiment.experiment import (
    AFTER,
    BEFORE,
    PEAK,
    Experiment,
    Moment,
    PolicyRule,
    RankKey,
    RankPoint,
    RemedyStep,
    changes,
)
from app.experiment.findings import all_advice, findings
from app.experiment.timeline import timelines
from app.incidents import advice as known
from app.incidents.plain import plain
from app.incidents.text import duration, moment
from app.policy import FALLING_SIGNALS, RATIO_SIGNALS
from app.table import component_title, device_title
from app.units import UNKNOWN, mib

# More ranks than these are shown on demand, below the sum of all.
RANKS_SHOWN = 2
EVENTS_MOST = 40
_HASH_LENGTH = 16
NOTHING: Final = "0.0"
_ROWS: Final = ("used_bytes", *COMPONENTS)
_TORCH: Final = (
    ("torch reserved", "reserved_bytes"),
    ("torch allocated", "allocated_bytes"),
    ("torch peak allocated", "peak_allocated_bytes"),
)
_HOST: Final = (("host rss", "host_rss_bytes"), ("host used", "host_used_bytes"))
# Beside the components, which the black box explains (`advice.COMPONENT_MEANING`).
_MEANINGS: Final[Sequence[tuple[str, str]]] = (
    ("used", "What the driver counts on the device, other processes included; on CPU the worker's resident set."),
    (
        "peak under load",
        "Each rank at its highest reading from the load's start to the reading after it, and what that was made of.",
    ),
    ("freed", "In use before the remedy less after it; negative where traffic took more meanwhile."),
    ("torch reserved", "What PyTorch's allocator holds of the device: allocated, and torch cached."),
    ("torch peak allocated", "PyTorch's own record since the engine started; it also knows what no reading saw."),
    ("host rss", "The worker's resident set on the host."),
    ("host used", "In use where the worker lives: of its control group, or of the machine. Other processes count."),
    (UNKNOWN, "Not known, which is not the same as nothing."),
)


def document(e: Experiment, *, written_at: float) -> Document:
    """The whole report."""
    found = findings(e)
    engine = e.engine
    device = " ".join(part for part in (device_title(e.device), e.device.name) if part)
    return Document(
        title=Foreign(plain(e.name, 120)),
        subtitle=(
            "vLLM ",
            Foreign(plain(engine.version or "(version unknown)", 60)),
            " with ",
            Foreign(plain(engine.model or "(model unknown)", 120)),
            f" on {_count(len(_before(e)), 'rank', 'ranks')} (",
            Foreign(plain(device, 120)),
            f"), {moment(e.load.started_at)}",
        ),
        blocks=tuple(_blocks(e, Findings(found), Changes(all_advice(found)))),
        made_by=f"Highwater {e.version}, written by highwater record at {moment(written_at)}",
    )


def _blocks(e: Experiment, found: Findings, advice: Changes) -> Iterator[Block]:
    yield Figures(tuple(_figures(e)))
    yield Heading("The load")
    yield Command(shown_command(e.load.command))
    yield Paragraph([_ended(e)])
    yield Heading("What the numbers say")
    yield found
    yield Heading("Where the memory was")
    yield from _tables(e)
    charts = list(timelines(e))
    if charts:
        yield Heading("Timeline")
        yield Paragraph([_sampling(e)])
        yield from charts
    if e.steps:
        yield Heading("Remedies")
        yield _remedies(e.steps)
    if e.caches:
        yield Heading("Encoder cache")
        yield from _encoder_cache(e)
    if events := _events(e):
        yield Heading("What happened meanwhile")
        yield events
    if advice.advice:
        yield Heading("What to change")
        yield advice
    yield Heading("Set-up")
    yield Facts(tuple(_setup(e)))
    yield Heading("What the numbers mean")
    yield Facts(tuple(_meanings(e)))
    if e.notes:
        yield Heading("Not known, or not done")
        for note in e.notes:
            yield Paragraph([note])


def _figures(e: Experiment) -> Iterator[tuple[str, str, str]]:
    peak = e.moment(PEAK)
    told = [point for point in peak.ranks if point.used_bytes is not None] if peak is not None else []
    if told:
        fullest = max(told, key=lambda point: point.used_bytes or 0)
        of = f" of {mib(fullest.total_bytes)}" if fullest.total_bytes else ""
        ratio = (
            f", {fullest.used_bytes / fullest.total_bytes:.1%}" if fullest.used_bytes and fullest.total_bytes else ""
        )
        yield "peak under load", f"{mib(fullest.used_bytes)} MiB", f"{fullest.name}{of}{ratio}"
    grown = e.change(BEFORE, AFTER, "used_bytes")
    yield (
        "growth",
        f"{mib(grown, signed=True)} MiB",
        f"before to after the load, {_count(len(_before(e)), 'rank', 'ranks')}",
    )
    if e.steps:
        last = e.last
        back = e.change(AFTER, last.name, "used_bytes") if last is not None and last.name != AFTER else None
        done = [step for step in e.steps if step.outcome == "done"]
        yield (
            "given back",
            f"{mib(-back if back is not None else None)} MiB",
            f"by {len(done)} of {len(e.steps)} remedies",
        )
    code = f"exit code {e.load.exit_code}" + (f" ({e.load.signal_name})" if e.load.signal_name else "")
    yield "load", duration(round(e.load.seconds)), f"interrupted, {code}" if e.load.interrupted else code


def _ended(e: Experiment) -> str:
    load = e.load
    how = "was interrupted" if load.interrupted else "ended"
    by = f" (signal {load.signal_name})" if load.signal_name else ""
    return f"It {how} after {load.seconds:,.1f} s with exit code {load.exit_code}{by}."


# --- tables of moments ---


def _tables(e: Experiment) -> Iterator[Block]:
    keys = list(dict.fromkeys(point.key for moment in e.moments for point in moment.ranks))
    folded = len(keys) > RANKS_SHOWN
    if folded:
        yield _moments_table(e, None, keys, folded=False)
        yield _changes_table(e, None, keys, folded=False)
    for key in keys:
        yield _moments_table(e, key, keys, folded=folded)
        yield _changes_table(e, key, keys, folded=folded)


def _moments_table(e: Experiment, key: RankKey | None, keys: Sequence[RankKey], *, folded: bool) -> Table:
    rows = [
        [_row_title(name), *(mib(_part(m, key, keys, name)) for m in e.moments)]
        for name in _ROWS
        if name == "used_bytes" or _is_told(e, key, keys, name)
    ]
    colours = [name for name in _ROWS if name == "used_bytes" or _is_told(e, key, keys, name)]
    if key is not None:
        points = [m.rank(key) for m in e.moments]
        extra = [
            ["free", *(mib(_free(point)) for point in points)],
            *([title, *(mib(_torch(point, name)) for point in points)] for title, name in _TORCH),
            *([title, *(mib(point.part(name) if point else None) for point in points)] for title, name in _host(e)),
        ]
        rows += [row for row in extra if set(row[1:]) != {UNKNOWN}]
    return Table(
        f"MiB in use, {_whose(e, key)}",
        ["MiB", *(m.title for m in e.moments)],
        rows,
        strong=frozenset({0}),
        folded=folded,
        colours=[*colours, *("" for _ in rows[len(colours) :])],
    )


def _changes_table(e: Experiment, key: RankKey | None, keys: Sequence[RankKey], *, folded: bool) -> Table:
    """What each step from one moment to the next changed: growth is positive, what is freed is told as freed."""
    before, peak, after, last = e.moment(BEFORE), e.moment(PEAK), e.moment(AFTER), e.last
    columns: list[tuple[str, Moment | None, Moment | None, int]] = [
        ("to the peak", before, peak, 1),
        ("growth", before, after, 1),
    ]
    previous = after
    for later in (m for m in e.moments if m.name.startswith("after ")):
        columns.append((f"{later.name.removeprefix('after ')} freed", previous, later, -1))
        previous = later
    if last is not None and last.name.startswith("after "):
        columns.append(("overall", before, last, 1))
    names = [name for name in _ROWS if name == "used_bytes" or _is_told(e, key, keys, name)]
    rows = [
        [_row_title(name), *(_change(start, end, key, name, sign) for _, start, end, sign in columns)] for name in names
    ]
    return Table(
        f"MiB changed, {_whose(e, key)}",
        ["MiB", *(title for title, *_ in columns)],
        rows,
        strong=frozenset({0}),
        folded=folded,
        colours=names,
    )


def _change(start: Moment | None, end: Moment | None, key: RankKey | None, name: str, sign: int) -> str:
    if start is None or end is None:
        return UNKNOWN
    moved = changes(start, end, name)
    if key is not None:
        change = moved.get(key)
    else:
        told = [each for each in moved.values() if each is not None]
        change = sum(told) if told and len(told) == len(moved) else None
    if change is None:
        return UNKNOWN
    return _moved(sign * change, signed=sign > 0)


def _moved(size: int | None, *, signed: bool = False) -> str:
    shown = mib(size, signed=signed)
    # What does not move is no growth of plus nothing.
    return NOTHING if shown.lstrip("+-") == NOTHING else shown


def _row_title(name: str) -> str:
    return "used" if name == "used_bytes" else component_title(name)


def _is_told(e: Experiment, key: RankKey | None, keys: Sequence[RankKey], name: str) -> bool:
    return any(_part(m, key, keys, name) is not None for m in e.moments)


def _part(m: Moment, key: RankKey | None, keys: Sequence[RankKey], name: str) -> int | None:
    if key is not None:
        point = m.rank(key)
        return point.part(name) if point is not None else None
    return m.total(name) if len(m.ranks) == len(keys) else None


def _whose(e: Experiment, key: RankKey | None) -> str:
    if key is None:
        return f"all {len(_before(e))} ranks together"
    point = next(point for m in e.moments for point in m.ranks if point.key == key)
    total = f", of {mib(point.total_bytes)}" if point.total_bytes else ""
    return f"{point.name}{total}"


def _host(e: Experiment) -> Sequence[tuple[str, str]]:
    # On CPU a worker's resident set is what is used.
    return _HOST[1:] if e.device.type == "cpu" else _HOST


def _free(point: RankPoint | None) -> int | None:
    return point.free_bytes if point is not None else None


def _torch(point: RankPoint | None, name: str) -> int | None:
    value: int | None = getattr(point.torch, name) if point is not None else None
    return value


# --- the rest ---


def _sampling(e: Experiment) -> str:
    readings = sum(map(len, e.series.values()))
    how = "the workers' recorders" if e.recorded else "the sidecar's polls"
    longest = f"; the longest time without one was {e.gaps[0].seconds:.0f} s" if e.gaps else ""
    return f"{readings:,} readings by {how}{longest}. In each step the highest one is drawn."


def _remedies(steps: Sequence[RemedyStep]) -> Table:
    rows: list[list[Inline]] = []
    for step in steps:
        told = {component_title(name): _moved(part) for name, part in step.freed_components.items()}
        parts = [f"{name} {part}" for name, part in told.items() if part != NOTHING]
        rows.append(
            [
                step.remedy,
                step.outcome,
                _moved(step.freed_bytes) if step.outcome == "done" else UNKNOWN,
                UNKNOWN if step.seconds is None else f"{step.seconds:.2f}",
                UNKNOWN if step.held_seconds is None else f"{step.held_seconds:.2f}",
                Foreign(plain(step.reason, 300)) if step.reason else ", ".join(parts) or "nothing moved",
            ]
        )
    headers = ["remedy", "outcome", "freed, MiB", "took, s", "requests held, s", "why, or what moved (MiB freed)"]
    return Table("One by one, in safe mode", headers, rows, wide=frozenset({0, 1, 5}))


def _encoder_cache(e: Experiment) -> Iterator[Block]:
    headers = ["moment", "entries", "device, MiB", "host, MiB", "capacity, embeddings"]
    rows = [
        [
            cache.title,
            _number(cache.entries),
            mib(cache.device_bytes),
            mib(cache.host_bytes),
            _number(cache.capacity_embeds),
        ]
        for cache in e.caches
    ]
    yield Table("Of the rank that holds most; every tensor-parallel rank holds a full copy", headers, rows)
    fullest = max(e.caches, key=lambda cache: (cache.device_bytes or 0) + (cache.host_bytes or 0))
    if fullest.largest:
        listed: list[list[Inline]] = [
            [
                Foreign(plain(each.mm_hash, _HASH_LENGTH)),
                mib(each.bytes),
                _number(each.embeds),
                Foreign(plain(each.residency or UNKNOWN, 20)),
                UNKNOWN if each.age_seconds is None else duration(each.age_seconds),
            ]
            for each in fullest.largest
        ]
        heads = ["mm_hash", "MiB", "embeddings", "residency", "age, at least"]
        yield Table(f"The largest entries {fullest.title}", heads, listed, wide=frozenset({0, 3}))


def _events(e: Experiment) -> Table | None:
    if not e.events:
        return None
    rows: list[list[Inline]] = [
        [
            _since_start(event.at - e.load.started_at),
            Foreign(plain(event.kind, 20)),
            Foreign(plain(event.trigger, 20)) if event.trigger else "",
            Foreign(plain(event.summary, 200)),
        ]
        for event in e.events[-EVENTS_MOST:]
    ]
    left = len(e.events) - len(rows)
    caption = f"The last {len(rows)} of {len(e.events)} events" if left > 0 else "Every event from the load's start on"
    return Table(caption, ["after the start", "kind", "by", "what"], rows, wide=frozenset({1, 2, 3}))


def _setup(e: Experiment) -> Iterator[tuple[Inline, Inline]]:
    engine = e.engine
    yield "engine", Foreign(plain(f"vLLM {engine.version or UNKNOWN} at {engine.url}"))
    yield "model", Foreign(plain(engine.model or UNKNOWN))
    yield "device", Foreign(plain(f"{device_title(e.device)} {e.device.name or ''}".strip()))
    yield "ranks", str(len(_before(e)))
    budget = next((point.budget for point in _before(e) if point.budget.requested_bytes), None)
    if budget is not None:
        share = f" ({budget.gpu_memory_utilization:g} of the device)" if budget.gpu_memory_utilization else ""
        yield "vLLM's share of a device", f"{mib(budget.requested_bytes)} MiB{share}"
    for flag, value in e.settings.items():
        yield Foreign(flag), Foreign(plain(value, 200))
    yield "sidecar", Foreign(plain(e.sidecar_url))
    yield "policy", e.policy_mode or UNKNOWN
    for rule in e.rules:
        told = f"{_high_water(rule)}: {', '.join(rule.remedies)}"
        yield Foreign(plain(f"rule {rule.name}", 80)), Foreign(plain(told, 200))


def _high_water(rule: PolicyRule) -> str:
    """Where the rule acts: at a value of its signal, or with so much less free than the engine's plan leaves."""
    if rule.high_water is not None:
        is_ratio = rule.signal in RATIO_SIGNALS
        water = f"{rule.high_water:g}" if is_ratio else f"{mib(round(rule.high_water))} MiB"
        return f"{rule.signal} {'<=' if rule.signal in FALLING_SIGNALS else '>='} {water}"
    waters = [mib(size) for size in sorted(set(rule.high_free.values()))]
    return f"{rule.signal} under {' or '.join(waters)} MiB" if waters else f"{rule.signal} by the engine's plan"


def _meanings(e: Experiment) -> Iterator[tuple[Inline, Inline]]:
    keys = [point.key for point in _before(e)]
    yield _MEANINGS[0]
    for name, meaning in known.COMPONENT_MEANING.items():
        if any(_is_told(e, key, keys, name) for key in keys):
            yield component_title(name), meaning
    has_torch = any(point.torch.reserved_bytes is not None for m in e.moments for point in m.ranks)
    yield from (each for each in _MEANINGS[1:] if has_torch or not each[0].startswith("torch"))


def _before(e: Experiment) -> Sequence[RankPoint]:
    before = e.moment(BEFORE)
    return before.ranks if before is not None else ()


def _number(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _since_start(seconds: float) -> str:
    return f"{seconds:+,.1f} s"

"""A view as a screen of any size, in rich's tables: the verdict first, the keys last. Pure.

Sections are drawn whole where there is room, and the chart takes what is left. Where there is none, the least urgent
are shortened or left out first: events, the chart, the rules, the components, the ranks that are best off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from highwater.diagnose.verdict import SOON_SECONDS
from highwater.http.text.report import engine_facts, headline
from highwater.model.components import COMPONENTS
from highwater.model.policy import WORDS, signal_text, signal_title, waters_text
from highwater.model.rank import RankReading, device_title, names_text
from highwater.model.units import GIB, UNKNOWN, gib, gib_text, share_text, span_text
from highwater.process.errors import ATTENTION, CRITICAL, OK
from highwater.terminal.top.feed import HISTORY_SECONDS, View
from highwater.terminal.top.graphs import AreaChart, Marks, StackedBar, component_cell, glyphs_of

_WIDE = 76
_WIDER = 110
_DIM = "bright_black"
_EXITS = {OK: "bold green", ATTENTION: "bold yellow", CRITICAL: "bold red"}
_LEVELS = {"good": "green", "warn": "yellow", "bad": "bold red"}
_PHASES = {
    "calm": "green",
    "short": "yellow",
    "urgent": "bold red",
    "acting": "magenta",
    "resting": "cyan",
    "held": "yellow",
    "unknown": "yellow",
}
_KINDS = {"reset": "green", "refusal": "yellow", "incident": "red", "mark": "cyan", "policy": "magenta"}
_OLD_SECONDS = 15.0
# A chart's full height is at least this share of the device, so that noise looks like noise.
_MIN_RANGE = 0.01
_FEW_EVENTS, _MANY_EVENTS = 3, 20
_PROBLEM_LINES, _VERDICT_LINES = 3, 10
# Less is shown as no change: in GiB it would read 0.00.
_VISIBLE_BYTES = GIB / 200
_HELP = (
    "bars     each letter or colour is a part of the memory, dots are free; the line is where a rule acts",
    "ranks    the worst off first, equal ones in one row; s sorts them by number",
    "parts    of the rank that is worst off; all sparklines have one scale, so that what moves most stands out",
    "chart    what is used over 15 minutes; a mark below it is a time when memory was given back",
    "keys     1 all, 2 ranks, 3 parts, 4 policy, 5 events, s sort, ? this page, q or Ctrl-C leaves",
)

_Span: TypeAlias = tuple[float, float]
_Lines: TypeAlias = list[list[Segment]]
_left: Final = partial(Column, no_wrap=True, overflow="ellipsis")
_right: Final = partial(_left, justify="right")
_text: Final = partial(Text, no_wrap=True, overflow="ellipsis")
_row: Final = partial(Text.assemble, no_wrap=True, overflow="ellipsis")


@dataclass(frozen=True, slots=True)
class Look:
    """What somebody chose to see, by keys."""

    shown: str = "1"
    by_number: bool = False

    def after(self, key: str) -> Look:
        if key == "s":
            return replace(self, by_number=not self.by_number)
        if key == "?" and self.shown == key:
            return replace(self, shown="1")
        return replace(self, shown=key) if key in "12345?" else self


@dataclass(frozen=True, slots=True)
class Drawing:
    """One view on one terminal, at a time in monotonic seconds; without a height it is drawn whole.

    The height is not taken from the options: rich passes none on to what stands within its alternate screen.
    """

    view: View
    now: float
    look: Look = Look()
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height, options = self.height, options.reset_height()
        sections = _Sections(self.view, self.now, console, options, self.look)

        def lines(section: RenderableType) -> _Lines:
            return console.render_lines(section, options, pad=False)

        verdict = lines(sections.verdict())[:_VERDICT_LINES]
        problems = [line for problem in sections.problems() for line in lines(problem)[:_PROBLEM_LINES]]
        head = [*lines(sections.head()), *verdict, *problems]
        if height is None:
            whole = (sections.ranks(None), sections.components(), sections.load(), sections.policy())
            drawn = [*head, *(line for section in whole for line in lines(section))]
            drawn += lines(sections.events(_MANY_EVENTS))
        else:
            room = height - len(head) - 1
            body = _body(sections, lines, room, self.look.shown)[: max(room, 0)]
            blank: _Lines = [[] for _ in range(room - len(body))]
            drawn = [*head, *body, *blank][: height - 1] + lines(sections.keys())[:1]
        for line in drawn:
            yield from line
            yield Segment.line()


def _body(sections: _Sections, lines: Callable[[RenderableType], _Lines], room: int, shown: str) -> _Lines:
    """Return what stands between head and keys, in about so many lines."""
    if shown == "?":
        return lines(Text("\n".join(_HELP)))
    if shown == "2":
        return lines(sections.ranks(room))
    components, policy = lines(sections.components()), lines(sections.policy())
    if shown == "3":
        return [*components, *lines(sections.chart(room - len(components) - 2))]
    if shown == "4":
        return policy
    if shown == "5":
        return lines(sections.events(room - 1))
    load = lines(sections.load())
    room -= len(load)
    parts = len(components) if room >= len(components) + 3 else 0
    # A few rules are shown where that leaves at least three ranks.
    rules = min(len(policy), 3) if room - parts >= 7 else 0  # noqa: PLR2004 - see above
    ranks = lines(sections.ranks(max(room - parts - rules, 2)))
    components = components if room >= len(ranks) + len(components) else []
    room -= len(ranks) + len(components)
    policy = policy[: max(room, 0)]
    room -= len(policy)
    few = len(lines(sections.events(_FEW_EVENTS)))
    chart = lines(sections.chart(room - few - 2))
    events = lines(sections.events(room - len(chart) - 1))
    return [*ranks, *components, *load, *chart, *policy, *events]


class _Sections:
    def __init__(self, view: View, now: float, console: Console, options: ConsoleOptions, look: Look) -> None:
        self.view, self.now, self.console, self.options, self.look = view, now, console, options, look
        self.report, self.glyphs = view.report, glyphs_of(options)
        # Room for more columns, and for columns that follow from others.
        self.is_wide, self.is_wider = options.max_width >= _WIDE, options.max_width >= _WIDER

    # --- the head ---

    def head(self) -> Table:
        engine = self.report.engine
        if self.view.problem is None:
            state = Text(f"{self.glyphs.dot} {engine.state_text}", _LEVELS[engine.traits.level])
        else:
            state = Text(f"NO SIDECAR, was {engine.state_text}", "bold red")
        age = self.view.age_seconds(self.now)
        read = Text("never read" if age is None else f"read {span_text(age)} ago", _DIM)
        if self.report.stale or age is None:
            read.append("  STALE", "bold red")
        elif age > _OLD_SECONDS:
            read.append("  old", "yellow")
        grid = _grid(_left(ratio=1), _right())
        version = f"  vLLM {engine.version or '(version unknown)'} "
        grid.add_row(_row(("highwater", "bold"), version, (engine.model or "", "bold")), state)
        grid.add_row(Text(self.view.url, _DIM), read)
        return grid

    def verdict(self) -> Text:
        verdict = self.report.verdict
        style = _EXITS.get(verdict.exit_status, "") if self.view.problem is None else _DIM
        text = Text.assemble((f"{self.glyphs.bar}{headline(self.report)}", style))
        facts = {"grew": verdict.grew, "next": verdict.next}
        if verdict.exit_status != OK:
            facts |= {"do": verdict.do.text if verdict.do else None, "step": verdict.step}
        for name, fact in facts.items():
            text.append("" if fact is None else f"\n{self.glyphs.bar}{name}: {fact}", "" if style != _DIM else _DIM)
        return text

    def keys(self) -> Text:
        names = {"1": "all", "2": "ranks", "3": "parts", "4": "policy", "5": "events"}
        parts = [(f"{key} {name}  ", "bold reverse" if key == self.look.shown else _DIM) for key, name in names.items()]
        order = "by number" if self.look.by_number else "worst off"
        return _row(("q quit  ? help  ", _DIM), *parts, (f"s sort: {order}", _DIM))

    def problems(self) -> Iterator[Text]:
        if self.view.problem is not None:
            silent = span_text(self.now - (self.view.lost_at or self.now))
            yield Text(f"! no news for {silent}, trying again: {self.view.problem}", "bold red")

    # --- ranks ---

    def ranks(self, most: int | None) -> Group:
        """Return a bar for each rank, equal ones in one; of too many for ``most`` lines the worst off."""
        report, missing = self.report, self.report.ranks_missing
        alike: dict[object, list[RankReading]] = {}
        for rank in report.ranks if self.look.by_number else report.worst_first:
            pressure = report.pressure_of(rank)
            sizes = (rank.total_bytes, rank.used_bytes, *(getattr(rank.components, part.name) for part in COMPONENTS))
            seen = tuple(None if size is None else round(size / (GIB / 10)) for size in sizes)
            is_short = pressure is not None and bool(pressure.short_bytes)
            alike.setdefault((seen, rank.host, is_short, report.high_water_of(rank)), []).append(rank)
        rows = list(alike.values())
        count = len(rows) + len(missing)
        if most is not None and count > most - 1:
            room = max(most - 2, 1)
            missing = missing[: max(room - 1, 0)]
            rows = rows[: max(room - len(missing), 1)]
        shown = sum(map(len, rows))
        grid = _grid(_left(), _left(ratio=1), *(_right() for _ in range(2 + self.is_wide + self.is_wider)))
        for row in rows:
            rank, pressure = row[0], report.pressure_of(row[0])
            style = "bold red" if pressure is not None and pressure.short_bytes else ""
            name = self._rank_name(rank) if len(row) == 1 else names_text([one.label for one in row])
            parts_used = [getattr(rank.components, component.name) for component in COMPONENTS]
            bar = StackedBar(parts_used, _whole(rank), report.high_water_of(rank))
            cells = [share_text(rank.used_ratio), gib_text(rank.used_bytes)]
            cells += [f"of {gib_text(rank.total_bytes)}"] if self.is_wide else []
            cells += [f"{gib_text(rank.free_bytes)} free"] if self.is_wider else []
            grid.add_row(name, bar, *(Text(cell, style) for cell in cells))
        pressures = (report.pressure_of(rank) for rank in report.ranks)
        waters = sorted(one.high_free_bytes for one in pressures if one is not None and one.high_free_bytes is not None)
        span = " to ".join(dict.fromkeys(map(gib_text, (waters[0], waters[-1])))) if waters else ""
        expected = UNKNOWN if report.ranks_expected is None else report.ranks_expected
        parts: list[RenderableType] = [
            self._title(
                f"ranks {report.ranks_reported} of {expected}",
                f"{self.glyphs.mark} acts at {span} free" if waters else "",
            ),
            grid,
        ]
        for gone in missing:
            had = "" if gone.used_bytes is None else f", had {gib_text(gone.used_bytes)} in use"
            place = f"dp {gone.dp_rank} pp {gone.pp_rank} tp {gone.tp_rank}"
            parts.append(_text(f"{place} is missing: {gone.status}{had}", "bold red"))
        if left_out := len(report.ranks) + len(report.ranks_missing) - shown - len(missing):
            which = "" if self.look.by_number else ", better off"
            parts.append(_text(f"  and {left_out} more{which}", _DIM))
        if not report.ranks:
            parts.append(_text("  no reading of any worker yet", _DIM))
        return Group(*parts)

    def _rank_name(self, rank: RankReading) -> str:
        others = self.report.ranks
        parts = [rank.label]
        if self.is_wide:
            parts.append(device_title(rank.device))
        if self.is_wide and len({other.host for other in others}) > 1:
            parts.append((rank.host or "")[:16])
        return " ".join(parts)

    # --- components ---

    def components(self) -> Group:
        ranks = self.report.worst_first
        if not ranks:
            return Group()
        rank, span = ranks[0], self._span(ranks[0])
        knowns = (self._known(rank, component.name, span) for component in COMPONENTS)
        scale = max((max(known, default=0.0) - min(known, default=0.0) for known in knowns), default=0.0)
        grid = _grid(_left(), _left(), _right(), _right(), _left(ratio=1), _right())
        for index, component in enumerate(COMPONENTS):
            size: int | None = getattr(rank.components, component.name)
            share = size / rank.used_bytes if size is not None and rank.used_bytes else None
            cells = (component.title, UNKNOWN if size is None else f"{gib(size)} GiB", share_text(share))
            graph: RenderableType = ""
            change, known = Text(""), self._known(rank, component.name, span)
            if span is not None and known:
                grown = known[-1] - known[0]
                is_change = abs(grown) >= _VISIBLE_BYTES
                style = component.terminal if is_change else _DIM
                graph = self._area(rank, component.name, span, style=style, scale=scale)
                change = Text(f"{gib(grown, signed=True)} GiB" if is_change else "=", "" if is_change else _DIM)
            legend = component_cell(self.console, self.options, index)
            grid.add_row(legend, *(Text(cell, "" if size else _DIM) for cell in cells), graph, change)
        which = f"rank {self._rank_name(rank)}{', the worst off' if len(ranks) > 1 else ''}"
        return Group(self._title(which, "" if span is None else f"change in {span_text(span[1] - span[0])}"), grid)

    def _known(self, rank: RankReading, name: str, span: _Span | None) -> list[float]:
        if span is None or getattr(rank.components, name) is None:
            return []
        return [value for at, value in self.view.points(rank, name) if value is not None and at >= span[0]]

    def _span(self, rank: RankReading) -> _Span | None:
        points = self.view.points(rank, "used_bytes")
        if len(points) < 2:  # noqa: PLR2004 - one point has no past
            return None
        until = points[-1][0]
        return max(points[0][0], until - HISTORY_SECONDS), until

    def _area(
        self, rank: RankReading, name: str, span: _Span, *, style: str, height: int = 1, scale: float = 0.0
    ) -> AreaChart:
        least = max(_MIN_RANGE * _whole(rank), scale)
        return AreaChart(self.view.points(rank, name), *span, least_range=least, height=height, style=style)

    # --- load, chart ---

    def load(self) -> Table:
        grid = _grid(_left(style=_DIM), _left(ratio=1))
        growth, progress = self.report.growth, self.report.progress
        facts = engine_facts(self.report)
        if progress is None or progress.verdict != "stuck":
            facts.pop("progress", None)
        for name, fact in facts.items():
            line = _text(fact, "bold red" if name == "progress" else "")
            soon = growth.seconds_to_full is not None and growth.seconds_to_full < SOON_SECONDS
            line.highlight_regex(r"(high water|full) in [^,]*", "bold red" if soon else "yellow")
            grid.add_row(name, line)
        return grid

    def chart(self, height: int) -> Group:
        ranks = self.report.worst_first
        span = self._span(ranks[0]) if ranks else None
        if height < 2 or span is None or not self.is_wide:  # noqa: PLR2004 - a chart of one line is a sparkline
            return Group()
        area = self._area(ranks[0], "used_bytes", span, style="cyan", height=height)
        low, high = map(gib_text, map(round, area.bounds))
        grid = _grid(_right(style=_DIM), _left(ratio=1))
        grid.add_row(high + "\n" * (height - 1) + low, area)
        resets = [event.at for event in self.view.events if event.kind == "reset"]
        grid.add_row("", Marks(resets, *span))
        return Group(
            self._title(f"used, rank {self._rank_name(ranks[0])}", f"last {span_text(span[1] - span[0])}"), grid
        )

    # --- policy, events ---

    def policy(self) -> Group:
        policy = self.report.policy
        if policy is None:
            return Group()
        actions = f"{policy.actions_last_hour} action{'' if policy.actions_last_hour == 1 else 's'} in the last hour"
        acts = "" if policy.shown_level in ("held", "unknown") else ", acts"
        mode = acts if policy.mode == "act" else ", only watches"
        several = len(policy.rules) > 1
        rules = []
        for rule in policy.rules:
            # On a narrow terminal what a rule has matters more than where it stops.
            waters = waters_text(rule) if self.is_wide else waters_text(rule).split(",")[0]
            row = _row(
                (f"{WORDS[rule.phase]:<12}", _PHASES[rule.phase]),
                f"{rule.name}: " if rule.name != rule.signal else "",
                f"{signal_title(rule.signal)} ",
                (signal_text(rule.signal, rule.value), "bold"),
                (f"  {waters}" if waters else "", _DIM),
                (f"  cooldown until {_clock(rule.rest_until)}" if rule.rest_until is not None else "", "cyan"),
            )
            rules.append(row)
        return Group(
            self._title(f"policy: {WORDS[policy.shown_level]}{mode}", actions),
            # Without room for all lines, the rules come first.
            *rules,
            *(
                Text(f"  ! {f'{rule.name}: ' if several else ''}{rule.reason}", _PHASES[rule.phase])
                for rule in policy.rules
                if rule.reason
            ),
            *([] if policy.rules else [_text("  no rules: memory is given back only on request", _DIM)]),
        )

    def events(self, most: int) -> Group:
        if most < 1 or not self.view.events:
            return Group()
        lines = []
        for event in self.view.events[:most]:
            failed = event.result is not None and event.result.outcome in ("failed", "refused")
            style = "yellow" if failed else _KINDS.get(event.kind, "")
            lines.append(_row((f"{_clock(event.at)} ", _DIM), (f"{event.kind:<9}", style), event.summary))
        return Group(self._title("events"), *lines)

    @staticmethod
    def _title(left: str, right: str = "") -> RenderableType:
        rule = Rule(Text(left, "bold"), align="left", style=_DIM)
        if not right:
            return rule
        grid = _grid(_left(ratio=1), _right(style=_DIM))
        grid.add_row(rule, right)
        return grid


def _whole(rank: RankReading) -> float:
    return float(rank.total_bytes or rank.used_bytes or 1)


def _grid(*columns: Column) -> Table:
    return Table.grid(*columns, padding=(0, 1), expand=True)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))

"""A view as lines of text for a terminal of any size. Asks nobody, reads no clock.

Sections are drawn whole where there is room, and give way from the least urgent one on: events, the chart, the rules,
the components, ranks that are not full.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from highwater.accounting.outlook import can_give, fullest, mark_of, pressure_of, seconds_to_high_water, short_ranks
from highwater.commands.top.bars import PARTS, Pen, binned
from highwater.commands.top.view import HISTORY_SECONDS, View
from highwater.readings import Event, MissingRank, RankPressure, RankReading, Report, RuleStatus
from highwater.text.table import component_title, device_title, signal_text, waters_text
from highwater.units import UNKNOWN, share_text, size_text, span_text

NARROWEST = 40
_WIDE = 76
_WIDER = 110
_DIM = "bright_black"
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
# A sparkline's full height is at least this share of the device, so that noise looks like noise.
_LEAST_RANGE = 0.01
_GAP_SECONDS = 20.0
_SOON_SECONDS = 3600.0
_CHART_LINES = 6
_EVENTS_FIRST = 3
_RANKS_TOLD = 4


@dataclass(frozen=True, slots=True)
class Drawing:
    """One view on one terminal.

    Attributes:
        view: What is known.
        now: By our own clock that only goes forward, in seconds.
        pen: How this terminal can be drawn on.
        width: In cells.
        height: In lines; None: as many as it takes.
    """

    view: View
    now: float
    pen: Pen
    width: int
    height: int | None = None

    @property
    def report(self) -> Report:
        """The last report."""
        return self.view.report

    def lines(self) -> list[Text]:
        """Everything, as lines that fit the width."""
        head = [*self._head(), *self._problems()]
        load = self._load()
        sections = [self._ranks(None), self._components(), self._policy(), self._events(20)]
        if self.height is not None:
            sections = self._fitting(self.height - len(head) - len(load))
        ranks, components, *others = sections
        lines = [*head, *ranks, *components, *load, *(line for section in others for line in section)]
        for line in lines:
            line.truncate(self.width, overflow="ellipsis")
        return lines if self.height is None else lines[: self.height]

    def _fitting(self, room: int) -> list[list[Text]]:
        """Ranks, components, policy, chart and events in ``room`` lines: the first come first."""
        components, policy = self._components(), self._policy()
        others = len(components) if room >= len(components) + 3 else 0
        # A few rules stand beside the ranks where that leaves at least three of these.
        rules = min(len(policy), 3) if room - others >= 7 else 0  # noqa: PLR2004
        ranks = self._ranks(max(room - others - rules, 2))
        room -= len(ranks)
        components = components if room >= len(components) else []
        room -= len(components)
        few = self._events(_EVENTS_FIRST)
        policy = policy[: max(room, 0)]
        room -= len(policy)
        chart = self._chart(min(room - len(few) - 2, _CHART_LINES)) if self.width >= _WIDE else []
        room -= len(chart)
        return [ranks, components, chart, policy, self._events(room - 1)]

    # --- the head ---

    def _head(self) -> list[Text]:
        engine = self.report.engine
        left = Text().append("highwater", "bold").append(f"  vLLM {engine.version or '(version unknown)'}")
        left.append(f" {engine.model or ''}", "bold")
        if self.view.problem is None:
            right = Text(f"{self.pen.glyphs.dot} {engine.state}", _LEVELS[engine.traits.level])
        else:
            right = Text(f"NO SIDECAR, was {engine.state}", "bold red")
        return [_ends(left, right, self.width), self._second_line()]

    def _second_line(self) -> Text:
        left = Text(self.view.url, _DIM)
        age = self.view.age_seconds(self.now)
        right = Text()
        if self.report.policy is not None:
            right.append("policy ", _DIM).append(self.report.policy.level, _PHASES[self.report.policy.level])
            right.append(", ", _DIM)
        right.append("never read" if age is None else f"read {span_text(age)} ago", _DIM)
        if self.report.stale or age is None:
            right.append("  STALE", "bold red")
        elif age > _OLD_SECONDS:
            right.append("  old", "yellow")
        return _ends(left, right, self.width)

    def _problems(self) -> list[Text]:
        lines = []
        if self.view.problem is not None:
            gone = span_text(self.now - (self.view.lost_at or self.now))
            lines += _wrapped(f"! no news for {gone}, trying again: {self.view.problem}", self.width, 2, "bold red")
        if self.report.engine.hint:
            colour = "bold red" if self.report.engine.traits.level == "bad" else "yellow"
            lines += _wrapped(f"! {self.report.engine.hint}", self.width, 3, colour)
        return lines

    # --- ranks ---

    def _ranks(self, most: int | None) -> list[Text]:
        """A title and a bar for each rank; of more than there is room for, those with the highest use."""
        report = self.report
        waters = self._high_waters()
        right = f"{self.pen.glyphs.mark} high water {waters}" if waters else ""
        expected = UNKNOWN if report.ranks_expected is None else str(report.ranks_expected)
        lines = [self._title(f"ranks {report.ranks_reported} of {expected}", right)]
        shown: Sequence[RankReading] = report.ranks
        missing: Sequence[MissingRank] = report.ranks_missing
        left_out = 0
        if most is not None and len(shown) + len(missing) > most - 1:
            room = max(most - 2, 1)
            missing = missing[: max(room - 1, 0)]
            chosen = set(map(id, fullest(report.ranks)[: max(room - len(missing), 1)]))
            shown = [rank for rank in report.ranks if id(rank) in chosen]
            left_out = len(report.ranks) + len(report.ranks_missing) - len(shown) - len(missing)
        names = [self._rank_name(rank) for rank in shown]
        most_name = max(map(len, names), default=0)
        lines += [self._rank_line(rank, name.ljust(most_name)) for rank, name in zip(shown, names, strict=True)]
        lines += [_missing_line(rank) for rank in missing]
        if left_out:
            lines.append(Text(f"  and {left_out} more, with less in use", _DIM))
        if not report.ranks:
            lines.append(Text("  no reading of any worker yet", _DIM))
        return lines

    def _high_waters(self) -> str:
        """With how much free the policy acts, on all ranks."""
        pressures = (pressure_of(self.report, rank) for rank in self.report.ranks)
        sizes = sorted(
            {size_text(one.high_free_bytes): one.high_free_bytes or 0 for one in pressures if one}.items(),
            key=lambda pair: pair[1],
        )
        return f"{' to '.join(dict.fromkeys((sizes[0][0], sizes[-1][0])))} free" if sizes else ""

    def _rank_name(self, rank: RankReading) -> str:
        number = UNKNOWN if rank.rank is None else str(rank.rank)
        several_engines = any(other.dp_rank for other in self.report.ranks)
        several_hosts = len({other.host for other in self.report.ranks}) > 1
        parts = [f"{rank.dp_rank or 0}.{number}" if several_engines else number]
        if self.width >= _WIDE:
            parts.append(device_title(rank.device))
        if several_hosts and self.width >= _WIDE:
            parts.append((rank.host or "")[:16])
        return " ".join(parts)

    def _rank_line(self, rank: RankReading, name: str) -> Text:
        ratio, pressure = rank.used_ratio, pressure_of(self.report, rank)
        if self.width >= _WIDE:
            numbers = f" {share_text(ratio):>7} {size_text(rank.used_bytes):>10} of {size_text(rank.total_bytes):>10}"
        else:
            numbers = f" {share_text(ratio):>7} {size_text(rank.used_bytes):>10}"
        if self.width >= _WIDER:
            numbers += f" {size_text(rank.free_bytes):>10} free"
        total = float(rank.total_bytes or rank.used_bytes or 1)
        marked = mark_of(self.report, rank)
        sizes = [getattr(rank.components, part) for part, _, _ in PARTS]
        line = Text(f"{name} ")
        line.append_text(self.pen.stacked(sizes, total, max(self.width - len(name) - len(numbers) - 1, 4), marked))
        line.append(numbers, "bold red" if pressure is not None and pressure.short_bytes else "")
        return line

    # --- components ---

    def _components(self) -> list[Text]:
        """Return what holds the memory of the fullest rank, and how that moved."""
        ranks = fullest(self.report.ranks)
        if not ranks:
            return []
        rank = ranks[0]
        span = self._span(rank)
        which = f"rank {self._rank_name(rank)}" + (", the fullest" if len(ranks) > 1 else "")
        right = "" if span is None else f"change in {span_text(span[1] - span[0])}"
        lines = [self._title(which, right)]
        lines += [self._component(rank, index, span) for index in range(len(PARTS))]
        return lines

    def _component(self, rank: RankReading, index: int, span: tuple[float, float] | None) -> Text:
        name, _, colour = PARTS[index]
        size: int | None = getattr(rank.components, name)
        share = size / rank.used_bytes if size is not None and rank.used_bytes else None
        line = Text().append_text(self.pen.legend(index))
        line.append(f" {component_title(name):<17}", "" if size else _DIM)
        line.append(f"{size_text(size):>10} {share_text(share):>7}", "" if size else _DIM)
        change = f" {'' if size is None else self._change(rank, name, span):>11}"
        width = self.width - len(line) - len(change) - 2
        if span is not None and size is not None and width > 0:
            values = binned(self.view.points(rank, name), *span, width, gap_seconds=_GAP_SECONDS)
            least = _LEAST_RANGE * float(rank.total_bytes or rank.used_bytes or 1)
            style = _DIM if change.endswith("=") else colour
            line.append("  ")
            line.append_text(self.pen.spark(values, width, least_range=least, style=style))
        else:
            line.append(" " * max(width + 2, 0))
        line.append(change, _DIM if change.endswith("=") else "")
        return line

    def _span(self, rank: RankReading) -> tuple[float, float] | None:
        """Return from when to when the rank's past is known, a quarter of an hour at most."""
        points = self.view.points(rank, "used_bytes")
        if len(points) < 2:  # noqa: PLR2004 - one point has no past
            return None
        until = points[-1][0]
        return max(points[0][0], until - HISTORY_SECONDS), until

    def _change(self, rank: RankReading, name: str, span: tuple[float, float] | None) -> str:
        if span is None:
            return ""
        known = [value for at, value in self.view.points(rank, name) if value is not None and at >= span[0]]
        return size_text(known[-1] - known[0], signed=True) if len(known) > 1 and known[-1] != known[0] else "="

    # --- load ---

    def _load(self) -> list[Text]:
        facts = [self._growth(), self._requests(), self._encoder_cache()]
        return [line for line in facts if line is not None]

    def _growth(self) -> Text | None:
        growth = self.report.growth
        if growth.since_ready_bytes is None:
            return None
        line = _fact("growth", f"{size_text(growth.since_ready_bytes, signed=True)} since ready")
        if growth.bytes_per_second is not None:
            line.append(f", {size_text(growth.bytes_per_second, signed=True)}/s")
        for what, left in (("high water", seconds_to_high_water(self.report)), ("full", growth.seconds_to_full)):
            if left is not None and (what == "full" or self.width >= _WIDE):
                line.append(f", {what} in {span_text(left)}", "bold red" if left < _SOON_SECONDS else "yellow")
        return line

    def _requests(self) -> Text | None:
        engine = self.report.engine
        if engine.requests_running is None:
            return None
        waiting = engine.requests_waiting or 0
        line = _fact("requests", f"{engine.requests_running} running, {waiting} waiting")
        if engine.kv_cache_usage_ratio is not None:
            line.append(f", KV cache {share_text(engine.kv_cache_usage_ratio)} used")
        progress = self.report.progress
        if progress is not None:
            line.append(f", {progress.verdict}", "bold red" if progress.verdict == "stuck" else "")
        return line

    def _encoder_cache(self) -> Text | None:
        cache = self.report.encoder_cache
        if cache is None:
            return None
        line = _fact("encoder cache", f"{cache.entries} entries, {size_text(cache.device_bytes)} on devices")
        if cache.host_bytes:
            line.append(f", {size_text(cache.host_bytes)} on the host")
        if cache.oldest_age_seconds is not None:
            line.append(f", oldest {span_text(cache.oldest_age_seconds)}")
        if cache.spills or cache.restores:
            line.append(f", {cache.spills} moved out, {cache.restores} back")
        return line

    # --- chart, policy, events ---

    def _chart(self, height: int) -> list[Text]:
        """Used bytes of the fullest rank over time, with the resets beneath."""
        ranks = fullest(self.report.ranks)
        span = self._span(ranks[0]) if ranks else None
        if height < 2 or span is None:  # noqa: PLR2004 - a chart of one line is a sparkline
            return []
        rank = ranks[0]
        points = [(at, value) for at, value in self.view.points(rank, "used_bytes") if at >= span[0]]
        known = [value for _, value in points if value is not None]
        if not known:
            return []
        low, high = min(known), max(known)
        least = _LEAST_RANGE * float(rank.total_bytes or high or 1)
        low = max(min(low, high - least), 0.0)
        labels = [f"{size_text(high):>10} ", *[" " * 11] * (height - 2), f"{size_text(low):>10} "]
        width = self.width - 11
        values = binned(points, *span, width, gap_seconds=_GAP_SECONDS)
        area = self.pen.chart(values, width, height, low=low, high=high, style="cyan")
        lines = [self._title(f"used, rank {self._rank_name(rank)}", f"last {span_text(span[1] - span[0])}")]
        lines += [Text().append(label, _DIM).append_text(row) for label, row in zip(labels, area, strict=True)]
        return [*lines, self._resets_beneath(span, width)]

    def _resets_beneath(self, span: tuple[float, float], width: int) -> Text:
        cells = [" "] * width
        for event in self.view.events:
            if event.kind == "reset" and span[0] <= event.at <= span[1]:
                share = (event.at - span[0]) / ((span[1] - span[0]) or 1.0)
                cells[min(int(share * width), width - 1)] = self.pen.glyphs.reset
        shown = "".join(cells)
        return Text(" " * 11 + shown, "green") if shown.strip() else Text("")

    def _policy(self) -> list[Text]:
        policy = self.report.policy
        if policy is None:
            return []
        right = (
            f"{policy.actions_last_hour} {'action' if policy.actions_last_hour == 1 else 'actions'} in the last hour"
        )
        lines = [self._title(f"policy: {policy.level}, {_mode(policy.mode)}", right)]
        rules = [(self._rule(rule), self._details(rule)) for rule in policy.rules]
        # Where there is room for the rules alone, they are what is seen.
        lines += [line for line, _ in rules]
        lines += [line for _, details in rules for line in details]
        if not policy.rules:
            lines.append(Text("  no rules: nothing is given back unless asked for", _DIM))
        return lines

    def _rule(self, rule: RuleStatus) -> Text:
        line = Text().append(f"{rule.phase:<8}", _PHASES[rule.phase])
        line.append(f"{rule.name}: " if rule.name != rule.signal else "")
        # On a narrow terminal the numbers matter more than the signal's whole name.
        signal = rule.signal if self.width >= _WIDE else rule.signal.replace("device_", "").replace("_bytes", "")
        line.append(f"{signal} ")
        line.append(signal_text(rule.signal, rule.value), "bold")
        waters = waters_text(rule)
        if waters:
            line.append(f"  {waters if self.width >= _WIDE else waters.split(',')[0]}", _DIM)
        if rule.rest_until is not None:
            line.append(f"  cooldown until {_clock(rule.rest_until)}", "cyan")
        return line

    def _details(self, rule: RuleStatus) -> list[Text]:
        """Why the rule stands as it does, and on each rank that is short what is missing and what could be given."""
        name = f"{rule.name}: " if self.report.policy is not None and len(self.report.policy.rules) > 1 else ""
        lines = _wrapped(f"  ! {name}{rule.reason}", self.width, 2, _PHASES[rule.phase]) if rule.reason else []
        short = short_ranks(rule)
        lines += [_shortage(one) for one in short[:_RANKS_TOLD]]
        if len(short) > _RANKS_TOLD:
            lines.append(Text(f"    and {len(short) - _RANKS_TOLD} more ranks", _DIM))
        return lines

    def _events(self, most: int) -> list[Text]:
        """The newest first, at most so many beneath the title."""
        if most < 1 or not self.view.events:
            return []
        lines = [self._title("events", "")]
        return [*lines, *(_event_line(event) for event in self.view.events[:most])]

    def _title(self, left: str, right: str) -> Text:
        line = self.pen.glyphs.line
        title = Text().append(f"{line}{line} ", _DIM).append(left, "bold")
        tail = f" {right} {line}" if right else ""
        title.append(f" {line * max(self.width - len(title) - len(tail) - 1, 1)}", _DIM)
        return title.append(tail, _DIM)


def _ends(left: Text, right: Text, width: int) -> Text:
    """One line with something at each end; what is at the left gives way."""
    room = width - right.cell_len - 1
    left.truncate(max(room, 0), overflow="ellipsis", pad=True)
    return left.append(" ").append_text(right)


def _wrapped(text: str, width: int, most: int, style: str) -> list[Text]:
    """The text over at most so many lines."""
    lines: list[str] = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width and len(lines) < most:
            lines.append("  ")
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return [Text(line, style) for line in lines]


def _fact(name: str, text: str) -> Text:
    return Text().append(f"{name:<14}", _DIM).append(text)


def _shortage(one: RankPressure) -> Text:
    where = f"{one.dp_rank}.{one.rank}" if one.dp_rank else f"{one.rank}"
    line = Text(f"    rank {where}: {size_text(one.free_bytes)} free, {size_text(one.short_bytes)} missing; ")
    gains = ", ".join(f"{remedy} {size_text(size)}" for remedy, size in can_give([one]).items())
    if gains:
        return line.append(f"could give: {gains}")
    is_known = one.can_release_bytes is not None and one.can_trim_bytes is not None
    return line.append("nothing to give back" if is_known else "what could be given back is not known", "yellow")


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _mode(mode: str) -> str:
    return "acts" if mode == "act" else "only observes"


def _missing_line(rank: MissingRank) -> Text:
    where = f"dp {rank.dp_rank} pp {rank.pp_rank} tp {rank.tp_rank}"
    had = "" if rank.used_bytes is None else f", had {size_text(rank.used_bytes)} in use"
    return Text(f"{where} is missing: {rank.status}{had}", "bold red")


def _event_line(event: Event) -> Text:
    line = Text().append(f"{_clock(event.at)} ", _DIM)
    failed = event.result is not None and event.result.outcome in ("failed", "refused")
    line.append(f"{event.kind:<9}", "yellow" if failed else _KINDS.get(event.kind, ""))
    return line.append(event.summary)

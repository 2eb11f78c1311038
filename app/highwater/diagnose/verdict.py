"""The verdict: one state, one sentence with the figure that decides, what grew, the next act, and one thing to do.

It is made of what the report already says, and of nothing else: no reading, no clock. Every face shows it and judges
nothing itself. Only what is so now decides: an incident counts while the engine is down, and never after.

====================== =========================== =========== ============
engine                 memory is fine              short       very short
====================== =========================== =========== ============
ready, busy            ``fine``, ``keeps_up``: 0   ``short`` 1 2
slow, paused, sleeping ``slow`` ...: 1             the same 1  2
starting               ``starting``: 1             the same    the same
stuck, ..., gone       ``stuck``, ``silent``,      the same    the same
                       ``dead``: 2
nothing read           ``unknown``: 1              1           2
the policy cannot act  ``cannot_act``: 1           1           2
====================== =========================== =========== ============
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from highwater.engine.hints import stopped_text
from highwater.growth.words import leak_line, leaks
from highwater.model.components import BY_NAME, COMPONENT_NAMES
from highwater.model.growth import RankGrowth, SeriesGrowth
from highwater.model.policy import PolicyAct, PolicyStatus, RankPressure, RulePhase, RuleStatus
from highwater.model.rank import RankReading
from highwater.model.remedies import possible_bytes
from highwater.model.report import Report
from highwater.model.titles import missing_text
from highwater.model.units import HOUR_SECONDS, MIB, counted, gib_text, span_text
from highwater.process.exit_codes import ATTENTION, CRITICAL, OK

VerdictState: TypeAlias = Literal[
    "fine",
    "keeps_up",
    "short",
    "very_short",
    "slow",
    "paused",
    "sleeping",
    "starting",
    "stuck",
    "silent",
    "dead",
    "unknown",
    "cannot_act",
]
# Why it is in that state, for programs: the names of the tables in verdict.toml.
Reason: TypeAlias = Literal[
    "none",
    "relief",
    "growing",
    "releasable",
    "neighbour",
    "outside",
    "in_use",
    "observe",
    "leak",
    "host_memory",
    "slow",
    "paused",
    "sleeping",
    "loading",
    "start_failed",
    "unreachable",
    "hung",
    "starved",
    "no_answer",
    "stopped",
    "kernel_oom",
    "device_memory",
    "not_memory",
    "unknown",
    "not_read",
    "ranks_missing",
    "rule_held",
]
_STEPS: Final[Mapping[str, Mapping[str, str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_EXIT: Final[Mapping[VerdictState, int]] = {
    **dict.fromkeys(("fine", "keeps_up"), OK),
    **dict.fromkeys(("very_short", "stuck", "silent", "dead"), CRITICAL),
}
_OF_MEMORY: Final = frozenset[VerdictState]({"fine", "keeps_up", "short", "very_short"})

# Full within that time, or used up by a leak within a day: somebody should look now.
SOON_SECONDS, LEAK_SECONDS = HOUR_SECONDS, 24 * HOUR_SECONDS
# Less is not worth a click, and no growth worth a word.
NOTABLE_BYTES: Final = 256 * MIB
_RHYTHM: Final = 2
_PRESSING: Final[tuple[RulePhase, ...]] = ("calm", "held", "short", "urgent", "resting", "acting")
_WORDS: Final = 24  # of what others say, within a sentence
_MIXED_BYTES: Final = 1024 * MIB  # ranks that differ by more are not alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """What somebody can do now.

    Attributes:
        path: Where to send ``body``; with no body, the page that says how; ``None``: nothing that a sidecar can do.
        bytes: What that gives back, over all ranks.
    """

    text: str
    path: str | None = None
    body: Mapping[str, Any] | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``exit_status`` is that of `highwater status`; ``next`` is what happens by itself.

    Attributes:
        step: The first thing to look at or do in this very state, in one sentence; ``runbook``: its whole page.
    """

    state: VerdictState
    exit_status: int
    reason: Reason
    sentence: str
    grew: str | None = None
    next: str | None = None
    do: Deed | None = None
    step: str | None = None
    runbook: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedReport(Report):
    verdict: Verdict

    @classmethod
    def of(cls, report: Report) -> JudgedReport:
        return cls(**{field.name: getattr(report, field.name) for field in fields(Report)}, verdict=verdict(report))


class _Judged(NamedTuple):
    state: VerdictState
    reason: Reason
    sentence: str
    next: str | None = None
    do: Deed | None = None


def verdict(report: Report) -> Verdict:
    judged = next(found for rule in _IN_ORDER if (found := rule(report)) is not None)
    said, is_stopped = _STEPS[judged.reason], judged.reason == "stopped"
    page = f"docs/runbooks/{said['runbook']}.html" if "runbook" in said else None
    is_known = not report.stale and not report.engine.traits.is_absent
    deed = judged.do or (_reclaim(report) if judged.state in _OF_MEMORY and is_known else None)
    if deed is None and page is not None and judged.state not in ("fine", "keeps_up"):
        deed = Deed(text="What to do", path=page)
    return Verdict(
        state=judged.state,
        exit_status=ATTENTION if is_stopped else _EXIT.get(judged.state, ATTENTION),
        reason=judged.reason,
        sentence=judged.sentence,
        grew=_grew(report) if is_known else None,
        next=judged.next or (_next(report) if is_known else None),
        do=deed,
        step=said.get("step"),
        runbook=page,
    )


# --- the engine ---


def _ended(report: Report) -> _Judged | None:
    engine = report.engine
    clients = "Clients get 502 until it runs again. " if report.proxy is not None else ""
    by_itself = f"{clients}Highwater does not restart it."
    if engine.stopped_at is not None:
        return _Judged("dead", "stopped", f"The engine {stopped_text(engine.stopped_at)}.", by_itself)
    if engine.state != "gone":
        return None
    reasons: dict[str, tuple[Reason, str]] = {
        "killed_by_kernel": ("kernel_oom", "The kernel killed it for memory: its container was full."),
        "device_full": ("device_memory", "Device memory was full."),
        "not_short": ("not_memory", "Device memory was not short."),
        "unknown": ("unknown", "Whether memory was short is not known."),
    }
    incident = report.incident if report.incident is not None and report.incident.kind in ("died", "hung") else None
    reason, memory = reasons[incident.memory if incident is not None else "unknown"]
    # Without recorders a start that begins is not seen.
    again = "nobody has restarted it" if engine.is_loading is False else "no restart of it is seen"
    text = f"The engine has been dead{_for(report, engine.since)}, and {again}. {memory}"
    deed = None
    if incident is not None:
        deed = Deed(text="See why it ended", path=f"memory/incidents/{incident.id}")
    return _Judged("dead", reason, text, by_itself, deed)


def _hung(report: Report) -> _Judged | None:
    engine, progress = report.engine, report.progress
    if not engine.traits.is_hung:
        return None
    said = progress.summary if progress is not None and engine.state == "stuck" else engine.hint
    why = f": {_brief(said)}" if said else ""
    deed = (
        None if report.incident is None else Deed(text="See the stacks", path=f"memory/incidents/{report.incident.id}")
    )
    if engine.state == "not_answering":
        return _Judged(
            "silent", "no_answer", f"The engine has answered nothing{_for(report, engine.since)}{why}.", None, deed
        )
    is_starved = progress is not None and progress.is_starved
    what = "schedules nothing" if is_starved else "has hung"
    return _Judged(
        "stuck",
        "starved" if is_starved else "hung",
        f"The engine {what}{_for(report, engine.since)}{why}.",
        "It may go on by itself." if is_starved else "It will not go on by itself.",
        deed,
    )


def _starting(report: Report) -> _Judged | None:
    engine, failure = report.engine, report.start_failure
    if engine.state != "starting":
        return None
    took = engine.last_start_seconds
    last = f"; the last start took {span_text(took)}" if took is not None else ""
    since = engine.loading_since or engine.since
    so_far = f", {span_text(max(report.now - since, 0.0))} so far" if report.now is not None and since else ""
    loads = f"The engine is {engine.loading_phase or 'starting'}{so_far}{last}."
    deed = None if report.incident is None else Deed(text="See why", path=f"memory/incidents/{report.incident.id}")
    if failure is not None:
        again = f" {loads}" if engine.is_loading else " Nothing loads now."
        return _Judged("starting", "start_failed", f"{_capital(_brief(failure.summary))}.{again}", None, deed)
    if engine.is_loading:
        return _Judged("starting", "loading", loads, "Memory is judged once it is ready.", deed)
    hint = f" {_capital(_brief(engine.hint))}." if engine.hint else ""
    return _Judged("starting", "unreachable", f"The engine is starting{so_far}{last}.{hint}", None, deed)


def _late_or_held(report: Report) -> _Judged | None:
    """A slow, paused or sleeping engine: memory stands in its sentence."""
    engine, free = report.engine, _free(report)
    hint = f": {_brief(engine.hint)}" if engine.hint else ""
    memory = f" {free}." if free else ""
    if engine.state == "slow":
        return _Judged("slow", "slow", f"The engine answers late{hint}.{memory}")
    if engine.state == "paused":
        return _Judged("paused", "paused", f"The engine is paused: it accepts requests and runs none.{memory}")
    if engine.state == "sleeping":
        return _Judged("sleeping", "sleeping", f"The engine has been asleep{_for(report, engine.since)}.{memory}")
    if engine.starved:
        return _Judged("slow", "starved", f"{_capital(_brief(engine.starved[0]))}.{memory}")
    return None


# --- what is read ---


def _unread(report: Report) -> _Judged | None:
    check = Deed(text="What is missing", path="docs/runbooks/HighwaterReportStale.html")
    hint = report.engine.hint
    if report.are_workers_hidden and report.engine.traits.answers:
        text = "The workers cannot be read: no worker extension, no recorders."
        return _Judged("unknown", "not_read", text, _capital(hint) if hint else None, check)
    if not report.ranks:
        return _Judged(
            "unknown", "not_read", f"No worker has been read yet{f': {_brief(hint)}' if hint else ''}.", None, check
        )
    if report.stale:
        age = "" if report.age_seconds is None else f" for {span_text(report.age_seconds)}"
        then = f" {free}." if (free := _free(report)) else ""
        return _Judged(
            "unknown", "not_read", f"The workers have not been read{age}.{then}", "The policy does nothing.", check
        )
    return None


def _missing(report: Report) -> _Judged | None:
    missing = 0 if report.ranks_expected is None else report.ranks_expected - report.ranks_reported
    if missing <= 0:
        return None
    named = f" ({_brief(missing_text(report.ranks_missing))})" if report.ranks_missing else ""
    are = "is" if missing == 1 else "are"
    text = f"{missing} of {counted(report.ranks_expected or 0, 'rank')} {are} not read{named}. {_free(report) or ''}"
    return _Judged(
        "unknown",
        "ranks_missing",
        f"{text.strip().rstrip('.')}.",
        "No rule watches the memory of ranks that are not read.",
    )


def _held(report: Report) -> _Judged | None:
    rules = () if report.policy is None else report.policy.rules
    rule = next((one for one in rules if one.is_dormant), None)
    if rule is None:
        return None
    why, _, change = (rule.reason or "its signal is not known").partition(". ")
    deed = Deed(text=change.rstrip(".") or "What to change", path="docs/runbooks/HighwaterRuleHeld.html")
    text = f"Rule {rule.name} cannot act: {_brief(why.removeprefix(f'{rule.name}.'))}."
    return _Judged("cannot_act", "rule_held", text, "Nothing is given back by this rule.", deed)


# --- memory ---


def _very_short(report: Report) -> _Judged | None:
    is_so = report.policy is not None and report.policy.level == "urgent" and not report.stale
    return _short_of_memory(report, "very_short") if is_so else None


def _short(report: Report) -> _Judged | None:
    if report.policy is not None and report.policy.level == "short" and not _is_given_back(report):
        return _short_of_memory(report, "short")
    growth, worst, host = report.growth, _worst(report), report.host
    seconds = growth.seconds_to_full
    if seconds is not None and seconds <= SOON_SECONDS and worst is not None:
        filling = min(growth.ranks, key=lambda one: one.seconds_to_full or seconds + 1, default=None)
        rank = next((one for one in report.ranks if filling is not None and one.key == filling.key), worst)
        what = f": {_title(growth.component)} grows{_pace(filling)}" if growth.component is not None else ""
        return _Judged("short", "growing", f"{_has_free(report, rank)} and is full in {span_text(seconds)}{what}.")
    if host is not None and host.short is not None:
        deed = Deed(text="Where host memory is", path="memory/host?format=text")
        return _Judged("short", "host_memory", f"Host memory: {_brief(host.short)}.", None, deed)
    leak = _leak(report)
    if leak is not None and leak.exhausted_at is not None and report.now is not None:
        left = leak.exhausted_at - report.now
        if left < LEAK_SECONDS:
            deed = Deed(text="The rate and its cause", path="memory/growth?format=text")
            text = (
                f"{_brief(leak_line(leak).partition(', and at')[0])}; {leak.limit_by} is used up in {span_text(left)}."
            )
            return _Judged("short", "leak", text, None, deed)
    return None


def _short_of_memory(report: Report, state: VerdictState) -> _Judged:
    pressure = _pressed(report)
    rank = next((one for one in report.ranks if pressure is not None and one.key == pressure.key), _worst(report))
    short = f", {gib_text(pressure.short_bytes)} too little" if pressure is not None and pressure.short_bytes else ""
    free = _has_free(report, rank) if rank is not None else "Memory is short"
    outside, other = _outside(report, rank)
    policy, gain = report.policy, _possible(report)
    if outside >= max(NOTABLE_BYTES, 0 if pressure is None else pressure.short_bytes or 0):
        who = other or "another process, or a library"
        text = f"{free}{short}. Outside vLLM {gib_text(outside)} more is in use than at its start: {who}."
        return _Judged(state, "outside" if other is None else "neighbour", text)
    if policy is not None and policy.mode == "observe":
        return _Judged(state, "observe", f"{free}{short}, and Highwater only watches.")
    if gain >= NOTABLE_BYTES or (pressure is not None and gain >= (pressure.short_bytes or 1)):
        return _Judged(state, "releasable", f"{free}{short}; {gib_text(gain)} in all can be given back.")
    recent = report.growth.recent
    used = f": {_title(recent.component)} {_in_time(recent.bytes, recent.seconds)}" if recent is not None else ""
    return _Judged(state, "in_use", f"{free}{short}. It is in use{used}; nothing can be given back.")


def _kept_up(report: Report) -> _Judged | None:
    acts = _reliefs(report)
    if not _is_given_back(report) or not acts:
        return None
    spans = [later.at - earlier.at for later, earlier in pairwise(acts)]
    every = report.growth.refill_seconds or sum(spans) / len(spans)
    sizes = [act.freed_bytes for act in acts if act.freed_bytes]
    each = f", {gib_text(sum(sizes) / len(sizes))} each time" if sizes else ""
    text = f"{_free(report)}; it fills about every {span_text(every)} and is given back{each}."
    return _Judged("keeps_up", "relief", text)


def _fine(report: Report) -> _Judged:
    paces = [one.bytes_per_second for one in report.growth.ranks]
    free, seconds = _free(report), report.growth.seconds_to_full
    grows = "; nothing grows" if paces and all(pace == 0 for pace in paces) else ""
    grows = grows if seconds is None else f"; full in {span_text(seconds)} at this pace"
    last = next(iter(() if report.policy is None else report.policy.acts), None)
    acted = ""
    if last is not None and report.now is not None:
        gave = f" and gave back {gib_text(last.freed_bytes)}" if last.freed_bytes else ""
        acted = f" Highwater last acted {span_text(max(report.now - last.at, 0.0))} ago{gave}."
    busy = (
        f"The engine is busy: {_brief(report.engine.hint)}. "
        if report.engine.state == "busy" and report.engine.hint
        else ""
    )
    return _Judged(
        "fine",
        "none",
        f"{busy}{free}{grows}.{acted}" if free else f"{busy}The engine is ready; its free memory is not known.",
    )


_IN_ORDER: Final[tuple[Callable[[Report], _Judged | None], ...]] = (
    *(_ended, _hung, _starting, _very_short, _late_or_held, _unread),
    *(_short, _missing, _held, _kept_up, _fine),
)


# --- figures ---


def _worst(report: Report) -> RankReading | None:
    known = [rank for rank in report.ranks if rank.free_bytes is not None]
    return min(known, key=lambda rank: rank.free_bytes or 0, default=None)


def _pressed(report: Report) -> RankPressure | None:
    """Return the rank that is short of most, by whatever rule."""
    rules = () if report.policy is None else report.policy.rules
    short = [rank for rule in rules for rank in rule.short_ranks]
    return max(short, key=lambda rank: rank.short_bytes or 0, default=None)


def _reliefs(report: Report) -> list[PolicyAct]:
    """Return the reliefs of the last minutes that reached their water, newest first; none where they are too few."""
    acts = [] if report.policy is None else [act for act in report.policy.acts if act.reached]
    return acts if len(acts) >= _RHYTHM else []


def _is_given_back(report: Report) -> bool:
    """Return whether relief keeps up: it reached its water more than once, and nothing is in its way now."""
    if report.policy is None or not _reliefs(report):
        return False
    if report.policy.level not in ("short", "urgent"):
        return True
    short = [rule for rule in report.policy.rules if rule.phase in ("short", "urgent", "acting", "resting")]
    return all(rule.phase == "acting" or (rule.phase == "short" and _possible(report)) for rule in short)


def _possible(report: Report) -> int:
    return sum(rank.releasable_bytes or 0 for rank in report.ranks)


def _outside(report: Report, rank: RankReading | None) -> tuple[int, str | None]:
    """Return by how much what is outside PyTorch has grown on a rank since the engine was ready, and who holds it."""
    if rank is None or rank.device.type == "cpu":
        return 0, None
    growth = next((one for one in report.growth.ranks if one.key == rank.key), None)
    grown = None if growth is None or growth.grown is None else growth.grown.non_torch_bytes
    return grown or 0, rank.shared_with


def _leak(report: Report) -> SeriesGrowth | None:
    going_on = [one for one in leaks(report.growth.series) if not one.is_over]
    return min(going_on, key=lambda one: one.exhausted_at or float("inf"), default=None)


# --- words ---


def _free(report: Report) -> str | None:
    """Return what is free on the rank that has the least; ``None`` where nothing is known."""
    worst = _worst(report)
    if worst is None:
        return None
    had = "had" if report.stale else "has"
    sizes = [rank.free_bytes for rank in report.ranks if rank.free_bytes is not None]
    if len(report.ranks) > 1 and len(sizes) == len(report.ranks) and max(sizes) - min(sizes) < _MIXED_BYTES:
        return f"Each of {len(sizes)} ranks {had} at least {gib_text(min(sizes))} free of {gib_text(worst.total_bytes)}"
    if len(report.ranks) > 1:
        size = f"{gib_text(worst.free_bytes)} of {gib_text(worst.total_bytes)}"
        return f"{worst.name.capitalize()} of {len(report.ranks)} {had} the least free, {size}"
    return _has_free(report, worst)


def _has_free(report: Report, rank: RankReading) -> str:
    had = "had" if report.stale else "has"
    owner = "The host" if rank.device.type == "cpu" else "The device"
    name = rank.name.capitalize() if len(report.ranks) > 1 else owner
    return f"{name} {had} {gib_text(rank.free_bytes)} free of {gib_text(rank.total_bytes)}"


def _title(component: str) -> str:
    return BY_NAME[component].title


def _pace(growth: RankGrowth | None) -> str:
    pace = None if growth is None else growth.bytes_per_second
    return f" by {gib_text(pace)}/s" if pace else ""


def _in_time(size: int, seconds: float) -> str:
    return f"+{gib_text(size)} in {span_text(max(seconds, 1.0))}"


def _grew(report: Report) -> str | None:
    growth, worst = report.growth, _worst(report)
    parts = []
    if growth.recent is not None:
        recent = growth.recent
        of_rank = f" on {recent.name}" if len(report.ranks) > 1 else ""
        other = worst.shared_with if worst is not None else None
        is_outside = recent.component == "non_torch_bytes" and other is not None
        title = f"outside vLLM ({other})" if is_outside else _title(recent.component)
        parts.append(f"{title} {_in_time(recent.bytes, recent.seconds)}{of_rank}")
    elif (since := _grown_since_ready(report, worst)) is not None:
        parts.append(since)
    if (leak := _leak(report)) is not None:
        parts.append(leak_line(leak))
    return f"{_capital('; '.join(parts))}." if parts else None


def _grown_since_ready(report: Report, worst: RankReading | None) -> str | None:
    growth = next((one for one in report.growth.ranks if worst is not None and one.key == worst.key), None)
    if growth is None or growth.grown is None or worst is None:
        return None
    sizes = {name: getattr(growth.grown, name) or 0 for name in COMPONENT_NAMES}
    most, ready_at = max(sizes, key=lambda name: sizes[name]), report.growth.baseline_taken_at
    if sizes[most] < NOTABLE_BYTES:
        return None
    of_rank = f" on {worst.name}" if len(report.ranks) > 1 else ""
    ago = f" {span_text(report.now - ready_at)} ago" if report.now is not None and ready_at is not None else ""
    return f"{_title(most)} +{gib_text(sizes[most])}{of_rank} since it was ready{ago}"


def _next(report: Report) -> str | None:
    """Return what Highwater does by itself: now, or when memory is short."""
    policy, running = report.policy, report.relief
    if running is not None:
        return f"{_capital(running.text)}{f' ({running.why})' if running.why else ''}."
    if policy is None or policy.level == "unknown":
        return None
    if not policy.rules:
        return "Nothing is given back by itself: the policy has no rules."
    if policy.mode == "observe":
        return "Highwater only watches (mode observe)."
    rule = max(policy.rules, key=lambda one: _PRESSING.index(one.phase))
    if rule.phase != "calm":
        return f"{_rule_next(rule, report)}."
    return _next_when_short(report, policy)


def _next_when_short(report: Report, policy: PolicyStatus) -> str | None:
    refusals = [remedy.unavailable for one in policy.rules for remedy in one.remedies]
    if refusals and None not in refusals:
        return f"Highwater only watches: {_brief(str(refusals[0]))}."
    worst = _worst(report)
    pressure = None if worst is None else report.pressure_of(worst)
    if pressure is None or pressure.high_free_bytes is None:
        return None
    gain, at = _possible(report), gib_text(pressure.high_free_bytes)
    given = f"{gib_text(gain)}; no request waits" if gain >= NOTABLE_BYTES else "what it can"
    host = ""
    if report.host is not None and report.host.warnings and report.host.short is None:
        host = f" Host: {_brief(report.host.warnings[0])}."
    return f"At {at} free Highwater gives back {given}.{host}"


def _rule_next(rule: RuleStatus, report: Report) -> str:
    if rule.phase == "acting" and rule.reason:
        return _capital(_brief(rule.reason))
    if rule.phase == "held":
        return f"Nothing is given back by itself now: {_brief(rule.reason or 'its signal is not known')}"
    if rule.phase == "resting" and rule.rest_until is not None and report.now is not None:
        why = (rule.reason or "").rpartition("; ")[2]
        return f"Highwater tries again in {span_text(max(rule.rest_until - report.now, 0.0))}: {_brief(why)}"
    if _possible(report) >= NOTABLE_BYTES:
        return "Highwater gives it back now"
    why = (rule.reason or "").partition("; ")[2]
    is_new = bool(why) and not why.startswith("nothing here to give back")
    return f"Highwater acts as soon as there is something to give back{f': {_brief(why)}' if is_new else ''}"


def _reclaim(report: Report) -> Deed | None:
    """Return the call that gives most back without failing a request; ``None`` where none gives much."""
    engine = report.engine
    if not engine.traits.takes_remedies or not engine.capabilities.get("collective_rpc", True):
        return None
    for remedy in ("release", "trim_encoder_cache"):
        size = possible_bytes(remedy, [rank for rank in report.ranks if rank.device.type != "cpu"]) or 0
        is_certain = all(rank.trimmable_bytes is not None for rank in report.ranks) or remedy == "release"
        if size >= NOTABLE_BYTES and is_certain:
            body = {"remedies": [remedy], "mode": "safe"}
            return Deed(text=f"Reclaim {gib_text(size)} now", path="memory/reclaim", body=body, bytes=size)
    return None


def _for(report: Report, since: float | None) -> str:
    if since is None or report.now is None:
        return ""
    at = time.strftime("%H:%M:%S", time.localtime(since))
    return f" for {span_text(max(report.now - since, 0.0))} (since {at})"


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _brief(text: str) -> str:
    """Return the first clause of what another part says, without its full stop, cut to two dozen words."""
    words = text.partition("; ")[0].split()
    return " ".join(words[:_WORDS]).rstrip(".,:") + (" …" if len(words) > _WORDS else "")

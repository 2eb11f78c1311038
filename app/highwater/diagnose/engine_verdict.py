"""The verdict of an engine's own state and of what could not be read; and the parts of any verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from highwater.diagnose.finding import capital
from highwater.model.engine import missing_text
from highwater.model.policy import RuleStatus
from highwater.model.rank import RankReading
from highwater.model.report import Report
from highwater.model.units import MIB, counted, gib_text, span_text, whole_span_text
from highwater.watch.recorder.progress import command_to_continue
from highwater.watch.starts import restart_text, stopped_text

VerdictState: TypeAlias = Literal[
    "fine", "keeps_up", "short", "very_short", "slow", "paused", "sleeping", "starting", "stuck", "silent", "dead",
    "unknown", "cannot_act",
]  # fmt: skip
# Why it is in that state, for programs: the names of the tables in verdict.toml.
Reason: TypeAlias = Literal[
    "none", "relief", "grown_outside", "growing", "releasable", "neighbour", "outside", "in_use", "observe", "leak",
    "host_memory", "slow", "paused", "sleeping", "loading", "start_failed", "unreachable", "hung", "starved",
    "replica_starved", "no_answer", "stopped", "kernel_oom", "device_memory", "not_memory", "unknown", "not_read",
    "ranks_missing", "rule_held",
]  # fmt: skip
_WORDS: Final = 24  # of what others say, within a sentence
_MIXED_BYTES: Final = 1024 * MIB  # ranks that differ by more are not alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One thing to do now."""

    text: str
    # Where to send `body`; with no body, the page that says how; `None`: nothing that a sidecar can do.
    path: str | None = None
    body: Mapping[str, Any] | None = None
    bytes: int | None = None  # what that gives back, over all ranks


class Judged(NamedTuple):
    state: VerdictState
    reason: Reason
    sentence: str
    next: str | None = None
    do: Deed | None = None
    step: str | None = None  # in place of its reason's in verdict.toml


def lasting(report: Report, since: float | None) -> str:
    if since is None or report.now is None:
        return ""
    return f" for {whole_span_text(max(report.now - since, 0.0))}"


def brief(text: str) -> str:
    """Return the first clause of what another part says, without its full stop, of about two dozen words.

    Of a longer one what stands in parentheses goes first, and then what comes after a comma or a colon.
    """
    clause, bare, depth = "", "", 0  # `bare`: without what stands in parentheses, also in those that never close
    for place, letter in enumerate(text):
        if letter == "(":
            depth, bare = depth + 1, bare if depth else bare.rstrip()
        if not depth:
            if text.startswith("; ", place):
                break
            bare += letter
        if letter == ")":
            depth = max(depth - 1, 0)
        clause += letter
    if depth or len(clause.split()) > _WORDS:
        clause = bare
    words = clause.split()
    if len(words) <= _WORDS:
        return " ".join(words).rstrip(".,:")
    end = max((place for place, word in enumerate(words[:_WORDS], 1) if word[-1] in ",:"), default=_WORDS)
    return f"{' '.join(words[:end]).rstrip('.,:')} …"


def rules_of(report: Report) -> tuple[RuleStatus, ...]:
    return () if report.policy is None else report.policy.rules


# --- free memory ---


def worst_rank(report: Report) -> RankReading | None:
    return next((rank for rank in report.worst_first if rank.free_bytes is not None), None)


def free_text(report: Report) -> str | None:
    """Return what is free on the worst rank; ``None`` where nothing is known."""
    worst = worst_rank(report)
    if worst is None:
        return None
    had = "had" if report.stale else "has"
    sizes = [rank.free_bytes for rank in report.ranks if rank.free_bytes is not None]
    if len(report.ranks) > 1 and len(sizes) == len(report.ranks) and max(sizes) - min(sizes) < _MIXED_BYTES:
        return f"Each of {len(sizes)} ranks {had} at least {gib_text(min(sizes))} free of {gib_text(worst.total_bytes)}"
    if len(report.ranks) > 1:
        size = f"{gib_text(worst.free_bytes)} of {gib_text(worst.total_bytes)}"
        least = "the least free" if worst.free_bytes == min(sizes) else "too little free"
        return f"{worst.name.capitalize()} of {len(report.ranks)} {had} {least}, {size}"
    return has_free_text(report, worst)


def has_free_text(report: Report, rank: RankReading) -> str:
    had = "had" if report.stale else "has"
    owner = "The host" if rank.device.traits.is_host_memory else "The device"
    name = rank.name.capitalize() if max(len(report.ranks), report.ranks_expected or 0) > 1 else owner
    return f"{name} {had} {gib_text(rank.free_bytes)} free of {gib_text(rank.total_bytes)}"


# --- the engine ---


def ended(report: Report) -> Judged | None:
    engine = report.engine
    clients = "Clients get 502 until it runs again. " if report.proxy is not None else ""
    by_itself = f"{clients}Highwater does not restart it."
    if engine.stopped_at is not None:
        return Judged("dead", "stopped", f"The engine {stopped_text(engine.stopped_at)}.", by_itself)
    if engine.state != "gone":
        return None
    reasons: dict[str, tuple[Reason, str]] = {
        "killed_by_kernel": ("kernel_oom", "The kernel killed it for memory: its container was full."),
        "device_full": ("device_memory", "Device memory was full."),
        "not_short": ("not_memory", "Device memory was not short."),
        "had_room": (
            "unknown",
            "The device had room when it was last read; whether host memory was short is not known.",
        ),
        "unknown": ("unknown", "Whether memory was short is not known."),
    }
    deed = _incident_deed(report, "See why it ended", "died", "hung")
    reason, memory = reasons["unknown" if deed is None or report.incident is None else report.incident.memory]
    again = restart_text(engine.loading_process)
    text = f"The engine has been dead{lasting(report, engine.since)}, and {again}. {memory}"
    return Judged("dead", reason, text, by_itself, deed)


def _incident_deed(report: Report, text: str, *kinds: str) -> Deed | None:
    """Return the open incident's page; None if it is of another kind, and so not about this state."""
    incident = report.incident
    if incident is None or incident.kind not in kinds:
        return None
    return Deed(text=text, path=f"memory/incidents/{incident.id}")


def hung(report: Report) -> Judged | None:
    engine, progress = report.engine, report.progress
    if not engine.traits.is_hung:
        return None
    is_silent = engine.state == "not_answering"
    # Of one that is stuck the hint has the cause, and what the ranks show behind it.
    cause = (engine.hint or "").removeprefix("".join(f"{one}; " for one in engine.starved))
    said = cause if progress is None or (cause and not is_silent) else progress.summary
    why = f": {brief(said)}" if said else ""
    deed = _incident_deed(report, "See the stacks", "hung")
    if is_silent:
        return Judged(
            "silent", "no_answer", f"The engine has answered nothing{lasting(report, engine.since)}{why}.", None, deed
        )
    command = command_to_continue(cause)
    is_starved = command is None and progress is not None and progress.is_starved
    after = command and f"Run `{command}`, or detach the debugger; only if it still hangs then, restart the engine."
    what = "schedules nothing" if is_starved else "has hung"
    return Judged(
        "stuck",
        "starved" if is_starved else "hung",
        f"The engine {what}{lasting(report, engine.since)}{why}.",
        "It may go on by itself." if is_starved else "It will not go on by itself.",
        deed,
        after,
    )


def starting(report: Report) -> Judged | None:
    engine, failure = report.engine, report.start_failure
    if engine.state != "starting":
        return None
    took = engine.last_start_seconds
    last = f"; the last start took {span_text(took)}" if took is not None else ""
    is_seen, has_failed = engine.loading_since is not None, failure is not None or engine.ended_starts is not None
    since = engine.loading_since or (None if has_failed else engine.since)  # that may be of the start that failed
    so_far = f", {whole_span_text(max(report.now - since, 0.0))} so far" if report.now is not None and since else ""
    loads = f"The engine is {engine.loading_phase or 'starting'}{so_far}{last}."
    deed = _incident_deed(report, "See why", "start_failed")
    said = engine.ended_starts if failure is None else failure.summary
    if said is not None:
        again = loads if is_seen else "Nothing loads now." if engine.is_loading is False else "No new start is seen."
        return Judged("starting", "start_failed", f"{capital(brief(said))}. {again}", None, deed)
    # After one that ended it counts as starting only where that is seen; of a first one its process may be.
    if is_seen or engine.restarts:
        return Judged("starting", "loading", loads, "Memory is judged once it is ready.")
    nothing = capital(brief(engine.hint)) if engine.hint else f"Nothing answers at {engine.url}"
    return Judged("unknown", "unreachable", f"{nothing}; whether an engine starts is not known.")


def late_or_held(report: Report) -> Judged | None:
    """A slow, paused or sleeping engine: memory stands in its sentence."""
    engine, free = report.engine, free_text(report)
    hint = f": {brief(engine.hint)}" if engine.hint else ""
    memory = f" {free}." if free else ""
    if engine.state == "slow":
        return Judged("slow", "slow", f"The engine answers late{hint}.{memory}")
    if engine.state == "paused":
        return Judged("paused", "paused", f"The engine is paused: it accepts requests and runs none.{memory}")
    if engine.state == "sleeping":
        return Judged("sleeping", "sleeping", f"The engine has been asleep{lasting(report, engine.since)}.{memory}")
    if engine.starved:
        return Judged("slow", "replica_starved", f"{capital(brief(engine.starved[0]))}.{memory}")
    return None


# --- what is read ---


def unread(report: Report) -> Judged | None:
    check = Deed(text="What is missing", path="docs/runbooks/HighwaterMemoryUnknown.html")
    hint = report.engine.hint
    if report.are_workers_hidden and report.engine.traits.answers:
        text = "The workers cannot be read: no worker extension, no recorders."
        return Judged("unknown", "not_read", text, f"{capital(brief(hint))}." if hint else None, check)
    if not report.ranks:
        return Judged(
            "unknown", "not_read", f"No worker has been read yet{f': {brief(hint)}' if hint else ''}.", None, check
        )
    if report.stale:
        age = "" if report.age_seconds is None else f" for {whole_span_text(report.age_seconds)}"
        then = f" {free}." if (free := free_text(report)) else ""
        return Judged(
            "unknown", "not_read", f"The workers have not been read{age}.{then}", "The policy does nothing.", check
        )
    return None


def missing(report: Report) -> Judged | None:
    missing = 0 if report.ranks_expected is None else report.ranks_expected - report.ranks_reported
    if missing <= 0:
        return None
    named = f" ({brief(missing_text(report.ranks_missing))})" if report.ranks_missing else ""
    are = "is" if missing == 1 else "are"
    of = counted(report.ranks_expected or 0, "rank")
    text = f"{missing} of {of} {are} not read{named}. {free_text(report) or ''}"
    return Judged(
        "unknown",
        "ranks_missing",
        f"{text.strip().rstrip('.')}.",
        "No rule watches the memory of ranks that are not read.",
    )


def held(report: Report) -> Judged | None:
    rule = next((one for one in rules_of(report) if one.is_dormant), None)
    if rule is None:
        return None
    why, change = rule.reason or "its signal is not known", rule.change or ""
    deed = Deed(text=change or "What to change", path="docs/runbooks/HighwaterPolicyNotActing.html")
    text = f"Rule {rule.name} cannot act: {brief(why.removesuffix(change).removeprefix(f'{rule.name}.'))}."
    return Judged("cannot_act", "rule_held", text, "Nothing is given back by this rule.", deed)

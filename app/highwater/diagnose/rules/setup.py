"""The set-up of engine and sidecar: one question for each thing that can be wrong. Pure.

A question returns a finding with the change that would mend it, a sentence where all is as it should be, or ``None``
until the problem of another one is fixed. It ignores the load: that memory is short right now is reported by
``highwater status``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from highwater import __version__
from highwater.diagnose.case import Case, given
from highwater.diagnose.finding import Finding, Weight, finding, weightiest_first
from highwater.diagnose.rules import growth, host
from highwater.diagnose.verdict import verdict
from highwater.engine.capabilities import EVERY_RESET_SAFE_SINCE, EXTENSION, RESETS_SINCE, parse_version
from highwater.host.reading import NO_FILES
from highwater.model.engine import missing_text
from highwater.model.policy import WORDS, waters_text
from highwater.model.units import counted, size_text, span_text
from highwater.process.admin_token import is_loopback
from highwater.process.errors import ATTENTION, CRITICAL, OK
from kvplan.generations import NEWEST_KNOWN, NEWEST_TESTED, OLDEST_KNOWN, text_of

Level: TypeAlias = Literal["ok", "note", "warn", "fail", "skip"]

RESETS_ENCODER_CACHE: Final = parse_version(RESETS_SINCE["reset_encoder_cache"])
RECENT_SECONDS: Final = 3600.0
LEVELS: Final[Mapping[Weight, Level]] = {"likely": "fail", "clue": "warn", "note": "note"}
_UNTIL_FIXED: Final = "not known until the problem above is fixed"


class NotKnown(str):
    """What is not known, and why."""

    __slots__ = ()


Answer: TypeAlias = Finding | str | None


@dataclass(frozen=True, slots=True)
class SetupCheck:
    """A question's answer as it is shown."""

    name: str  # its topic, in a word or two
    level: Level  # `note`: it works, and one more setting would help; `skip`: not known
    text: str
    change: str | None = None  # what would fix it; `None` if nothing needs to be
    finding: str | None = None  # the finding's name


def shown(topic: str, answer: Answer) -> SetupCheck:
    if isinstance(answer, Finding):
        change = " ".join(f"{one.text}{one.costs}" for one in answer.advice) or None
        return SetupCheck(topic, LEVELS[answer.weight], answer.sentence, change, answer.name)
    is_known = answer is not None and not isinstance(answer, NotKnown)
    return SetupCheck(topic, "ok" if is_known else "skip", _UNTIL_FIXED if answer is None else answer)


def checked(case: Case) -> tuple[SetupCheck, ...]:
    return tuple(shown(topic, ask(case)) for topic, ask in CHECKS.items())


def engine(case: Case) -> Answer:
    status = case.engine
    if status.state == "ready":
        return f"{status.state_text} at {status.url}"
    # What starts is not wrong yet, as for the verdict.
    is_no_fault = status.traits.is_held or status.traits.is_late or status.state == "starting"
    weight: Weight = "clue" if is_no_fault or status.stopped_at is not None else "likely"
    change = verdict(given(case.setup).report).with_step
    return finding("engine_not_ready", weight=weight, url=status.url, state=status.state_text, change=change)


def version(case: Case) -> Answer:
    reported = case.engine.version
    release = parse_version(reported)
    if not given(case.setup).knows_engine:
        return None
    if release is None or RESETS_ENCODER_CACHE is None:
        return finding("version_unknown", version=reported or "unknown")
    if release.release < OLDEST_KNOWN or release.release[:2] > NEWEST_KNOWN[:2]:
        oldest, newest = text_of(OLDEST_KNOWN[:2]), text_of(NEWEST_KNOWN[:2])
        return finding("version_never_read", version=reported, oldest=oldest, newest=newest)
    if release.release[:2] > NEWEST_TESTED[:2]:
        return finding("version_untested", version=reported, newest=text_of(NEWEST_TESTED[:2]))
    if release < RESETS_ENCODER_CACHE:
        return finding(
            "no_encoder_reset", version=reported, since=str(RESETS_ENCODER_CACHE), safe_since=EVERY_RESET_SAFE_SINCE
        )
    return f"{reported} {case.engine.model or ''}".rstrip()


def dev_mode(case: Case) -> Answer:
    setup = given(case.setup)
    if not setup.knows_engine:
        return None
    if setup.can.get("dev_mode"):
        return "on: workers can be called, caches reset"
    if setup.only_watches:
        return (
            "off, and watching needs none; memory cannot be given back (to act, start vLLM with VLLM_SERVER_DEV_MODE=1)"
        )
    return finding("dev_mode_off")


def extension(case: Case) -> Answer:
    setup = given(case.setup)
    if not setup.knows_engine:
        return None
    loaded = setup.can.get("extension")
    if setup.can.get("collective_rpc"):
        # Another class may have our operations by inheritance, or beside it by the plugin.
        return f"{EXTENSION} is loaded" if loaded == EXTENSION else "every worker has Highwater's operations"
    if setup.only_watches:
        return "the worker package's plugin records every worker"
    return finding("no_extension", loaded=loaded, extension=EXTENSION)


def ranks(case: Case) -> Answer:
    setup, report = given(case.setup), given(case.setup).report
    if not setup.knows_engine or not setup.reads_workers or report.engine.traits.is_absent:
        return None
    reported, expected = report.ranks_reported, report.ranks_expected
    if expected is None:
        return finding("ranks_expected_unknown", reported=reported, ranks=counted(reported, "rank"))
    if reported >= expected:
        return f"{reported} of {expected} report"
    missing = missing_text(report.ranks_missing)
    has_only_first = report.progress is None and (setup.can.get("data_parallel") or 1) > 1
    change = f"look after the missing: {missing}" if missing else report.engine.hint
    return finding("ranks_missing", reported=reported, expected=expected, has_only_first=has_only_first, change=change)


def readings(case: Case) -> Answer:
    setup, report = given(case.setup), given(case.setup).report
    if not setup.reads_workers or report.engine.traits.is_absent:
        return None
    if report.age_seconds is None or report.stale:
        age = "never" if report.age_seconds is None else f"{span_text(report.age_seconds)} ago"
        return finding(
            "readings_stale", age=age, age_seconds=report.age_seconds, change=report.engine.hint or "see the log"
        )
    notes = sorted({f"{note.name}: {note.reason}" for rank in report.ranks for note in rank.notes})
    # A CPU has no allocator statistics; that is as it should be.
    if notes and not all(rank.device.traits.is_host_memory for rank in report.ranks):
        return finding("readings_incomplete", notes="; ".join(notes[:3]))
    return f"read {span_text(report.age_seconds)} ago"


def _known_causes(start: Case) -> list[Finding]:
    return weightiest_first((growth.without_expandable_segments(start), growth.encoder_not_profiled(start)))


def known_start(case: Case) -> Answer:
    """Return the known causes of what fills the device later, in one finding: the start as `explain` has it."""
    if not case.ranks or given(case.setup).is_engine_lost:
        return None
    start = replace(case, kind="start")
    found = _known_causes(start)
    if not found:
        return "without a setting that is known to fill the device later"
    first, *others = found
    # It runs, and goes on until it has grown; of what the budget alone shows, no rank reports a reason.
    is_note = first.weight == "note" or not _known_causes(replace(start, explanation=None))
    return replace(
        first,
        weight="note" if is_note else "clue",
        text=" ".join([first.text, *(one.sentence for one in others)]),
        advice=tuple(advice for one in found for advice in one.advice[:1]),
    )


def statistics(case: Case) -> Answer:
    if not case.engine.traits.answers:
        return None
    return "the engine reports its load" if case.engine.requests_running is not None else finding("no_statistics")


def recorder(case: Case) -> Answer:
    setup, progress = given(case.setup), given(case.setup).report.progress
    if progress is not None:
        said = f"{progress.verdict}: {progress.summary}"
        return finding("engine_stuck", progress=said) if progress.verdict == "stuck" else said
    if setup.recorder_problem is not None:
        return finding("recorders_not_read", problem=setup.recorder_problem)
    if not setup.can.get("collective_rpc") or setup.is_engine_lost:
        return None
    problems = () if case.host_report is None else case.host_report.reading.problems
    return finding("no_recorder", is_folder_empty=NO_FILES in problems)


def shm(case: Case) -> Answer:
    report = case.host_report
    held = None if report is None else report.reading.shm
    if report is None or held is None or held.size_bytes is None or held.free_bytes is None:
        why = "not known: no process of the engine writes a file (HIGHWATER_RECORDER_DIR)"
        return None if given(case.setup).is_engine_lost else NotKnown(why)
    if found := host.shm_promised_too_much(case) or host.shm_too_small(case):
        return found
    has, needs = f"{size_text(held.size_bytes)}, {size_text(held.free_bytes)} free", report.shm_needs
    if needs.known_bytes is None:
        return f"{has}; what this command line can need is not known: no worker reports its settings"
    unknown = ", ".join(row.name for row in needs.unknown)
    not_known = f", and what {unknown} need is not known" if unknown else ""
    return f"{has}; this command line can need {size_text(needs.known_bytes)}{not_known}"


def thresholds(case: Case) -> Answer:
    report = given(case.setup).report
    policy = report.policy
    if policy is None or not policy.rules:
        return finding("no_rules")
    dormant = [rule for rule in policy.rules if rule.is_dormant]
    if dormant:
        said = "; ".join(f"rule {rule.name} cannot act: {rule.reason}" for rule in dormant)
        return finding("rules_cannot_act", rules=said)
    if report.stale or not report.ranks:
        return None
    noted = (one for rule in policy.rules for one in rule.ranks if one.note)
    odd = sorted({f"{one.name}: {one.note}" for one in noted})
    if odd and any(rule.phase != "held" for rule in policy.rules):
        return finding("ranks_left_out", ranks="; ".join(odd[:3]))
    return "; ".join(f"{one.name} {waters_text(one) or f'is held: {one.reason}'}" for one in policy.rules)


def mode(case: Case) -> Answer:
    setup, policy = given(case.setup), given(case.setup).report.policy
    if policy is None or case.engine.traits.is_absent:
        return None
    if setup.only_watches:
        return f"{WORDS[policy.level]} ({policy.mode}): where memory is only watched, nothing can be given back"
    if policy.mode == "observe":
        return finding("policy_observes")
    remedies = {remedy.name: remedy.unavailable for rule in policy.rules for remedy in rule.remedies}
    blocked = "; ".join(f"{name}: {why}" for name, why in remedies.items() if why is not None)
    if blocked and None not in remedies.values():
        return finding("policy_cannot_act", remedies=blocked) if setup.knows_engine else None
    count = policy.actions_last_hour
    text = f"acts; {count} {'action' if count == 1 else 'actions'} in the last hour"
    return f"{text}; not by itself here: {blocked}" if blocked else text


def state_file(case: Case) -> Answer:
    setup = given(case.setup)
    trouble = next((e for e in setup.events if e.kind == "recovery" and "corrupt" in e.summary), None)
    if trouble is not None:
        return finding("state_file_corrupt", summary=trouble.summary)
    if setup.policy_source != "put":
        return "the policy is the configured one; there is nothing to keep"
    if setup.policy_kept_in is not None:
        return f"the changed policy is kept in {setup.policy_kept_in}"
    return finding("policy_not_kept")


def exposure(case: Case) -> Answer:
    setup, url = given(case.setup), case.engine.url
    if not setup.can.get("dev_mode"):
        closed = "the engine has no control paths open: no client of it can call its workers"
        return closed if setup.knows_engine else None
    if url.startswith("unix:") or is_loopback(urlsplit(url).hostname or ""):
        return f"the sidecar calls the engine at {url}"
    return finding("engine_exposed", url=url)


def grpc(case: Case) -> Answer:
    settings = None if case.host_report is None else case.host_report.reading.engine
    if settings is None or settings.grpc is None:
        why = "no worker reports a command line of vLLM's; a gRPC port would go round the sidecar"
        return NotKnown(f"not known: {why}")
    return finding("grpc_served") if settings.grpc else "the engine's command line opens no gRPC port"


def incidents(case: Case) -> Answer:
    setup = given(case.setup)
    if setup.incidents_problem:
        return finding("incidents_not_kept", problem=setup.incidents_problem)
    if setup.log_problem:
        return finding("engine_log_not_read", problem=setup.log_problem)
    times = ((one, one.last_at or one.at) for one in setup.incidents)
    recent = [one for one, at in times if at is not None and setup.now - at < RECENT_SECONDS]
    if recent:
        several = "an incident" if len(recent) == 1 else counted(len(recent), "incident")
        newest = recent[0]
        return finding("recent_incidents", count=len(recent), counted=several, summary=newest.summary, id=newest.id)
    # Where nothing of the engine is read but its API, an incident has little else either.
    is_read = setup.reads_workers or setup.can.get("dev_mode")
    lacks_log = bool(is_read) and not setup.has_engine_log
    if setup.incidents_folder is None:
        return finding("incidents_in_memory", lacks_log=lacks_log)
    if lacks_log:
        return finding("no_engine_log", folder=setup.incidents_folder)
    return f"none in the last hour; kept in {setup.incidents_folder}"


CHECKS: Final[Mapping[str, Callable[[Case], Answer]]] = {
    "engine": engine,
    "vLLM": version,
    "dev mode": dev_mode,
    "extension": extension,
    "ranks": ranks,
    "readings": readings,
    "start": known_start,
    "statistics": statistics,
    "recorder": recorder,
    "/dev/shm": shm,  # noqa: S108 - a name to show
    "thresholds": thresholds,
    "policy": mode,
    "state file": state_file,
    "exposure": exposure,
    "gRPC": grpc,
    "incidents": incidents,
}


# --- as the caller of a sidecar sees it: its version, the token, the transport ---

# What lets a caller make control calls, or why they would be denied; "unknown" of a sidecar that does not report it.
ControlAccess: TypeAlias = Literal["token", "loopback", "no_token", "wrong_token", "closed", "unknown"]
NEEDS_SIDECAR: Final = "needs a sidecar"
_OF_SIDECAR: Final = ("thresholds", "policy", "state file", "incidents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The set-up as the caller of a sidecar sees it."""

    url: str
    without_token: ControlAccess
    with_token: ControlAccess | None = None  # with the token that was found here; `None` if none was found
    token_source: str = ""  # where it was found, or why it was not
    sidecar_version: str | None = None  # `None` if the sidecar does not report it


def sidecar(caller: Caller) -> Answer:
    version = caller.sidecar_version
    if version == __version__:
        return f"version {version} at {caller.url}"
    return finding("sidecar_version", version=version, url=caller.url, own_version=__version__)


def control(caller: Caller) -> Answer:
    if caller.with_token == "wrong_token":  # noqa: S105 - a word, no secret
        return finding("token_wrong", source=caller.token_source)
    if caller.without_token == "closed":  # noqa: S105 - likewise
        return finding("control_closed")
    if caller.without_token == "no_token":  # noqa: S105 - likewise
        if caller.with_token == "token":  # noqa: S105 - likewise
            return "control calls need the admin token, and the one here is right"
        return finding("token_missing", source=caller.token_source)
    if caller.without_token == "loopback":  # noqa: S105 - likewise
        return "trust_loopback is set: callers from the sidecar's machine need no token"
    return NotKnown("it is not known who may make control calls")


def transport(caller: Caller) -> Answer:
    parts = urlsplit(caller.url)
    if parts.scheme == "https" or is_loopback(parts.hostname or ""):
        return "TLS" if parts.scheme == "https" else "does not leave this machine"
    return "plain HTTP, and no token is sent" if caller.with_token is None else finding("token_in_plain_http")


CALLER_CHECKS: Final[Mapping[str, Callable[[Caller], Answer]]] = {
    "sidecar": sidecar,
    "control": control,
    "transport": transport,
}


def caller_checks(caller: Caller) -> tuple[SetupCheck, ...]:
    return tuple(shown(topic, ask(caller)) for topic, ask in CALLER_CHECKS.items())


def without_sidecar(checks: Sequence[SetupCheck]) -> tuple[SetupCheck, ...]:
    """Return the checks of an engine that has no sidecar; what asks about one is not answered, and stands last."""
    needs = NotKnown(NEEDS_SIDECAR)
    found = {one.name: one for one in checks} | {name: shown(name, needs) for name in (*CALLER_CHECKS, *_OF_SIDECAR)}
    return tuple(sorted(found.values(), key=lambda one: one.text == needs))


def exit_code(checks: Sequence[SetupCheck], by_verdict: int) -> int:
    """``by_verdict``: the verdict's exit status. The worse counts: no command calls well what another does not."""
    levels = {check.level for check in checks}
    return max(by_verdict, CRITICAL if "fail" in levels else ATTENTION if "warn" in levels else OK)

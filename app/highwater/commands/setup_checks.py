"""Checks of the set-up of engine and sidecar: one small function for each thing that can be wrong. Pure.

A check looks at what the sidecar serves, and says what is so and, where that is not as it should be, what to change. It
knows nothing of the load: that memory is short right now is reported by ``highwater status``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from highwater.commands.shm_check import judge_shm
from highwater.engine.capabilities import EXTENSION, parse_version
from highwater.files.admin_token import is_loopback
from highwater.readings import Event, Report, RuleStatus, are_recorded
from highwater.text.table import missing_text, waters_text
from highwater.units import span_text

Level: TypeAlias = Literal["ok", "note", "warn", "fail", "skip"]
# What lets a caller make control calls, or why they would be denied; "unknown" of a sidecar that does not report it.
ControlAccess: TypeAlias = Literal["token", "loopback", "no_token", "wrong_token", "closed", "unknown"]

# docs/engine.md: what was run or read. Outside of it things may be the same; it was not tested.
OLDEST, NEWEST = parse_version("0.11"), parse_version("0.33")
RESETS_ENCODER_CACHE = parse_version("0.16")
_TO_WATCH = (
    "run `highwater extension --copy-to DIR` and start vLLM with PYTHONPATH=DIR and HIGHWATER_RECORDER_DIR, the "
    "sidecar's own recorder_dir; where VLLM_PLUGINS is set, it must contain highwater"
)
_RECENT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFacts:
    """The facts that the checks look at, as the sidecar reported them.

    Attributes:
        url: Where it was asked.
        now: Its own time, in Unix seconds.
        report: ``GET /memory``.
        policy: ``GET /policy``.
        incidents: ``GET /memory/incidents``; empty where it has none.
        events: ``GET /memory/events``, newest first.
        without_token: Whether a caller without a token may make control calls.
        with_token: Whether one with the token that was found here may; None where none was found.
        token_source: Where it was found, or why it was not.
        sidecar_version: The sidecar's; None where it does not report one.
        own_version: This command's.
        host: ``GET /memory/host``; empty where it has none.
    """

    url: str
    now: float
    report: Report
    policy: Mapping[str, Any]
    incidents: Mapping[str, Any]
    events: Sequence[Event]
    without_token: ControlAccess
    with_token: ControlAccess | None
    token_source: str
    sidecar_version: str | None
    own_version: str
    host: Mapping[str, Any] = field(default_factory=dict)

    @property
    def can(self) -> Mapping[str, Any]:
        """Return what the engine can do, as the sidecar found out."""
        return self.report.engine.capabilities

    @property
    def only_watches(self) -> bool:
        """Return whether the workers cannot be called, and recorders show their memory all the same."""
        return not self.can.get("collective_rpc") and are_recorded(self.report.ranks)

    @property
    def reads_workers(self) -> bool:
        """Return whether the workers' memory is read in either way."""
        return bool(self.can.get("collective_rpc")) or self.only_watches

    @property
    def knows_engine(self) -> bool:
        """Return whether the engine has been asked at all."""
        return bool(self.can) and (self.report.engine.traits.answers or self.report.engine.version is not None)


@dataclass(frozen=True, slots=True)
class SetupCheck:
    """Result of one check.

    Attributes:
        name: What it is about, in a word or two.
        level: ``ok``; ``note`` where it works and one more setting would help; ``warn``; ``fail``; ``skip`` where it is
            not known.
        text: What is so.
        change: What to change; None where nothing need be.
    """

    name: str
    level: Level
    text: str
    change: str | None = None


def checked(facts: SetupFacts) -> list[SetupCheck]:
    """Return what every check found, in order."""
    return [check(facts) for check in SETUP_CHECKS]


def exit_code(checks: Sequence[SetupCheck]) -> int:
    """0: all as it should be, or could be better; 1: something to look at; 2: something wrong."""
    levels = {check.level for check in checks}
    return 2 if "fail" in levels else 1 if "warn" in levels else 0


def sidecar(facts: SetupFacts) -> SetupCheck:
    """The sidecar is of our own version."""
    version = facts.sidecar_version
    if version is None:
        return SetupCheck("sidecar", "warn", f"answers at {facts.url} and does not report its version")
    if version != facts.own_version:
        text = f"version {version} at {facts.url}, this command is {facts.own_version}"
        return SetupCheck("sidecar", "warn", text, "use the same version of both")
    return SetupCheck("sidecar", "ok", f"version {version} at {facts.url}")


def engine(facts: SetupFacts) -> SetupCheck:
    """The engine is there and ready."""
    status = facts.report.engine
    text = f"{status.state.replace('_', ' ')} at {status.url}"
    if status.state == "ready":
        return SetupCheck("engine", "ok", text)
    if status.traits.is_held:
        change = "POST /resume of the engine" if status.state == "paused" else "POST /wake_up of the engine"
        return SetupCheck("engine", "warn", text, f"{change}, unless somebody wants it so")
    if status.traits.is_late:
        return SetupCheck("engine", "warn", text, status.hint or "")
    change = status.hint or "start vLLM there, or set HIGHWATER_ENGINE_URL of the sidecar"
    return SetupCheck("engine", "warn" if status.state == "starting" and facts.knows_engine else "fail", text, change)


def version(facts: SetupFacts) -> SetupCheck:
    """The engine's version is one that was looked at, with every remedy."""
    reported = facts.report.engine.version
    release = parse_version(reported)
    if not facts.knows_engine:
        return _unknown("vLLM")
    if release is None or OLDEST is None or NEWEST is None or RESETS_ENCODER_CACHE is None:
        text = f"version {reported or 'unknown'}: remedies that depend on it are refused"
        return SetupCheck("vLLM", "warn", text, "let GET /version of the engine answer")
    if release < OLDEST or release.release[:2] > NEWEST.release[:2]:
        text = f"{reported} is outside the tested range {OLDEST} to {NEWEST}"
        return SetupCheck("vLLM", "warn", text, "try every remedy with --dry-run first")
    if release < RESETS_ENCODER_CACHE:
        text = f"{reported} has no /reset_encoder_cache; trim_encoder_cache is there instead"
        return SetupCheck("vLLM", "warn", text, "use vLLM 0.16 or newer, best 0.28, where every remedy is safe")
    return SetupCheck("vLLM", "ok", f"{reported} {facts.report.engine.model or ''}".rstrip())


def dev_mode(facts: SetupFacts) -> SetupCheck:
    """The engine has its development routes."""
    if not facts.knows_engine:
        return _unknown("dev mode")
    if facts.can.get("dev_mode"):
        return SetupCheck("dev mode", "ok", "on: workers can be asked, caches reset")
    change = "start vLLM with VLLM_SERVER_DEV_MODE=1"
    if facts.only_watches:
        return SetupCheck(
            "dev mode", "ok", "off, and watching needs none; memory cannot be given back", f"to act, {change}"
        )
    return SetupCheck("dev mode", "fail", "off: nothing can be read or reset", change)


def extension(facts: SetupFacts) -> SetupCheck:
    """The workers have loaded our extension."""
    if not facts.knows_engine:
        return _unknown("extension")
    loaded = facts.can.get("extension")
    if facts.can.get("collective_rpc"):
        # Another class may have our operations by inheritance, or beside it by the plugin.
        text = f"{EXTENSION} is loaded" if loaded == EXTENSION else "every worker has Highwater's operations"
        return SetupCheck("extension", "ok", text)
    if facts.only_watches:
        return SetupCheck("extension", "ok", "the worker package's plugin records every worker")
    flag = f"--worker-extension-cls {EXTENSION}, with the folder that holds highwater_worker on PYTHONPATH"
    if loaded:
        change = f"start vLLM with {flag}; or, if {loaded} inherits from it, set HIGHWATER_ENGINE_HAS_EXTENSION=true"
        return SetupCheck("extension", "fail", f"{loaded} is loaded, which is not Highwater's", change)
    text = "not loaded, and no worker records itself: the workers' memory is not seen"
    return SetupCheck("extension", "fail", text, f"to watch, {_TO_WATCH}; to act too, start vLLM with {flag}")


def ranks(facts: SetupFacts) -> SetupCheck:
    """Every worker reports."""
    report = facts.report
    if not facts.knows_engine or not facts.reads_workers:
        return _unknown("ranks")
    if report.ranks_expected is None:
        text = f"{report.ranks_reported} report; how many there should be is unknown (the engine's GET /server_info)"
        return SetupCheck("ranks", "warn", text)
    text = f"{report.ranks_reported} of {report.ranks_expected} report"
    if report.ranks_reported >= report.ranks_expected:
        return SetupCheck("ranks", "ok", text)
    missing = missing_text(report.ranks_missing)
    if report.progress is None and (facts.can.get("data_parallel") or 1) > 1:
        change = "set HIGHWATER_RECORDER_DIR: vLLM answers for the first data-parallel engine only"
        return SetupCheck("ranks", "fail", text, change)
    return SetupCheck("ranks", "fail", text, f"look after the missing: {missing}" if missing else report.engine.hint)


def readings(facts: SetupFacts) -> SetupCheck:
    """The workers were read lately, and every figure is known."""
    report = facts.report
    if not facts.reads_workers:
        return _unknown("readings")
    if report.age_seconds is None or report.stale:
        age = "never" if report.age_seconds is None else f"{span_text(report.age_seconds)} ago"
        return SetupCheck("readings", "fail", f"the workers were last read: {age}", report.engine.hint or "see the log")
    notes = sorted({f"{note.name}: {note.reason}" for rank in report.ranks for note in rank.notes})
    # A CPU has no allocator statistics; that is as it should be.
    if notes and any(rank.device.type != "cpu" for rank in report.ranks):
        return SetupCheck("readings", "warn", f"not everything is known: {'; '.join(notes[:3])}")
    return SetupCheck("readings", "ok", f"read {span_text(report.age_seconds)} ago")


def statistics(facts: SetupFacts) -> SetupCheck:
    """The engine reports how many requests it has."""
    if not facts.report.engine.traits.answers:
        return _unknown("statistics")
    if facts.report.engine.requests_running is not None:
        return SetupCheck("statistics", "ok", "the engine reports its load")
    text = "the engine does not report its load: remedies that need a quiet engine are refused"
    return SetupCheck("statistics", "warn", text, "start vLLM without --disable-log-stats")


def recorder(facts: SetupFacts) -> SetupCheck:
    """The workers record themselves, so that a hang and a long step can be distinguished."""
    progress = facts.report.progress
    if progress is not None:
        level: Level = "fail" if progress.verdict == "stuck" else "ok"
        return SetupCheck("recorder", level, f"{progress.verdict}: {progress.summary}")
    if not facts.can.get("collective_rpc"):
        return _unknown("recorder")
    text = "disabled or unreadable: a hang cannot be distinguished from a long step, nor a silent rank be seen"
    change = "set HIGHWATER_RECORDER_DIR to a folder that sidecar and workers share, such as /dev/shm/highwater"
    return SetupCheck("recorder", "note", text, change)


def shared_memory(facts: SetupFacts) -> SetupCheck:
    """``/dev/shm`` is large enough for what this command line can need, before a process ends with SIGBUS."""
    return SetupCheck("/dev/shm", *judge_shm(facts.host))  # noqa: S108 - a name to show


def thresholds(facts: SetupFacts) -> SetupCheck:
    """Every rule can act: its waters are ones that the engine can reach, and what it watches is known."""
    policy = facts.report.policy
    if policy is None or not policy.rules:
        return SetupCheck(
            "thresholds", "warn", "there are no rules: nothing is given back by itself", "see docs/policy.md"
        )
    dormant = [rule for rule in policy.rules if rule.is_dormant]
    if dormant:
        text = "; ".join(f"rule {rule.name} cannot act: {rule.reason}" for rule in dormant)
        return SetupCheck("thresholds", "fail", text, "PUT /policy, or HIGHWATER_POLICY__RULES; see docs/policy.md")
    if facts.report.stale or not facts.report.ranks:
        return _unknown("thresholds")
    odd = sorted({f"rank {one.rank}: {one.note}" for rule in policy.rules for one in rule.ranks if one.note})
    if odd and any(rule.phase != "held" for rule in policy.rules):
        return SetupCheck("thresholds", "warn", f"left out by the policy: {'; '.join(odd[:3])}", "see docs/policy.md")
    return SetupCheck("thresholds", "ok", "; ".join(f"{rule.name} {_waters(rule)}" for rule in policy.rules))


def _waters(rule: RuleStatus) -> str:
    return waters_text(rule) or f"is held: {rule.reason}"


def mode(facts: SetupFacts) -> SetupCheck:
    """The policy acts."""
    policy = facts.report.policy
    if policy is None:
        return _unknown("policy")
    if facts.only_watches:
        text = f"{policy.level} ({policy.mode}): where memory is only watched, nothing can be given back"
        return SetupCheck("policy", "ok", text)
    if policy.mode == "observe":
        change = 'PUT /policy {"mode": "act"}, or HIGHWATER_POLICY__MODE=act'
        return SetupCheck("policy", "warn", "only observes: nothing is given back by itself", change)
    remedies = {remedy.name: remedy.unavailable for rule in policy.rules for remedy in rule.remedies}
    blocked = [f"{name}: {why}" for name, why in remedies.items() if why is not None]
    if blocked and len(blocked) == len(remedies):
        if not facts.knows_engine:
            return _unknown("policy")
        return SetupCheck("policy", "warn", f"can only observe here: {'; '.join(blocked)}", "see docs/relief.md")
    count = policy.actions_last_hour
    text = f"acts; {count} {'action' if count == 1 else 'actions'} in the last hour"
    return SetupCheck("policy", "ok", f"{text}; not by itself here: {'; '.join(blocked)}" if blocked else text)


def state_file(facts: SetupFacts) -> SetupCheck:
    """A policy that was changed while running outlives a restart."""
    trouble = next((e for e in facts.events if e.kind == "recovery" and "corrupt" in e.summary), None)
    if trouble is not None:
        return SetupCheck("state file", "warn", trouble.summary, "see docs/policy.md, The state file")
    if facts.policy.get("source") != "put":
        return SetupCheck("state file", "ok", "the policy is the configured one; there is nothing to keep")
    if facts.policy.get("kept"):
        return SetupCheck("state file", "ok", f"the changed policy is kept in {facts.policy.get('kept_in')}")
    text = "the policy was changed by PUT /policy, and the change ends with the sidecar"
    return SetupCheck(
        "state file", "warn", text, "set HIGHWATER_STATE_FILE, or write the change into the configuration"
    )


def control(facts: SetupFacts) -> SetupCheck:
    """The admin token guards what acts, and the one found here is right."""
    if facts.with_token == "wrong_token":  # noqa: S105 - an answer, no token
        text = f"the sidecar does not accept the admin token from {facts.token_source}"
        return SetupCheck("control", "fail", text, "use the sidecar's own: run `highwater token` where it runs")
    if facts.without_token == "closed":  # noqa: S105
        text = "the sidecar refuses control calls: it has no admin token, and its log says why"
        return SetupCheck("control", "fail", text, "set HIGHWATER_ADMIN_TOKEN_FILE to a file that its user can write")
    if facts.without_token == "no_token":  # noqa: S105
        if facts.with_token == "token":  # noqa: S105
            return SetupCheck("control", "ok", "control calls need the admin token, and the one here is right")
        text = f"control calls need the admin token, and none was found here: {facts.token_source}"
        change = "set HIGHWATER_ADMIN_TOKEN here to what `highwater token` prints where the sidecar runs"
        return SetupCheck("control", "warn", text, change)
    if facts.without_token == "loopback":  # noqa: S105
        return SetupCheck("control", "ok", "trust_loopback is set: callers from the sidecar's machine need no token")
    return SetupCheck("control", "skip", "it is not known who may make control calls")


def transport(facts: SetupFacts) -> SetupCheck:
    """The token does not travel in clear text."""
    parts = urlsplit(facts.url)
    if parts.scheme == "https" or is_loopback(parts.hostname or ""):
        return SetupCheck("transport", "ok", "TLS" if parts.scheme == "https" else "does not leave this machine")
    if facts.with_token is None:
        return SetupCheck("transport", "ok", "plain HTTP, and no token is sent")
    change = "set HIGHWATER_TLS__CERT_FILE and HIGHWATER_TLS__KEY_FILE of the sidecar, or forward the port"
    return SetupCheck("transport", "warn", "the admin token travels in plain HTTP", change)


def exposure(facts: SetupFacts) -> SetupCheck:
    """The engine's development routes are reached by the sidecar alone."""
    url = facts.report.engine.url
    if not facts.can.get("dev_mode"):
        return _unknown("exposure")
    host = urlsplit(url).hostname or ""
    if url.startswith("unix:") or is_loopback(host):
        return SetupCheck("exposure", "ok", f"the engine is asked at {url}")
    text = f"the engine is asked at {url}: whoever reaches that may call any method of its workers"
    return SetupCheck(
        "exposure", "warn", text, "start vLLM with --host 127.0.0.1 beside the sidecar, or fence the port"
    )


def incidents(facts: SetupFacts) -> SetupCheck:
    """Incidents are kept, and there is no recent one."""
    if facts.incidents.get("problem"):
        return SetupCheck(
            "incidents", "fail", str(facts.incidents["problem"]), "let the sidecar write to incidents.folder"
        )
    listed = [entry for entry in facts.incidents.get("incidents") or () if isinstance(entry, Mapping)]
    recent = [entry for entry in listed if facts.now - _at(entry) < _RECENT_SECONDS]
    if recent:
        newest = recent[0]
        text = f"{len(recent)} in the last hour, the last: {newest.get('summary')}"
        return SetupCheck("incidents", "warn", text, f"highwater incidents {newest.get('id')}")
    if facts.incidents.get("folder") is None:
        text = "are kept in memory only: what the engine died of is lost when the sidecar restarts"
        return SetupCheck("incidents", "note", text, "set HIGHWATER_INCIDENTS__FOLDER")
    return SetupCheck("incidents", "ok", f"none in the last hour; kept in {facts.incidents['folder']}")


def _at(entry: Mapping[str, Any]) -> float:
    for key in ("last_at", "at"):
        if isinstance(entry.get(key), int | float):
            return float(entry[key])
    return 0.0


def _unknown(name: str) -> SetupCheck:
    return SetupCheck(name, "skip", "unknown until what stands above is right")


SETUP_CHECKS: tuple[Callable[[SetupFacts], SetupCheck], ...] = (
    sidecar,
    engine,
    version,
    dev_mode,
    extension,
    ranks,
    readings,
    statistics,
    recorder,
    shared_memory,
    thresholds,
    mode,
    state_file,
    control,
    transport,
    exposure,
    incidents,
)

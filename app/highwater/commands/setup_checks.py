"""Checks of the set-up of engine and sidecar: one small function for each thing that can be wrong. Pure.

A check judges what the sidecar serves, and returns a finding and the change that would mend it. It ignores the load:
that memory is short right now is reported by ``highwater status``.
"""

# ruff: noqa: S105 - words for what a call with or without a token gets, no secrets

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from highwater.diagnose.case import ahead
from highwater.diagnose.rules.book import KNOWN_CAUSE_NAMES, known_causes
from highwater.engine.capabilities import EVERY_RESET_SAFE_SINCE, EXTENSION, RESETS_SINCE, parse_version
from highwater.exit_codes import ATTENTION, CRITICAL, OK
from highwater.files.admin_token import is_loopback
from highwater.host.reading import NO_FILES
from highwater.readings.event import Event
from highwater.readings.rank import are_recorded
from highwater.readings.report import Report
from highwater.text.strict_json import part
from highwater.text.table import missing_text, waters_text
from highwater.units import size_text, span_text
from kvplan.versions import NEWEST_KNOWN, NEWEST_TESTED, OLDEST_KNOWN, text_of

Level: TypeAlias = Literal["ok", "note", "warn", "fail", "skip"]
# What lets a caller make control calls, or why they would be denied; "unknown" of a sidecar that does not report it.
ControlAccess: TypeAlias = Literal["token", "loopback", "no_token", "wrong_token", "closed", "unknown"]

RESETS_ENCODER_CACHE = parse_version(RESETS_SINCE["reset_encoder_cache"])
_TO_WATCH = (
    "run `highwater extension --copy-to DIR` and start vLLM with PYTHONPATH=DIR and HIGHWATER_RECORDER_DIR, the "
    "sidecar's own recorder_dir; where VLLM_PLUGINS is set, it must contain highwater"
)
_RECENT_SECONDS = 3600.0
_SHM_LEVELS: Mapping[str, Level] = {"shm_promised_too_much": "fail", "shm_too_small": "warn"}


_Judged: TypeAlias = tuple[Level, str] | tuple[Level, str, str | None]
"""Level, what is so, and what to change."""
_UNKNOWN: _Judged = ("skip", "not known until the problem above is fixed")
_NO_CONTROL_PATHS: _Judged = ("ok", "the engine has no control paths open: no client of it can call its workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFacts:
    url: str  # the sidecar's
    now: float  # the sidecar's time, in Unix seconds
    report: Report
    policy: Mapping[str, Any]  # ``GET /policy``
    incidents: Mapping[str, Any]  # ``GET /memory/incidents``; empty if unknown
    events: Sequence[Event]  # newest first
    without_token: ControlAccess
    with_token: ControlAccess | None  # with the token that was found here; None if none was found
    token_source: str  # where it was found, or why it was not
    sidecar_version: str | None  # None if the sidecar does not report it
    own_version: str  # this command's
    host: Mapping[str, Any] = field(default_factory=dict)  # ``GET /memory/host``; empty if unknown
    budget: Mapping[str, Any] = field(default_factory=dict)  # ``GET /memory/budget``, which `explain` shows; as above

    @property
    def can(self) -> Mapping[str, Any]:
        return self.report.engine.capabilities

    @property
    def only_watches(self) -> bool:
        return not self.can.get("collective_rpc") and are_recorded(self.report.ranks)

    @property
    def reads_workers(self) -> bool:
        return bool(self.can.get("collective_rpc")) or self.only_watches

    @property
    def is_engine_lost(self) -> bool:
        """True if the engine does not run, or will not go on by itself: what it shows no more says nothing of it."""
        traits = self.report.engine.traits
        return traits.is_absent or traits.is_lost

    @property
    def knows_engine(self) -> bool:
        return bool(self.can) and (self.report.engine.traits.answers or self.report.engine.version is not None)


@dataclass(frozen=True, slots=True)
class SetupCheck:
    name: str  # its topic, in a word or two
    level: Level  # ``note``: it works, and one more setting would help; ``skip``: not known
    text: str  # the finding
    change: str | None = None  # what would fix it; None if nothing needs to be


def checked(facts: SetupFacts) -> list[SetupCheck]:
    return [SetupCheck(name, *check(facts)) for name, check in SETUP_CHECKS.items()]


def exit_code(checks: Sequence[SetupCheck]) -> int:
    levels = {check.level for check in checks}
    return CRITICAL if "fail" in levels else ATTENTION if "warn" in levels else OK


def _sidecar(facts: SetupFacts) -> _Judged:
    version = facts.sidecar_version
    if version is None:
        return "warn", f"answers at {facts.url} and does not report its version"
    if version != facts.own_version:
        text = f"version {version} at {facts.url}, this command is {facts.own_version}"
        return "warn", text, "use the same version of both"
    return "ok", f"version {version} at {facts.url}"


def _engine(facts: SetupFacts) -> _Judged:
    status = facts.report.engine
    text = f"{status.state_text} at {status.url}"
    if status.state == "ready":
        return "ok", text
    if status.traits.is_held:
        change = "POST /resume of the engine" if status.state == "paused" else "POST /wake_up of the engine"
        return "warn", text, f"{change}, unless that is intended"
    if status.traits.is_late:
        return "warn", text, status.hint or ""
    if status.stopped_at is not None:
        return "warn", text, "start it again, unless that is intended"
    change = status.hint or "start vLLM there, or set HIGHWATER_ENGINE_URL of the sidecar"
    return "warn" if status.state == "starting" and facts.knows_engine else "fail", text, change


def _version(facts: SetupFacts) -> _Judged:
    reported = facts.report.engine.version
    release = parse_version(reported)
    if not facts.knows_engine:
        return _UNKNOWN
    if release is None or RESETS_ENCODER_CACHE is None:
        text = f"version {reported or 'unknown'}: remedies that depend on it are refused"
        return "warn", text, "let GET /version of the engine answer"
    if release.release < OLDEST_KNOWN or release.release[:2] > NEWEST_KNOWN[:2]:
        text = f"{reported} is none of the versions known, {text_of(OLDEST_KNOWN[:2])} to {text_of(NEWEST_KNOWN[:2])}"
        return "warn", text, "try every remedy with --dry-run first"
    if release.release[:2] > NEWEST_TESTED[:2]:
        text = f"{reported} was read, and not run here: the newest that was tested is {text_of(NEWEST_TESTED[:2])}"
        return "note", text, "try every remedy with --dry-run first"
    if release < RESETS_ENCODER_CACHE:
        text = f"{reported} has no /reset_encoder_cache; trim_encoder_cache is there instead"
        change = f"use vLLM {RESETS_ENCODER_CACHE} or newer, best {EVERY_RESET_SAFE_SINCE}, where every remedy is safe"
        return "warn", text, change
    return "ok", f"{reported} {facts.report.engine.model or ''}".rstrip()


def _dev_mode(facts: SetupFacts) -> _Judged:
    if not facts.knows_engine:
        return _UNKNOWN
    if facts.can.get("dev_mode"):
        return "ok", "on: workers can be called, caches reset"
    change = "start vLLM with VLLM_SERVER_DEV_MODE=1"
    if facts.only_watches:
        return "ok", "off, and watching needs none; memory cannot be given back", f"to act, {change}"
    return "fail", "off: nothing can be read or reset", change


def _extension(facts: SetupFacts) -> _Judged:
    if not facts.knows_engine:
        return _UNKNOWN
    loaded = facts.can.get("extension")
    if facts.can.get("collective_rpc"):
        # Another class may have our operations by inheritance, or beside it by the plugin.
        return "ok", f"{EXTENSION} is loaded" if loaded == EXTENSION else "every worker has Highwater's operations"
    if facts.only_watches:
        return "ok", "the worker package's plugin records every worker"
    flag = f"--worker-extension-cls {EXTENSION}, with the folder that holds highwater_worker on PYTHONPATH"
    if loaded:
        change = f"start vLLM with {flag}; or, if {loaded} inherits from it, set HIGHWATER_ENGINE_HAS_EXTENSION=true"
        return "fail", f"{loaded} is loaded, which is not Highwater's", change
    text = "not loaded, and no worker records itself: the workers' memory is not seen"
    return "fail", text, f"to watch, {_TO_WATCH}; to act too, start vLLM with {flag}"


def _ranks(facts: SetupFacts) -> _Judged:
    report = facts.report
    if not facts.knows_engine or not facts.reads_workers or report.engine.traits.is_absent:
        return _UNKNOWN
    if report.ranks_expected is None:
        text = f"{report.ranks_reported} report; how many there should be is unknown (the engine's GET /server_info)"
        return "warn", text
    text = f"{report.ranks_reported} of {report.ranks_expected} report"
    if report.ranks_reported >= report.ranks_expected:
        return "ok", text
    missing = missing_text(report.ranks_missing)
    if report.progress is None and (facts.can.get("data_parallel") or 1) > 1:
        return "fail", text, "set HIGHWATER_RECORDER_DIR: vLLM answers for the first data-parallel engine only"
    return "fail", text, f"look after the missing: {missing}" if missing else report.engine.hint


def _readings(facts: SetupFacts) -> _Judged:
    report = facts.report
    if not facts.reads_workers:
        return _UNKNOWN
    if report.age_seconds is None or report.stale:
        age = "never" if report.age_seconds is None else f"{span_text(report.age_seconds)} ago"
        return "fail", f"the workers were last read: {age}", report.engine.hint or "see the log"
    notes = sorted({f"{note.name}: {note.reason}" for rank in report.ranks for note in rank.notes})
    # A CPU has no allocator statistics; that is as it should be.
    if notes and any(rank.device.type != "cpu" for rank in report.ranks):
        return "warn", f"not everything is known: {'; '.join(notes[:3])}"
    return "ok", f"read {span_text(report.age_seconds)} ago"


def _start(facts: SetupFacts) -> _Judged:
    if not facts.report.ranks or facts.is_engine_lost:
        return _UNKNOWN
    found = known_causes(ahead(facts.report))
    if not found:
        causes = [one for one in _rows(facts.budget.get("findings")) if one.get("name") in KNOWN_CAUSE_NAMES]
        if causes:
            return "note", " ".join(f"{one.get('title')}. {one.get('text')}" for one in causes), "see highwater explain"
        return "ok", "without a setting that is known to fill the device later"
    level: Level = "note" if all(one.weight == "note" for one in found) else "warn"
    change = " ".join(f"{advice.setting}: {advice.change} {advice.cost}" for one in found for advice in one.advice[:1])
    return level, " ".join(f"{one.title}. {one.text}" for one in found), change


def _statistics(facts: SetupFacts) -> _Judged:
    if not facts.report.engine.traits.answers:
        return _UNKNOWN
    if facts.report.engine.requests_running is not None:
        return "ok", "the engine reports its load"
    text = "the engine does not report its load: remedies that need a quiet engine are refused"
    return "warn", text, "start vLLM without --disable-log-stats"


def _recorder(facts: SetupFacts) -> _Judged:
    progress = facts.report.progress
    if progress is not None:
        level: Level = "fail" if progress.verdict == "stuck" else "ok"
        return level, f"{progress.verdict}: {progress.summary}"
    if not facts.can.get("collective_rpc") or facts.is_engine_lost:
        return _UNKNOWN
    text = "off or unreadable: a hang cannot be distinguished from a long step, and a silent rank is not noticed"
    problems = part(facts.host, "reading").get("problems")
    if isinstance(problems, list | tuple) and NO_FILES in problems:
        return "note", f"{text}; nothing is written into the sidecar's recorder_dir: vLLM runs without it", _TO_WATCH
    change = "set HIGHWATER_RECORDER_DIR to a folder that sidecar and workers share, such as /dev/shm/highwater"
    return "note", text, change


def _shm(facts: SetupFacts) -> _Judged:
    """Judge by the sidecar's own findings, and by its figures where it has none; a missing figure is not known."""
    host = facts.host
    shm, needs = part(part(host, "reading"), "shm"), part(host, "shm_needs")
    size, free = _number(shm.get("size_bytes")), _number(shm.get("free_bytes"))
    if size is None or free is None:
        if facts.is_engine_lost:
            return _UNKNOWN
        text = "not known: no process of the engine writes a file (HIGHWATER_RECORDER_DIR)"
        return "skip", text
    unknown = [str(row.get("name")) for row in _rows(needs.get("rows")) if row.get("bytes") is None]
    not_known = f", and what {', '.join(unknown)} need is not known" if unknown else ""
    for finding in _rows(host.get("findings")):
        if level := _SHM_LEVELS.get(str(finding.get("name"))):
            return level, f"{finding.get('text')}{not_known if level == 'warn' else ''}", str(finding.get("advice"))
    has, known = f"{size_text(size)}, {size_text(free)} free", _number(needs.get("known_bytes"))
    if known is None:
        return "ok", f"{has}; what this command line can need is not known: no worker reports its settings"
    return "ok", f"{has}; this command line can need {size_text(known)}{not_known}"


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _rows(rows: object) -> list[Mapping[str, Any]]:
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []


def _thresholds(facts: SetupFacts) -> _Judged:
    policy = facts.report.policy
    if policy is None or not policy.rules:
        return "warn", "there are no rules: nothing is given back by itself", "see docs/policy.md"
    dormant = [rule for rule in policy.rules if rule.is_dormant]
    if dormant:
        text = "; ".join(f"rule {rule.name} cannot act: {rule.reason}" for rule in dormant)
        return "fail", text, "PUT /policy, or HIGHWATER_POLICY__RULES; see docs/policy.md"
    if facts.report.stale or not facts.report.ranks:
        return _UNKNOWN
    noted = (one for rule in policy.rules for one in rule.ranks if one.note)
    odd = sorted({f"{one.name}: {one.note}" for one in noted})
    if odd and any(rule.phase != "held" for rule in policy.rules):
        return "warn", f"left out by the policy: {'; '.join(odd[:3])}", "see docs/policy.md"
    return "ok", "; ".join(f"{one.name} {waters_text(one) or f'is held: {one.reason}'}" for one in policy.rules)


def _mode(facts: SetupFacts) -> _Judged:
    policy = facts.report.policy
    if policy is None or facts.report.engine.traits.is_absent:
        return _UNKNOWN
    if facts.only_watches:
        return "ok", f"{policy.level} ({policy.mode}): where memory is only watched, nothing can be given back"
    if policy.mode == "observe":
        change = 'PUT /policy {"mode": "act"}, or HIGHWATER_POLICY__MODE=act'
        return "note", "only observes, as it is set to: nothing is given back by itself", change
    remedies = {remedy.name: remedy.unavailable for rule in policy.rules for remedy in rule.remedies}
    blocked = [f"{name}: {why}" for name, why in remedies.items() if why is not None]
    if blocked and len(blocked) == len(remedies):
        if not facts.knows_engine:
            return _UNKNOWN
        return "warn", f"can only observe here: {'; '.join(blocked)}", "see docs/relief.md"
    count = policy.actions_last_hour
    text = f"acts; {count} {'action' if count == 1 else 'actions'} in the last hour"
    return "ok", f"{text}; not by itself here: {'; '.join(blocked)}" if blocked else text


def _state_file(facts: SetupFacts) -> _Judged:
    trouble = next((e for e in facts.events if e.kind == "recovery" and "corrupt" in e.summary), None)
    if trouble is not None:
        return "warn", trouble.summary, "see docs/policy.md, The state file"
    if facts.policy.get("source") != "put":
        return "ok", "the policy is the configured one; there is nothing to keep"
    if facts.policy.get("kept"):
        return "ok", f"the changed policy is kept in {facts.policy.get('kept_in')}"
    text = "the policy was changed by PUT /policy, and the change ends with the sidecar"
    return "warn", text, "set HIGHWATER_STATE_FILE, or write the change into the configuration"


def _control(facts: SetupFacts) -> _Judged:
    if facts.with_token == "wrong_token":
        text = f"the sidecar does not accept the admin token from {facts.token_source}"
        return "fail", text, "use the sidecar's own: run `highwater token` where it runs"
    if facts.without_token == "closed":
        text = "the sidecar refuses control calls: it has no admin token, and its log says why"
        return "fail", text, "set HIGHWATER_ADMIN_TOKEN_FILE to a file that its user can write"
    if facts.without_token == "no_token":
        if facts.with_token == "token":
            return "ok", "control calls need the admin token, and the one here is right"
        text = f"control calls need the admin token, and none was found here: {facts.token_source}"
        return "warn", text, "set HIGHWATER_ADMIN_TOKEN here to what `highwater token` prints where the sidecar runs"
    if facts.without_token == "loopback":
        return "ok", "trust_loopback is set: callers from the sidecar's machine need no token"
    return "skip", "it is not known who may make control calls"


def _transport(facts: SetupFacts) -> _Judged:
    parts = urlsplit(facts.url)
    if parts.scheme == "https" or is_loopback(parts.hostname or ""):
        return "ok", "TLS" if parts.scheme == "https" else "does not leave this machine"
    if facts.with_token is None:
        return "ok", "plain HTTP, and no token is sent"
    change = "set HIGHWATER_TLS__CERT_FILE and HIGHWATER_TLS__KEY_FILE of the sidecar, or forward the port"
    return "warn", "the admin token travels in plain HTTP", change


def _exposure(facts: SetupFacts) -> _Judged:
    url = facts.report.engine.url
    if not facts.can.get("dev_mode"):
        return _NO_CONTROL_PATHS if facts.knows_engine else _UNKNOWN
    host = urlsplit(url).hostname or ""
    if url.startswith("unix:") or is_loopback(host):
        return "ok", f"the sidecar calls the engine at {url}"
    text = f"the sidecar calls the engine at {url}: any client that reaches it may call any method of its workers"
    return "warn", text, "start vLLM with --host 127.0.0.1 beside the sidecar, or fence the port"


def _grpc(facts: SetupFacts) -> _Judged:
    is_served = part(part(facts.host, "reading"), "engine").get("grpc")
    if is_served is True:
        text = "vLLM serves gRPC too (--grpc-port): no gate holds those requests, so a safe reset may fail them"
        return "warn", text, "leave --grpc-port off, or keep it to loopback; see docs/security.md"
    if is_served is False:
        return "ok", "the engine's command line opens no gRPC port"
    return "skip", "not known: no worker reports a command line of vLLM's; a gRPC port would go round the sidecar"


def _incidents(facts: SetupFacts) -> _Judged:
    if facts.incidents.get("problem"):
        return "fail", str(facts.incidents["problem"]), "let the sidecar write to incidents.folder"
    listed = [entry for entry in facts.incidents.get("incidents") or () if isinstance(entry, Mapping)]
    times = ((entry, entry.get("last_at") or entry.get("at")) for entry in listed)
    recent = [one for one, at in times if isinstance(at, int | float) and facts.now - at < _RECENT_SECONDS]
    if recent:
        newest = recent[0]
        text = f"{len(recent)} in the last hour, the last: {newest.get('summary')}"
        return "warn", text, f"highwater incidents {newest.get('id')}"
    # Where nothing of the engine is read but its API, an incident has little else either.
    is_read = facts.reads_workers or facts.can.get("dev_mode")
    lacks_log = bool(is_read) and facts.incidents.get("has_engine_log") is False
    unread = "; the engine's log is not read, so an incident may not name the cause" if lacks_log else ""
    log = "HIGHWATER_ENGINE_LOG to the file that vLLM's output goes to"
    if facts.incidents.get("folder") is None:
        text = f"are kept in memory only: what the engine died of is lost when the sidecar restarts{unread}"
        return "note", text, f"set HIGHWATER_INCIDENTS__FOLDER{f' and {log}' if lacks_log else ''}"
    text = f"none in the last hour; kept in {facts.incidents['folder']}{unread}"
    return ("note", text, f"set {log}") if lacks_log else ("ok", text)


SETUP_CHECKS: Mapping[str, Callable[[SetupFacts], _Judged]] = {
    "sidecar": _sidecar,
    "engine": _engine,
    "vLLM": _version,
    "dev mode": _dev_mode,
    "extension": _extension,
    "ranks": _ranks,
    "readings": _readings,
    "start": _start,
    "statistics": _statistics,
    "recorder": _recorder,
    "/dev/shm": _shm,  # noqa: S108 - a name to show
    "thresholds": _thresholds,
    "policy": _mode,
    "state file": _state_file,
    "control": _control,
    "transport": _transport,
    "exposure": _exposure,
    "gRPC": _grpc,
    "incidents": _incidents,
}

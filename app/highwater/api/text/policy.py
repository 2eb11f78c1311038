"""The policy as text: its mode, how each rule stands, and the last decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from highwater.policy.rules import Rule
from highwater.policy.store import PolicyStore
from highwater.readings.event import Event
from highwater.readings.policy import PolicyStatus, RuleStatus
from highwater.text.printable import plain
from highwater.text.table import signal_text, waters_text
from highwater.units import span_text

_KIND_WIDTH = 9


def event_text(event: Event) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    by = f" (by the policy, rule {event.rule})" if event.trigger == "policy" and event.rule else ""
    if event.caller is not None:
        by = f" (by {event.caller.by} from {event.caller.address or 'an unknown peer'})"
    return plain(f"{at} {event.kind:<{_KIND_WIDTH}} {event.summary}{by}")


def policy_text(status: PolicyStatus, rules: Sequence[Rule], store: PolicyStore, decisions: Sequence[Event]) -> str:
    """Return the policy in force; ``decisions`` are the last ones, newest first."""
    kept = "ends with the sidecar" if store.kept_in is None else f"is kept in {store.kept_in}"
    origin = f"changed while it runs; the change {kept}" if store.source == "put" else "as it was configured"
    configured = {rule.name: rule for rule in rules}
    lines = [
        f"mode: {status.mode}, {origin}",
        f"{status.level}: {status.summary}",
        f"actions in the last hour: {status.actions_last_hour}",
        *(_rule_text(rule, configured.get(rule.name)) for rule in status.rules),
        *(["last decisions:"] if decisions else []),
        *map(event_text, reversed(decisions)),
    ]
    return "\n".join(lines) + "\n"


def _rule_text(rule: RuleStatus, configured: Rule | None) -> str:
    waters = waters_text(rule) or "waters not known yet"
    remedies = ", ".join(configured.ordered_remedies if configured is not None else ()) or "none"
    sustain = 0.0 if configured is None else configured.sustain_seconds
    times = [f"for {span_text(sustain)}"] if sustain else []
    times.append(f"cooldown {span_text(None if configured is None else configured.cooldown_seconds)}")
    why = f"; {rule.reason}" if rule.reason else ""
    now = signal_text(rule.signal, rule.value)
    return f"rule {rule.name}: {rule.phase}, {rule.signal} {now}, {waters}, {', '.join(times)}; runs {remedies}{why}"

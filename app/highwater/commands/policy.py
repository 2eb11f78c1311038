"""``highwater policy``: the policy in force, and changing it while the sidecar runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import click

from highwater.client.options import control_of, examples, json_option, show, sidecar_at, url_option

if TYPE_CHECKING:
    from highwater.readings.policy import RuleStatus

# The sidecar writes it to its state file before it answers.
CHANGE_SECONDS = 30.0
_FIELDS = ("mode", "rules")


@click.group()
def policy() -> None:
    """Show or change what gives memory back by itself.

    Each subcommand exits with 0 when it is done, 1 if the sidecar refuses (a rule that is invalid, or whose waters this
    engine cannot reach; a state file that cannot be written; the token), 2 for an invalid command line or file, 3 if no
    sidecar answers.
    """


@policy.command(
    "get",
    epilog=examples(
        "highwater policy get",
        "highwater policy get --json > policy.json   edit it, then: highwater policy set policy.json",
    ),
)
@url_option
@json_option
def get_policy(url: str, *, as_json: bool) -> None:
    """Show the mode, the rules, how each of them stands, and the last decisions. Needs no token."""
    with sidecar_at(url) as sidecar:
        _show(sidecar.get("/policy"), as_json=as_json)


@policy.command(
    "mode", epilog=examples("highwater policy mode observe    stop it from acting", "highwater policy mode act")
)
@click.argument("mode", type=click.Choice(["act", "observe"]))
@url_option
@json_option
def set_mode(mode: str, url: str, *, as_json: bool) -> None:
    """Let the policy act, or only observe: decide and record, and do nothing. Its rules stay as they are."""
    _change(url, {"mode": mode}, as_json=as_json)


@policy.command(
    "set",
    epilog=examples(
        "highwater policy set policy.yaml",
        "highwater policy get --json | jq '.rules[0].cooldown_seconds = 30' | highwater policy set -",
    ),
)
@click.argument("file", type=click.File("r", encoding="utf-8"))
@url_option
@json_option
def set_policy(file: Any, url: str, *, as_json: bool) -> None:  # noqa: ANN401 - a text file
    """Replace the mode, the rules or both by those in FILE (- for standard input), in YAML or JSON.

    FILE has `mode`, `rules` or both, at the top or below `policy` as in a settings file, or is what `highwater policy
    get --json` printed. The sidecar checks it whole, and refuses it whole.
    """
    from highwater.errors import SettingsError
    from highwater.files.settings_file import MAX_BYTES, parse_yaml

    try:
        text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise click.UsageError(f"{file.name}: has over {MAX_BYTES:,} characters")
        change = change_of(parse_yaml(text))
    except SettingsError as exc:
        raise click.UsageError(f"{file.name}: {exc.problems[0]}") from exc
    except (UnicodeDecodeError, RecursionError) as exc:
        raise click.UsageError(f"{file.name}: is no text of YAML or JSON") from exc
    except ValueError as exc:
        raise click.UsageError(f"{file.name}: {exc}") from exc
    _change(url, change, as_json=as_json)


def change_of(content: object) -> dict[str, Any]:
    """Return the body of ``PUT /policy``. Raises ValueError for other keys, or neither mode nor rules."""
    if isinstance(content, dict) and set(content) == {"policy"}:
        content = content["policy"]
    if not isinstance(content, dict):
        content = {}
    is_printed = "schema" in content and "status" in content
    if unknown := sorted(str(key) for key in set(content) - set(_FIELDS) if not is_printed):
        raise ValueError(f"{unknown[0]}: there is no such key; a policy has mode and rules")
    change = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    if not change:
        raise ValueError("must have mode, rules or both")
    return change


def _change(url: str, change: Mapping[str, Any], *, as_json: bool) -> None:
    with control_of(url, timeout_seconds=CHANGE_SECONDS) as sidecar:
        _show(sidecar.put("/policy", change), as_json=as_json)


def _show(answer: Any, *, as_json: bool) -> None:  # noqa: ANN401 - JSON
    show(answer, policy_text(answer), as_json=as_json)  # as text checks the response, also for JSON
    sys.stdout.flush()


def policy_text(answer: Any) -> str:  # noqa: ANN401 - JSON
    from pydantic import TypeAdapter

    from highwater.client.answers import events_of, understood
    from highwater.commands.events import event_text
    from highwater.readings.policy import PolicyMode, PolicyStatus
    from highwater.text.printable import cleaned

    with understood("/policy"):
        shown: Any = cleaned(answer)
        status = TypeAdapter(PolicyStatus).validate_python(shown["status"])
        if shown["mode"] not in get_args(PolicyMode):
            raise ValueError(shown["mode"])
        kept = f"is kept in {shown['kept_in']}" if shown["kept"] else "ends with the sidecar"
        changed = shown["source"] == "put"
        rules = {rule["name"]: rule for rule in shown["rules"]}
        origin = f"changed while it runs; the change {kept}" if changed else "as it was configured"
        lines = [
            f"mode: {shown['mode']}, {origin}",
            f"{status.level}: {status.summary}",
            f"actions in the last hour: {status.actions_last_hour}",
            *(_rule_text(rule, rules.get(rule.name, {})) for rule in status.rules),
        ]
        decisions = events_of(list(shown["last_decisions"]))
    return "\n".join([*lines, *(["last decisions:"] if decisions else []), *map(event_text, reversed(decisions))])


def _rule_text(rule: RuleStatus, configured: Mapping[str, Any]) -> str:
    from highwater.text.table import signal_text, waters_text
    from highwater.units import span_text

    waters = waters_text(rule) or "waters not known yet"
    remedies = ", ".join(configured.get("remedies", ())) or "none"
    sustain = configured.get("sustain_seconds", 0)
    times = [f"for {span_text(sustain)}"] if sustain else []
    times.append(f"cooldown {span_text(configured.get('cooldown_seconds'))}")
    why = f"; {rule.reason}" if rule.reason else ""
    now = signal_text(rule.signal, rule.value)
    return f"rule {rule.name}: {rule.phase}, {rule.signal} {now}, {waters}, {', '.join(times)}; runs {remedies}{why}"

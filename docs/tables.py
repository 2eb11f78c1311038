"""Writes what the documentation and the dashboard repeat of the code: ``python docs/tables.py``.

A test compares them, so that neither can drift.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tabulate import tabulate

from highwater.act.decision import (
    MIN_TIDY_BYTES,
    RETRY_SECONDS,
    TIDY_AFTER_SECONDS,
    TIDY_SHARE,
    URGENT_COOLDOWN_SECONDS,
)
from highwater.act.governor import FULL_WITHIN_SECONDS, QUICK_SECONDS
from highwater.act.pressure import MAX_HIGH_BYTES, MIN_HIGH_BYTES, MIN_SLACK_BYTES, derive, slack_bytes
from highwater.act.rules import MIN_GAIN_BYTES, SIGNAL_REMEDIES
from highwater.act.rules import Rule as PolicyRule
from highwater.model.components import COMPONENTS, STACKED, account
from highwater.model.engine import STATES
from highwater.model.policy import SIGNALS, WORDS
from highwater.model.rank import Budget, Device, WorkerMemory
from highwater.model.remedies import GAIN_FIELDS, TRAITS
from highwater.model.units import GIB
from highwater.process.errors import MEANINGS
from highwater.server.settings import keys
from kvplan.generations import Span

DOCS = Path(__file__).resolve().parent
STORY = json.loads((DOCS / "npu_story.json").read_text(encoding="utf-8"))
SCREENS = json.loads((DOCS / "plan_screens.json").read_text(encoding="utf-8"))
TESTED = tomllib.loads((DOCS / "tested.toml").read_text(encoding="utf-8"))
ALERTS = DOCS.parent / "helm" / "source" / "alerts.yaml"
SEVERITIES = ("critical", "warning", "info")
GOLDEN_METRICS = DOCS.parent / "tests" / "unit" / "http" / "golden" / "metrics.txt"

# What a family is about, by how its name begins behind `highwater_`.
TOPICS = {
    "verdict": "The verdict",
    "engine_": "The engine",
    "extension_": "The engine",
    "ranks_": "The engine",
    "report_": "The engine",
    "devices_": "Device memory",
    "growth_": "Growth",
    "policy_": "The policy",
    "reset": "Remedies",
    "proxy_": "The proxy",
    "door_": "Images at the door",
    "access_log_": "The proxy",
    "host_": "Host memory",
    "incidents_": "Incidents",
    "poll_": "The sidecar",
    "control_": "The sidecar",
    "build_": "The sidecar",
    "internal_": "The sidecar",
    "process_": "The sidecar",
}

# Of a family that each rank has.
RANK_LABELS = {"device", "host", "rank"}

# What mem_get_info calls the total, which is less than the name says; others of the same name differ by some MiB.
DEVICES = (
    ("NVIDIA L4, 24 GB", int(22.0 * GIB)),
    ("Ascend 910B, 64 GB", 65_452_113_920),
    ("NVIDIA H100, 80 GB", int(79.2 * GIB)),
    ("NVIDIA H200, 141 GB", int(139.8 * GIB)),
)
# vLLM's default was 0.90 for long and is 0.92 now; the last one leaves too little on the smallest of these devices.
SHARES = (0.90, 0.92, 0.95, 0.99)


def _table(headers: list[str], rows: list[list[str]]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def settings_table() -> str:
    """Every setting: key, default, meaning; the page says how a key becomes a flag and a variable."""
    rows = []
    for key, field in keys():
        default = "see [the policy](policy.md)" if key == "policy.rules" else f"`{field.default}`"
        shown = "unset" if field.default in (None, ()) else default
        rows.append([f"`{key}`", shown, str(field.description)])
    return _table(["key", "default", "meaning"], rows)


def rule_table() -> str:
    """Every key of a policy rule."""
    rows = []
    for name, field in PolicyRule.model_fields.items():
        default = "required" if field.is_required() else f"`{field.default}`"
        rows.append([f"`{name}`", "unset" if field.default in (None, ()) else default, str(field.description)])
    return _table(["key", "default", "meaning"], rows)


def signal_table() -> str:
    """Every signal and the remedies that can lower it."""
    rows = [
        [
            f"`{signal}`",
            "falls" if SIGNALS[signal].falls else "rises",
            ", ".join(f"`{name}`" for name in remedies) or "none: the rule must name them",
        ]
        for signal, remedies in SIGNAL_REMEDIES.items()
    ]
    return _table(["signal", "gets worse as it", "default remedies, in this order"], rows)


def waters_table() -> str:
    """Where the default rule acts on some devices, as it derives that from the engine's plan."""
    rows = []
    for name, total in DEVICES:
        row = [name]
        for share in SHARES:
            asked = int(total * share)
            worker = WorkerMemory(
                rank=0,
                device=Device(type="cuda"),
                taken_at=0.0,
                total_bytes=total,
                used_bytes=asked,
                free_bytes=total - asked,
                budget=Budget(requested_bytes=asked),
            )
            waters = derive(slack_bytes(account(worker), None) or 0)
            found = (waters.high, waters.low) if waters else None
            row.append(f"{found[0] / GIB:.2f}, {found[1] / GIB:.2f}" if found else "no rule")
        rows.append(row)
    return _table(["acts at, stops at, GiB free, at utilization", *(f"{share:.2f}" for share in SHARES)], rows)


def figures_table() -> str:
    """The policy's fixed figures."""

    def size(count: int) -> str:
        return f"{count / GIB:g} GiB"

    cooldown = PolicyRule.model_fields["cooldown_seconds"].default
    rows = [
        [
            "lower and upper bound of where it acts",
            f"{size(MIN_HIGH_BYTES)} (half of what is left over if that is less), {size(MAX_HIGH_BYTES)}",
        ],
        ["no default rule if less is left over than", size(MIN_SLACK_BYTES)],
        ["a remedy runs if it can give", f"{size(MIN_GAIN_BYTES)}, or all that is missing"],
        [
            "cooldown after a relief that did not reach where it stops",
            f"{cooldown:g} s; while very short {URGENT_COOLDOWN_SECONDS:g} s",
        ],
        ["a retried allocation counts as pressure for", f"{RETRY_SECONDS:g} s"],
        ["time between readings when memory is tight", f"{QUICK_SECONDS:g} s, with recorders"],
        [
            "memory is tight if less is free than where it stops, or it is full within",
            f"{FULL_WITHIN_SECONDS:g} s at the present pace",
        ],
        ["an idle engine is released after", f"{TIDY_AFTER_SECONDS:g} s without a request"],
        [
            "and only if the release gives",
            f"{size(MIN_TIDY_BYTES)} or {TIDY_SHARE:.0%} of the device, whichever is more",
        ],
    ]
    return _table(["figure", "value"], rows)


def metrics_list() -> str:
    """Every metric family that ranks have not each, as the golden exposition shows it, by what it is about."""
    by_topic: dict[str, list[str]] = {}
    for name, shown in _families(of_rank=False):
        topic = next((topic for topic in TOPICS if name.startswith(f"highwater_{topic}")), "")
        by_topic.setdefault(TOPICS.get(topic, "Others"), []).append(shown)
    return "\n".join(f"- **{title}**: {', '.join(names)}" for title, names in by_topic.items())


def rank_metrics_list() -> str:
    """Every metric family of each rank; the page names the labels that all of them have."""
    return ", ".join(shown for _, shown in _families(of_rank=True))


def _families(*, of_rank: bool) -> Iterator[tuple[str, str]]:
    """Yield each family's name, and what the page shows of it: its labels as a query has them."""
    text = GOLDEN_METRICS.read_text(encoding="utf-8")
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        if name.endswith("_created"):
            continue
        sample = re.search(rf"^{name}(?:_bucket)?{{(.*)}} ", text, re.MULTILINE)
        labels = set(re.findall(r'(\w+)="', sample[1]) if sample else []) - {"le"}
        if (labels >= RANK_LABELS) is of_rank:
            shown = ",".join(sorted(labels - RANK_LABELS if of_rank else labels))
            yield (
                name,
                (f"`{name}{{{shown}}}`" if shown else f"`{name}`") + (" (histogram)" if kind == "histogram" else ""),
            )


def components_table() -> str:
    """Every component of used memory."""
    return _table(["component", "called", "what it is"], [[f"`{c.name}`", c.title, c.meaning] for c in COMPONENTS])


def ascend_table() -> str:
    """Every difference of vllm-ascend, and the versions that have it."""

    def span(rule: Mapping[str, Any]) -> Span:
        since, until = (tuple(map(int, rule[end].split("."))) if end in rule else None for end in ("since", "until"))
        return Span(since or (), until)

    rules = tomllib.loads((DOCS / "ascend_rules.toml").read_text(encoding="utf-8"))["rule"]
    rows = [
        [
            rule["topic"],
            str(span(rule)).replace("and newer", "on"),
            rule["effect"],
        ]
        for rule in sorted(rules, key=lambda rule: (rule["topic"], span(rule).since))
    ]
    return _table(["about", "versions", "what it does"], rows)


def alerts_table() -> str:
    """Every alert, the worst first: its reasons by severity, and for how long each must hold."""
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    cells: dict[str, dict[str, list[str]]] = {}
    for rule in group["rules"]:
        labels = rule["labels"]
        reasons = cells.setdefault(rule["alert"], {severity: [] for severity in SEVERITIES})[labels["severity"]]
        reasons.append(f"{labels.get('reason', '')} {rule.get('for', 'at once')}".strip())
    rows = [
        [f"[{name}](runbooks/{name}.md)", *(", ".join(reasons) for reasons in by_severity.values())]
        for name, by_severity in cells.items()
    ]
    worst_first = sorted(rows, key=lambda row: next(place for place, cell in enumerate(row[1:]) if cell))
    return _table(["alert", *SEVERITIES], worst_first)


def devices_table() -> str:
    """What the chart calls devices, from docs/tested.toml."""
    rows = [
        [
            f"`{kind}`",
            f"`{row['resource']}`" if row["resource"] else "",
            f"`{row['image']}`" if row["image"] else "see vLLM's documentation",
            row["reads"],
        ]
        for kind, row in TESTED["device"].items()
    ]
    return _table(["`engine.device.kind`", "resource", "image", "what Highwater reads"], rows)


def engines_table() -> str:
    """What was run on which engine, from docs/tested.toml."""
    rows = [
        [", ".join(filter(None, (row["version"], row.get("beside")))), row["runner"], row["device"], row["what"]]
        for row in TESTED["engine"]
    ]
    return _table(["vLLM", "model runner", "device", "what was run"], rows)


def exit_code_table() -> str:
    """Every exit code, and what it means."""
    return _table(["exit status", "meaning"], [[", ".join(map(str, codes)), meaning] for codes, meaning in MEANINGS])


def npu_story_table() -> str:
    """The typical case on a simulated NPU, each moment with the components that move."""
    # A component that came after the story was recorded is not in it.
    moving = [c for c in COMPONENTS if len({row["components"].get(c.name) for row in STORY["stages"][1:]}) > 1]
    rows = [
        [row["moment"], _gib(row["used_bytes"]), _gib(row["free_bytes"])]
        + [_gib(row["components"][component.name]) for component in moving]
        for row in STORY["stages"]
    ]
    table = _table(["simulated, GiB", "used", "free", *(component.title for component in moving)], rows)
    return (
        f"{_story_heading()}\n\n{table}\n\n"
        f"Without the policy the engine is out of memory at image {STORY['failed_image']}."
    )


def _story_heading() -> str:
    versions = ", ".join(f"{name} {version}" for name, version in STORY["versions"].items())
    total = f"{_gib(STORY['total_bytes'])} GiB, {versions}; `{STORY['command']}`, {STORY['day']}"
    varies = "Figures differ a little from run to run"
    return f"*{STORY['heading'][0].upper()}{STORY['heading'][1:]}.* {total}. {varies}."


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


def plan_screen(name: str) -> str:
    """What `highwater plan` printed for Llama 3.1 8B (tests/support/record_answers.py)."""
    return f"```\n{SCREENS[name].rstrip()}\n```"


TABLES = {
    "alerts.md": {"alerts": alerts_table},
    "ascend.md": {"npu story": npu_story_table, "ascend": ascend_table},
    "engine.md": {"engines": engines_table},
    "kubernetes.md": {"devices": devices_table},
    "settings.md": {"settings": settings_table},
    "terminal.md": {"exit codes": exit_code_table},
    "plan.md": {name: partial(plan_screen, name) for name in SCREENS},
    "policy.md": {"waters": waters_table, "figures": figures_table, "signals": signal_table, "rule": rule_table},
    "metrics.md": {"metrics of each rank": rank_metrics_list, "metrics": metrics_list},
    "http.md": {"components": components_table},
}


def rendered(name: str) -> str:
    """The document with its tables made anew."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for table, make in TABLES[name].items():
        pattern = re.compile(rf"(<!-- table: {table} -->\n).*?(<!-- end -->)", re.DOTALL)
        fresh = f"\n{make()}\n\n"
        text, count = pattern.subn(rf"\1{fresh.replace(chr(92), chr(92) * 2)}\2", text)
        if count != 1:
            raise SystemExit(f"{name}: the place of the table {table!r} is there {count} times, not once")
    return text


def facts_module() -> str:
    """What the dashboard knows of the engine's states, the components, the policy and the remedies, as a module."""
    states = [
        f"  {name}: {_js({key: value for key, value in asdict(traits).items() if value})},"
        for name, traits in STATES.items()
    ]
    components = [
        f"  {_js({'field': c.name, 'name': c.title, 'variable': c.variable, 'meaning': c.meaning})}," for c in STACKED
    ]
    resets = [
        f"  {_js({'name': name, 'frees': traits.frees, 'keeps': traits.does_not_free})},"
        for name, traits in TRAITS.items()
        if name.startswith("reset_")
    ]
    return "\n".join(
        [
            "/**",
            " * What the page and the sidecar both know: written by `make docs` from",
            " * app/highwater/model: engine.py, components.py, policy.py and remedies.py.",
            " */",
            "",
            "/** What follows from each state of the engine. @type {Record<string, any>} */",
            "export const STATES = {",
            *states,
            "};",
            "",
            "/**",
            " * The components of device memory, in the order in which they are stacked, from the bottom.",
            " * @type {readonly {field: string, name: string, variable: string, meaning: string}[]}",
            " */",
            "export const COMPONENTS = [",
            *components,
            "];",
            "",
            "/** Where a rank's pressure shows what each remedy could give there. @type {Record<string, string>} */",
            f"export const GAIN_FIELDS = {_js(GAIN_FIELDS)};",
            "",
            "/** The policy's levels and phases as people read them. @type {Record<string, string>} */",
            f"export const WORDS = {_js(WORDS)};",
            "",
            "/** vLLM's own resets: what each frees, and what it does not. */",
            "export const RESETS = [",
            *resets,
            "];",
            "",
        ]
    )


def components_style() -> str:
    """The components' colours, light and dark."""

    def block(selector: str, colours: Iterable[tuple[str, str]]) -> list[str]:
        return [f"{selector} {{", *(f"  {variable}: {colour};" for variable, colour in colours), "}", ""]

    return "\n".join(
        [
            "/* The components' colours: written by `make docs` from app/highwater/model/components.py. */",
            "",
            *block(":root", ((c.variable, c.light) for c in COMPONENTS)),
            *block(":root[data-dark]", ((c.variable, c.dark) for c in COMPONENTS)),
        ]
    )


DASHBOARD = DOCS.parent / "app" / "highwater" / "dashboard"
WRITTEN = {DASHBOARD / "facts.js": facts_module, DASHBOARD / "components.css": components_style}


def _js(row: Mapping[str, object]) -> str:
    return f"{{ {', '.join(f'{key}: {json.dumps(value)}' for key, value in row.items())} }}"


if __name__ == "__main__":
    for path, make in WRITTEN.items():
        path.write_text(make(), encoding="utf-8")
    for document in TABLES:
        (DOCS / document).write_text(rendered(document), encoding="utf-8")

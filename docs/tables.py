"""Writes the tables in the documentation that tell what the code has: ``python docs/tables.py``.

A test compares them, so that neither can drift.
"""

from __future__ import annotations

import re
from pathlib import Path

from tabulate import tabulate

from app.incidents.messages import KNOWN
from app.policy import FALLING_SIGNALS, SIGNAL_REMEDIES
from app.policy_settings import RuleSettings
from app.settings import keys, variable

DOCS = Path(__file__).resolve().parent
GOLDEN_METRICS = DOCS.parent / "tests" / "unit" / "golden" / "metrics.txt"


def _table(headers: list[str], rows: list[list[str]]) -> str:
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def settings_table() -> str:
    """Every setting: key, flag, variable, default, meaning."""
    rows = []
    for key, field in keys():
        default = "see [the policy](policy.md)" if key == "policy.rules" else f"`{field.default}`"
        flag = f"`--{key.replace('_', '-')}`"
        shown = "none" if field.default in (None, ()) else default
        rows.append([f"`{key}`", flag, f"`{variable(key)}`", shown, str(field.description)])
    return _table(["key", "flag", "environment", "default", "meaning"], rows)


def rule_table() -> str:
    """Every key of a policy rule."""
    rows = []
    for name, field in RuleSettings.model_fields.items():
        default = (
            "required" if field.is_required() else "all for the signal" if field.default == () else f"`{field.default}`"
        )
        rows.append([f"`{name}`", default, str(field.description)])
    return _table(["key", "default", "meaning"], rows)


def signal_table() -> str:
    """Every signal and the remedies that can lower it."""
    rows = [
        [f"`{signal}`", "falls" if signal in FALLING_SIGNALS else "rises", ", ".join(f"`{name}`" for name in remedies)]
        for signal, remedies in SIGNAL_REMEDIES.items()
    ]
    return _table(["signal", "gets worse as it", "remedies that can relieve it, in the default order"], rows)


def metrics_table() -> str:
    """Every metric family, as the golden exposition shows it."""
    text = GOLDEN_METRICS.read_text(encoding="utf-8")
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    rows = []
    for name, meaning in re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE):
        sample = re.search(rf"^{name}(?:_bucket)?{{(.*)}} ", text, re.MULTILINE)
        labels = re.findall(r'(\w+)="', sample[1]) if sample else []
        shown = ", ".join(f"`{label}`" for label in labels if label != "le")
        rows.append([f"`{name}`", types[name], shown, meaning])
    return _table(["metric", "type", "labels", "meaning"], rows)


def message_table() -> str:
    """Every message of engines that incidents know."""
    rows = [[f"`{known.name}`", known.title, known.source] for known in KNOWN]
    return _table(["message", "says", "written by"], rows)


TABLES = {
    "incidents.md": {"messages": message_table},
    "settings.md": {"settings": settings_table},
    "policy.md": {"signals": signal_table, "rule": rule_table},
    "metrics.md": {"metrics": metrics_table},
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


if __name__ == "__main__":
    for document in TABLES:
        (DOCS / document).write_text(rendered(document), encoding="utf-8")

"""The labels that the exporter's families have, as in the golden exposition, and those that a query may name."""

from __future__ import annotations

import re

from helm.source.dashboards import GOLDEN

# Labels that the scrape, Prometheus or vLLM adds, and that of a histogram's buckets.
OTHER_LABELS = {"cluster", "job", "instance", "namespace", "pod", "alertname", "alertstate", "severity", "le"}
_SELECTOR = re.compile(r"(\w+)\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SERIES = re.compile(r"^(\w+)(?:\{(.+)\})? ", re.MULTILINE)


def _labels() -> dict[str, set[str]]:
    labels: dict[str, set[str]] = {}
    for name, pairs in _SERIES.findall(GOLDEN.read_text(encoding="utf-8")):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', pairs))
    return labels


LABELS = _labels()
ALL_LABELS = OTHER_LABELS.union(*LABELS.values())


def unknown_labels(expression: str) -> set[str]:
    """Return the labels that a PromQL expression names and that no family it reads can have.

    A matcher's label must be one of its own family; that of a grouping, or of a matcher whose family has no series in
    the golden exposition, one of any family.
    """
    unknown: set[str] = set()
    for family, matchers in _SELECTOR.findall(expression):
        named = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers)
        unknown |= set(named) - OTHER_LABELS - LABELS.get(family, ALL_LABELS)
    for group in _GROUPING.findall(expression):
        unknown |= set(re.findall(r"\w+", group)) - ALL_LABELS
    return unknown

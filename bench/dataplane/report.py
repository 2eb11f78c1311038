"""One section of docs/figures.md, as its own run measured it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The content of the section.

    Attributes:
        title: Of the section.
        columns: Heads of its table.
        rows: Cells of its table.
        facts: Sentences with further numbers of the same run.
        methods: How it was measured, a sentence or two each.
        notes: What the reader must know of this run.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    facts: Sequence[str]
    methods: Sequence[str]
    notes: Sequence[str] = ()

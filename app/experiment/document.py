"""What a report is made of: blocks that HTML and Markdown render alike, so that both say the same.

Every text is shown as text, whoever wrote it. ``Foreign`` text is the engine's, the operator's or the sidecar's: it is
set as code, where no form finds links, mentions or emphasis in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from app.experiment.findings import Finding
from app.incidents.incident import Advice


@dataclass(frozen=True, slots=True)
class Foreign:
    """A text that is not ours."""

    text: str


Inline: TypeAlias = str | Foreign


@dataclass(frozen=True, slots=True)
class Heading:
    """A section begins."""

    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Some sentences."""

    parts: Sequence[Inline]


@dataclass(frozen=True, slots=True)
class Figures:
    """The few numbers to see first: each a title, a number, and a word on it."""

    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what they are."""

    rows: Sequence[tuple[Inline, Inline]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; its first column names the rows.

    Attributes:
        caption: What it is of.
        wide: Columns with text, by index: they are set to the left.
        strong: Rows to see first, by index.
        folded: Whether it is shown only on demand.
        colours: Of each row the component whose colour the charts give it; empty where it has none.
    """

    caption: str
    headers: Sequence[Inline]
    rows: Sequence[Sequence[Inline]]
    wide: frozenset[int] = frozenset({0})
    strong: frozenset[int] = frozenset()
    folded: bool = False
    colours: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, or what a terminal showed."""

    text: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What the numbers say."""

    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Changes:
    """What can be changed."""

    advice: Sequence[Advice]


@dataclass(frozen=True, slots=True)
class Tick:
    """A moment on a chart's axis of time.

    Attributes:
        index: Of the chart's bin.
        label: A number, and when.
    """

    index: int
    label: str


@dataclass(frozen=True, slots=True)
class Lines:
    """One line or area of a chart, in MiB, a value for each bin; ``None`` where it is not known."""

    name: str
    component: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A chart over time.

    Attributes:
        caption: What it shows.
        stacked: Areas on one another, or lines.
        lines: From the bottom.
        ticks: The moments, in order.
        key: What each of them is.
        seconds: The whole span.
        top: The end of the axis upwards in MiB, and what it is called; ``None``: as high as the lines.
    """

    caption: str
    stacked: bool
    lines: Sequence[Lines]
    ticks: Sequence[Tick]
    key: Sequence[str]
    seconds: float
    top: tuple[float, str] | None = None


Block: TypeAlias = Heading | Paragraph | Figures | Facts | Table | Command | Findings | Changes | Timeline


@dataclass(frozen=True, slots=True)
class Document:
    """One report.

    Attributes:
        title: What it is of.
        subtitle: Engine, model, device, when.
        blocks: In order.
        made_by: Who wrote it, and when.
    """

    title: Inline
    subtitle: Sequence[Inline]
    blocks: Sequence[Block]
    made_by: str

"""A past for a Prometheus that begins today: blocks of what sidecars would have shown, written by promtool."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.simulated_fleet import Sidecar, labels_of

# One block for all of it: by default promtool reads its input anew for every two hours.
_BLOCK_HOURS = 400
# Until the scrapes begin.
_GAP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Span:
    """Which series of which servers go back how far.

    Attributes:
        servers: By number.
        families: What their names begin with.
        seconds: How far.
    """

    servers: Sequence[int]
    families: re.Pattern[str]
    seconds: float


def write_blocks(
    promtool: str, data: Path, folder: Path, spans: Sequence[Span], *, ranks: int, step_seconds: float
) -> None:
    """Write them.

    Args:
        promtool: The program.
        data: Prometheus' storage, which does not run yet.
        folder: For the text that promtool reads; it is removed again.
        spans: No family in two of them.
        ranks: Of each server.
        step_seconds: Between two samples.
    """
    text = folder / "history.om"
    now = time.time() - _GAP_SECONDS
    with text.open("w", encoding="utf-8") as file:
        for span in spans:
            file.writelines(_lines(span, now, ranks=ranks, step_seconds=step_seconds))
        file.write("# EOF\n")
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", "-q", f"--max-block-duration={_BLOCK_HOURS}h"]
    subprocess.run([*command, text, data], check=True, capture_output=True)
    text.unlink()


def _lines(span: Span, now: float, *, ranks: int, step_seconds: float) -> Iterator[str]:
    moments = [now - span.seconds + step * step_seconds for step in range(int(span.seconds / step_seconds))]
    by_family: dict[str, list[str]] = {}
    for number in span.servers:
        page = Sidecar(number, ranks).page(engine=False)[0].decode()
        for line in page.splitlines():
            if span.families.match(line):
                series, _, value = line.rpartition(" ")
                family = series.partition("{")[0]
                by_family.setdefault(family, []).append(f"{_with_labels(series, number)} {value}")
    for family, all_series in by_family.items():
        yield f"# TYPE {family} unknown\n"
        for series in all_series:
            yield "".join(f"{series} {moment:.3f}\n" for moment in moments)


def _with_labels(series: str, number: int) -> str:
    """The series as the scrape would label it."""
    name, _, own = series.partition("{")
    added = ",".join(f'{label}="{value}"' for label, value in ({"job": "highwater"} | labels_of(number)).items())
    return f"{name}{{{added}{',' + own.removesuffix('}') if own else ''}}}"

"""Writes the records of `tests/compat` as a table into `docs/compat.md`: `python -m tests.compat.page RECORDS`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tabulate import tabulate

from bench.machine import description
from tests.compat.results import Result, read

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compat.md"


def table(results: list[Result]) -> str:
    """A row for what was done how, remedies with the same outcomes together; a column for each version."""
    versions = sorted({result.version for result in results}, key=lambda name: tuple(map(int, name.split("."))))
    came = {(result.remedy, result.way, result.version): result.outcome for result in results}
    alike: dict[tuple[str, ...], list[str]] = {}
    for remedy, way in sorted({(result.remedy, result.way) for result in results}):
        outcomes = (way, *(came.get((remedy, way, version), "not tried") for version in versions))
        alike.setdefault(outcomes, []).append(f"`{remedy}`")
    rows = [[", ".join(remedies), *outcomes] for outcomes, remedies in alike.items()]
    return tabulate(rows, ["remedy", "how", *versions], tablefmt="github", disable_numparse=True)


def main(records: Path) -> None:
    """Put the table between the page's markers."""
    text = PAGE.read_text(encoding="utf-8")
    results = read(records)
    machine = description(", ".join(sorted({result.version for result in results})))
    written = f"<!-- results -->\n\nRun on {machine}.\n\n{table(results)}\n\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- results -->.*<!-- end -->", lambda _: written, text, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Writes the records of `tests/compat` as tables into `docs/compat.md`: `python -m tests.compat.page RECORDS`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tabulate import tabulate

from bench.machine import description
from tests.compat.results import Result, read

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compat.md"


def tables(results: list[Result]) -> str:
    """One table a version: what was done how, and what came of it."""
    parts = []
    for version in sorted({result.version for result in results}, key=lambda name: tuple(map(int, name.split(".")))):
        rows = [
            [f"`{result.remedy}`", result.way, result.outcome, _figures(result)]
            for result in results
            if result.version == version
        ]
        table = tabulate(rows, ["remedy", "how", "outcome", "figures"], tablefmt="github", disable_numparse=True)
        parts.append(f"## vLLM {version}\n\n{table}")
    return "\n\n".join(parts)


def _figures(result: Result) -> str:
    return "; ".join(f"{name}: {value}" for name, value in result.figures.items())


def main(records: Path) -> None:
    """Put the tables between the page's markers."""
    text = PAGE.read_text(encoding="utf-8")
    results = read(records)
    machine = description(", ".join(sorted({result.version for result in results})))
    written = f"<!-- results -->\n\nRun on {machine}.\n\n{tables(results)}\n\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- results -->.*<!-- end -->", lambda _: written, text, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

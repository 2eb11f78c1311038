"""`python -m tests.situations`: run every row, print, and write docs/policy-situations.md.

The exit status is 1 where a goal is missed.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from tests.situations.page import table, with_results
from tests.situations.rows import SITUATIONS
from tests.situations.run import Result, run

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "policy-situations.md"
EVENTS_SHOWN = 40


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice([row.name for row in SITUATIONS]), help="only these")
@click.option("--events", is_flag=True, help="the sidecar's last events of each row that missed a goal")
@click.option("--no-docs", is_flag=True, help="leave docs/policy-situations.md as it is")
def main(*, only: tuple[str, ...], events: bool, no_docs: bool) -> None:
    # The sidecar's own log would say what the table says, on a clock that is not ours.
    logging.disable(logging.CRITICAL)
    results = []
    for row in SITUATIONS:
        if not only or row.name in only:
            results.append(run(row))
            _say(results[-1], events=events)
    print(table(results, "simple"))
    if not (no_docs or only):
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_results(text, results, command="python -m tests.situations"), encoding="utf-8")
    if any(result.missed for result in results):
        sys.exit(1)


def _say(result: Result, *, events: bool) -> None:
    print(f"{result.situation.name}: {'; '.join(result.missed) or 'met'}", flush=True)
    if events and result.missed:
        print("\n".join(f"    {event}" for event in result.events[:EVENTS_SHOWN]))


if __name__ == "__main__":
    main()

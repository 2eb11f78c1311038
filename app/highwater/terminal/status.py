"""``highwater status``: the verdict in at most eight lines for people, or whole for programs, and its exit status."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import click
from pydantic import TypeAdapter

from highwater.diagnose.verdict import JudgedReport
from highwater.http.findings import FoundFinding
from highwater.http.text.status import last_act, ranks_text, since_text, status_text, why_text
from highwater.model.report import SCHEMA, Event
from highwater.process.errors import ATTENTION, CRITICAL, OK
from highwater.process.untrusted import cleaned
from highwater.terminal.asking import asked_at
from highwater.terminal.client import events_of, report_of, understood
from highwater.terminal.options import engine_option, examples, json_option, url_option

WORDS: Final = {OK: "ok", ATTENTION: "attention", CRITICAL: "critical"}
MAX_EVENTS: Final = 1000
_FOUND: Final = TypeAdapter(tuple[FoundFinding, ...])


def status_json(report: JudgedReport, answer: Any, events: Sequence[Event]) -> dict[str, Any]:  # noqa: ANN401 - JSON
    verdict = report.verdict
    last_reset = last_act(events)
    return {
        "schema": SCHEMA,
        "status": WORDS[verdict.exit_status],
        "exit_code": verdict.exit_status,
        "reasons": [verdict.sentence] if verdict.exit_status else [],
        "verdict": asdict(verdict),
        "last_reset": None if last_reset is None else asdict(last_reset),
        "report": answer,
    }


@click.command(
    epilog=examples(
        "highwater status",
        "highwater status >/dev/null || echo 'look at it'",
        "highwater status --why                     what grows, and the known causes",
        "highwater status --since 'before bench'    what changed since that mark",
        "highwater status --engine-url http://gpu-7:8000   no sidecar runs there yet",
        "highwater status --json | jq -r .verdict.sentence",
    )
)
@url_option
@engine_option
@click.option("--ranks", is_flag=True, help="adds a row for each rank, the worst off first")
@click.option("--why", is_flag=True, help="adds what `growth` and `explain` find, in short")
@click.option("--since", metavar="MARK", help="adds what changed since that mark")
@json_option
def status(url: str, engine_url: str | None, since: str | None, *, ranks: bool, why: bool, as_json: bool) -> None:
    """Show in at most eight lines whether all is well: what fills the memory, what happens next, and what to do.

    Exits with 0 if all is well, 1 if something needs attention, 2 if memory is very short or the engine is dead or
    hangs, 3 if no sidecar answers.
    """
    if since is not None and engine_url is not None:
        raise click.UsageError("--since: only a sidecar remembers marks; leave --engine-url out")
    with asked_at(url, engine_url) as asked:
        answer = asked.get("/memory", {} if since is None else {"since": since})
        report = report_of(answer)
        listed = asked.get("/memory/events", {"limit": str(MAX_EVENTS)})
        found = asked.get("/memory/findings") if why else {"findings": []}
        with understood("/memory/findings"):
            known = _FOUND.validate_python(cleaned(found["findings"]))
    events = events_of(listed.get("events") if isinstance(listed, dict) else [])
    width = shutil.get_terminal_size().columns

    def parts() -> Iterator[str]:
        yield status_text(
            report, events, url=engine_url or asked.url, now=time.time(), width=width, is_alone=engine_url is not None
        )
        if ranks:
            yield ranks_text(report)
        if why:
            yield why_text(report, known, width)
        if since is not None:
            yield since_text(since, cleaned(answer.get("since")))

    click.echo(json.dumps(status_json(report, answer, events), indent=1) if as_json else "\n\n".join(parts()))
    sys.exit(report.verdict.exit_status)

"""The results in docs/policy-situations.md, and the table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from bench.page import replaced
from tests.situations.judge import Outcome
from tests.situations.run import Result

COLUMNS = ("situation", "remedies", "seconds short")
_KINDS = {"release": "release", "trim": "trim", "reset_encoder_cache": "encoder reset", "reset_mm_cache": "mm reset"}


def table(results: Sequence[Result], layout: str) -> str:
    return tabulate([_row(result) for result in results], COLUMNS, tablefmt=layout, disable_numparse=True)


def with_results(text: str, results: Sequence[Result], *, command: str) -> str:
    """docs/policy-situations.md with the results between its marks, Markdown."""
    met = sum(not result.missed for result in results)
    ineffective = sum(len(result.outcome.in_vain) for result in results)
    quiet = [result for result in results if _is_quiet(result.outcome)]
    most = max((len(result.outcome.remedies) for result in quiet), default=0)
    calm = ", ".join(f"`{result.situation.name}`" for result in quiet)
    block = f"""
Written by `{command}`; the exit status is 1 if a goal is missed. {met} of {len(results)} situations meet all goals.
Ineffective remedies: {ineffective}.

{table([result for result in results if result not in quiet], "github")}

Memory was never short, and at most {most} releases ran, in: {calm or "none"}.
{_missed(results)}
"""
    return replaced(text, "results", "end of results", block)


def _is_quiet(outcome: Outcome) -> bool:
    """Return whether memory was never short, nobody died, and no remedy but a release ran."""
    return not (outcome.deaths or outcome.first_delays or outcome.seconds_short or set(outcome.by_kind) - {"release"})


def _missed(results: Sequence[Result]) -> str:
    lines = [f"- `{result.situation.name}`: {missed}." for result in results for missed in result.missed]
    return "\nGoals missed:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _row(result: Result) -> tuple[str, ...]:
    outcome = result.outcome
    return (
        f"`{result.situation.name}`",
        _remedies(outcome) + _deaths(outcome) + _delays(outcome),
        f"{outcome.seconds_short:.0f}",
    )


def _remedies(outcome: Outcome) -> str:
    counted = outcome.by_kind
    return ", ".join(f"{counted[kind]} {word}" for kind, word in _KINDS.items() if counted[kind]) or "none"


def _deaths(outcome: Outcome) -> str:
    """Return how many engines ran out of memory, and how many of them could have been saved; empty for none."""
    return f"; {len(outcome.deaths)} died ({len(outcome.covered_deaths)})" if outcome.deaths else ""


def _delays(outcome: Outcome) -> str:
    """Return the longest seconds until the first remedy, and until the next; empty if nothing was urgent."""
    if not outcome.first_delays:
        return ""
    return f"; urgent: {_longest(outcome.first_delays)}, {_longest(outcome.next_delays)}"


def _longest(delays: Sequence[float]) -> str:
    return f"{max(delays):.1f}" if delays else "-"

"""docs/policy-situations.md, and the table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from bench.situations.device import GIB, MIB
from bench.situations.judge import FIRST_SECONDS, MIN_GAIN, NEXT_SECONDS, Outcome
from bench.situations.run import Result

COLUMNS = (
    *("situation", "hours", "died", "remedies", "in vain", "seconds short", "seconds held", "GiB given back"),
    *("first remedy, s", "next remedy, s", "goals"),
)
_KINDS = {"release": "release", "trim": "trim", "reset_encoder_cache": "encoder reset", "reset_mm_cache": "mm reset"}
_HOUR = 3600.0

GOALS = f"""- No engine dies where what a remedy can give back would have covered what it asked for.
- No remedy under steady traffic that fits, and at most one release in each idle period.
- At most one remedy in vain an hour: one that gave its own component less than {MIN_GAIN // MIB} MiB on every rank.
- From urgent pressure (free memory under half of high water, and something to give back) to the first remedy at most
  {FIRST_SECONDS:g} s; where that did not suffice, from its end to the next at most {NEXT_SECONDS:g} s."""


def table(results: Sequence[Result], layout: str) -> str:
    """A row for each situation."""
    return tabulate([_row(result) for result in results], COLUMNS, tablefmt=layout, disable_numparse=True)


def page(results: Sequence[Result], *, command: str) -> str:
    """The whole page, Markdown."""
    met = sum(not result.missed for result in results)
    listed = "\n".join(f"- `{result.situation.name}`: {result.situation.title}." for result in results)
    return f"""# The policy in situations

For operators who want to know what the default policy does on their device before they run it, and for whoever changes
the policy: the command below says at once what a change breaks.

A situation is a device, an engine on it, and what happens to both. The whole sidecar runs beside a model of them and
talks to it over HTTP, as to vLLM; the model's workers answer through the real worker extension. Time is virtual: it
passes only while all wait. What happened is counted from the model's own state, never from what the sidecar says.

Written by `{command}`; the exit status is 1 where a goal is missed. {met} of {len(results)} situations meet all goals.

## Goals

{GOALS}

## Results

{table(results, "github")}

*died*: engines that ran out of memory; in brackets, those that could have been saved. *in vain*: remedies that freed
too little. *seconds short*: free memory was below high water on some rank. *seconds held*: remedies kept the workers
from their steps. The delays are the longest of the situation; a dash means that there was no urgent pressure with
something to give back.
{_missed(results)}
## Situations

{listed}

## The model

- A rank has weights, a KV pool, memory outside the allocator (context, workspaces), captured graphs' pools, free
  segments that the next step uses again, free segments that fit no step, free pieces of used segments, and encoder
  outputs.
- If an allocation finds no room, the allocator returns its free segments and tries again (`alloc_retries`); if that is
  not enough, the engine dies. Memory outside the allocator (a workspace of 180 MiB on Ascend, a library's buffers)
  cannot make it return anything: this is how engines die beside gigabytes of unused reserve.
- An image takes activations for a moment, leaves its output in the encoder cache, and evicts older ones as the
  scheduler does. Fragments come with images, as measured.
- Sizes are `mem_get_info`'s bytes, 3.1 GiB less than npu-smi counts. A `release` takes 0.4 s, in which no step runs.
  Polls are one second apart, without recorders.
"""


def _missed(results: Sequence[Result]) -> str:
    lines = [f"- `{result.situation.name}`: {missed}." for result in results for missed in result.missed]
    return "\n## Goals missed\n\n" + "\n".join(lines) + "\n" if lines else ""


def _row(result: Result) -> tuple[str, ...]:
    outcome = result.outcome
    covered = f" ({len(outcome.covered_deaths)})" if outcome.deaths else ""
    return (
        result.situation.name,
        f"{outcome.seconds / _HOUR:.1f}",
        f"{len(outcome.deaths)}{covered}",
        _remedies(outcome),
        str(len(outcome.in_vain)),
        f"{outcome.seconds_short:.0f}",
        f"{outcome.seconds_held:.0f}",
        f"{outcome.given_back / GIB:.1f}",
        _longest(outcome.first_delays),
        _longest(outcome.next_delays),
        "met" if not result.missed else "**missed**",
    )


def _remedies(outcome: Outcome) -> str:
    counted = outcome.by_kind
    return ", ".join(f"{counted[kind]} {word}" for kind, word in _KINDS.items() if counted[kind]) or "none"


def _longest(delays: Sequence[float]) -> str:
    return f"{max(delays):.1f}" if delays else "-"

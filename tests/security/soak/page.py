"""The result of a run as figures, as JSON and in docs/figures.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.figure import Figure, Goal, percentile
from bench.page import figures_table, replaced
from tests.security.soak.soak import Options, SoakResult

MB = 1_000_000
MS = 1000


def figures(measured: SoakResult) -> dict[str, Figure]:
    """Return what was measured, each beside its goal."""
    service, left, at_end = measured.service, measured.left(), measured.at_end
    held = [answer.first_byte_seconds for answer in service.answers if service.may_hold(answer)]
    attacked, calm = (_times(measured, has_attackers=has_attackers) for has_attackers in (True, False))
    mark, end = measured.rss_at_mark() / MB, measured.rss_at_end() / MB
    sizes = [size / MB for _, size in measured.rss]
    return {
        "failed": _figure(
            "Ordinary requests that failed",
            service.failed,
            0,
            f"{len(service.answers)} were answered in full; a safe reset may have held {len(held)} of them, one "
            f"for {max(held, default=0.0):.1f} s at most",
        ),
        "operator_failed": _figure(
            "Operator's reads that failed",
            service.reads_failed,
            0,
            f"of {service.reads}; the slowest took {service.slowest_read_seconds * MS:.0f} ms",
        ),
        "first_byte_ratio": _figure(
            "p99 time to first byte, with attackers over without",
            _p(attacked, 99) / _p(calm, 99),
            2.0,
            f"with: {_shown(attacked)}; without: {_shown(calm)}",
        ),
        "rss_growth_mb": _figure(
            "Resident memory at the end, less that at a sixth of the run, MB",
            end - mark,
            8.0,
            f"{mark:.1f} and {end:.1f} MB; {sizes[0]:.1f} MB before the first attack, at most {max(sizes):.1f} MB",
        ),
        "left": _figure(
            "Descriptors, tasks and connections left when all had gone",
            sum(left.values()),
            0,
            ", ".join(f"{name} {count}" for name, count in left.items())
            or f"{at_end.descriptors} descriptors and {sum(at_end.tasks.values())} tasks, as before the run",
        ),
    }


def _figure(what: str, value: float, limit: float, spread: str) -> Figure:
    return Figure(what=what, value=value, unit="", goal=Goal("at most", limit), spread=spread, method="")


def _times(measured: SoakResult, *, has_attackers: bool) -> list[float]:
    answers = measured.answers(has_attackers=has_attackers)
    return [answer.first_byte_seconds for answer in answers if not measured.service.may_hold(answer)]


def _p(values: Sequence[float], percent: float) -> float:
    return percentile(values, percent) if values else float("nan")


def _shown(seconds: Sequence[float]) -> str:
    return f"p50 {_p(seconds, 50) * MS:.0f} ms, p99 {_p(seconds, 99) * MS:.0f} ms of {len(seconds)}"


def facts(measured: SoakResult) -> list[str]:
    """Further numbers of the same run."""
    sentences = [
        f"The sidecar used {measured.sidecar_cores:.2f} cores on average. Processes that are no part of the run used "
        f"{measured.other_cores:.2f}, which makes times longer.",
    ]
    if measured.gave_up is not None:
        sentences.append(f"**The run ended early: {measured.gave_up}.**")
    return sentences


def document(options: Options, measured: SoakResult, *, machine: str, day: str) -> dict[str, Any]:
    """All of it, as JSON."""
    found = figures(measured)
    return {
        "schema": 1,
        "day": day,
        "machine": machine,
        "options": asdict(options),
        "values": {name: figure.value for name, figure in found.items()},
        "p99_first_byte_seconds": {
            name: _p(_times(measured, has_attackers=has_attackers), 99)
            for name, has_attackers in (("with_attackers", True), ("without", False))
        },
        "shown": {name: figure.spread for name, figure in found.items()},
        "gave_up": measured.gave_up,
        "failures": measured.service.failures,
        "rss_bytes": [size for _, size in measured.rss],
        "resets": [asdict(reset) for reset in measured.service.resets],
        "attacks": measured.attacks,
        "sidecar_cores": measured.sidecar_cores,
        "other_cores": measured.other_cores,
    }


def with_run(text: str, options: Options, measured: SoakResult, *, command: str, machine: str, day: str) -> str:
    """docs/figures.md with the run between its marks, Markdown."""
    found = list(figures(measured).values())
    run = f"""
Written by `{command}` on {day}: {options.clients} clients for {options.seconds / 60:g} minutes. Machine: {machine};
engine, sidecar, clients and attackers share it.

{figures_table(found, "github")}

{_listed(facts(measured))}

"""
    return replaced(text, "run", "end of run", run)


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

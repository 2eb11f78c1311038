"""A step's result: checks that passed, failed or were skipped, and figures; written as one JSON file a step."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1
Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One statement about the device, judged.

    Attributes:
        name: Its key among the step's checks.
        says: The statement, in a sentence.
        status: What came of it.
        value: The value that was judged.
        bound: What is right, in words.
        why: The reason where it failed or was skipped.
    """

    name: str
    says: str
    status: Status
    value: float | str | None = None
    bound: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class Figure:
    """One measured number, without a bound."""

    name: str
    value: float
    unit: str


class Findings:
    """Collects what one step finds.

    Args:
        says: The step's checks: their names, and the sentence that each one stands for.
    """

    def __init__(self, says: Mapping[str, str]) -> None:
        self._says = says
        self._checks: dict[str, Check] = {}
        self.figures: list[Figure] = []

    def holds(self, name: str, is_so: bool, why: str = "", *, value: float | str | None = None) -> None:
        """Judge a statement that is true or false.

        Args:
            name: The check.
            is_so: Whether it is true.
            why: What was seen instead, where it is false.
            value: The value that shows it.
        """
        self._add(name, is_so, value, None, why or "it is not so")

    def at_most(self, name: str, value: float, bound: float, unit: str) -> None:
        """Judge a number that must not be larger than a bound."""
        self._add(name, value <= bound, value, f"at most {bound:g} {unit}", f"{value:g} {unit}")

    def at_least(self, name: str, value: float, bound: float, unit: str) -> None:
        """Judge a number that must not be smaller than a bound."""
        self._add(name, value >= bound, value, f"at least {bound:g} {unit}", f"{value:g} {unit}")

    def equals(self, name: str, value: float | str | None, expected: float | str | None) -> None:
        """Judge a value that must be a certain one."""
        self._add(name, value == expected, value, str(expected), f"{value} instead of {expected}")

    def skip(self, why: str, *names: str) -> None:
        """Leave checks out, with the reason."""
        for name in names:
            self._put(Check(name, self._says[name], "skipped", why=why))

    def figure(self, name: str, value: float, unit: str) -> None:
        """Keep a number that has no bound."""
        self.figures.append(Figure(name, value, unit))

    def fail_the_rest(self, why: str) -> None:
        """Fail every check that was neither judged nor skipped: the step ended before it, or forgot it."""
        for name in self._says:
            if name not in self._checks:
                self._put(Check(name, self._says[name], "failed", why=why))

    @property
    def checks(self) -> list[Check]:
        """The checks in the order in which the step lists them."""
        return [self._checks[name] for name in self._says if name in self._checks]

    def _add(self, name: str, is_so: bool, value: float | str | None, bound: str | None, why: str) -> None:
        status: Status = "passed" if is_so else "failed"
        self._put(Check(name, self._says[name], status, value, bound, None if is_so else why))

    def _put(self, check: Check) -> None:
        known = self._checks.get(check.name)
        # A check that is judged several times, once for each variant, keeps the worst.
        if known is None or _WORST.index(check.status) <= _WORST.index(known.status):
            self._checks[check.name] = check


_WORST: Sequence[Status] = ("failed", "passed", "skipped")


@dataclass
class StepResult:
    """The entry of one run of one step."""

    step: str
    says: str
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str
    started: str
    seconds: float
    checks: Sequence[Check]
    figures: Sequence[Figure]
    error: str | None = None
    schema: int = field(default=SCHEMA)

    @property
    def has_failed(self) -> bool:
        """True where a check failed."""
        return any(check.status == "failed" for check in self.checks)

    def count(self, status: Status) -> int:
        """Return how many checks came out so."""
        return sum(check.status == status for check in self.checks)

    def write(self, folder: Path) -> Path:
        """Write it as `STEP-DEVICE.json`, so that runs on two kinds of device lie beside each other."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.step}-{self.device['type']}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path


def read_result(content: Mapping[str, Any]) -> StepResult:
    """Return a result as `write` wrote it.

    Raises:
        ValueError: It is of another schema.
    """
    if content.get("schema") != SCHEMA:
        raise ValueError(f"schema is {content.get('schema')}; this program reads {SCHEMA}")
    checks = [Check(**check) for check in content["checks"]]
    return StepResult(**{**content, "checks": checks, "figures": [Figure(**one) for one in content["figures"]]})


def now() -> str:
    """Return the time as results have it, in UTC."""
    return datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M:%S")

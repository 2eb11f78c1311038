"""What each remedy, and each naive call, did to each version of the engine: one record a test, kept as JSON.

`docs/compat.md` is rendered from the file. A record takes the place of an earlier one of the same version, remedy and
way, so that one test can be run again by itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """What one way to use one remedy came to on one version.

    Attributes:
        version: vLLM's.
        remedy: As in the allow-list: `reset_mm_cache`.
        way: How it was applied: `naive`, or what Highwater does in its place.
        outcome: In two or three words: `engine dies`, `nothing failed`.
        figures: The numbers behind it, by name with unit; texts where no number would do.
    """

    version: str
    remedy: str
    way: str
    outcome: str
    figures: dict[str, float | str]

    @property
    def key(self) -> tuple[tuple[int, ...], str, str]:
        """What there is one record of, and the order of the records."""
        return tuple(int(part) for part in self.version.split(".")), self.remedy, self.way


def read(path: Path) -> list[Result]:
    return [Result(**one) for one in json.loads(path.read_text())] if path.exists() else []


def keep(path: Path, result: Result) -> None:
    kept = sorted([one for one in read(path) if one.key != result.key] + [result], key=lambda one: one.key)
    path.write_text(json.dumps([asdict(one) for one in kept], indent=2) + "\n")

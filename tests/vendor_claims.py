"""The table of what we believe of others' source, and how a comment cites a place in it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("vllm", "vllm_ascend", "torch", "torch_npu")
# `vllm 0.32.0 v1/worker/gpu_worker.py:649`: package, version, file within the package, line.
CITATION = re.compile(rf"\b({'|'.join(PACKAGES)}) (\d[\w.]*) ((?:[\w.]+/)*\w+\.(?:py|h|cpp)):(\d+)")


@dataclass(frozen=True)
class Place:
    """A line of a file of a version of a package."""

    package: str
    version: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.package} {self.version} {self.file}:{self.line}"


@dataclass(frozen=True)
class Claim:
    """One entry; vendor_claims.toml says what each key is."""

    says: str
    text: str
    places: tuple[Place, ...]
    within: str | None
    unpublished: str | None


def cited_in(text: str) -> list[Place]:
    return [Place(package, version, file, int(line)) for package, version, file, line in CITATION.findall(text)]


def _claim(entry: dict[str, object]) -> Claim:
    known = {"says", "package", "at", "text", "within", "unpublished"}
    assert set(entry) <= known, f"unknown keys in {entry}"
    places = [place for at in entry["at"] for place in cited_in(f"{entry['package']} {at}")]
    assert len(places) == len(entry["at"]), f"not a version, file and line: {entry['at']}"
    text, within, unpublished = str(entry["text"]), entry.get("within"), entry.get("unpublished")
    return Claim(str(entry["says"]), text, tuple(places), within, unpublished)


CLAIMS = tuple(map(_claim, tomllib.loads((Path(__file__).parent / "vendor_claims.toml").read_text("utf-8"))["claim"]))

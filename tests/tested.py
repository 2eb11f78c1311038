"""Which engines tests found themselves beside: docs/tested.json, written by tests, and compared with on every run.

docs/tested.toml says for readers what was run; its rows of engines are those that have a record here, and no others
(tests/helm/test_tested.py). A test that starts an engine asks its worker, and `confirm`s what it answered.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

PATH = Path(__file__).resolve().parents[1] / "docs" / "tested.json"
WRITES = "HIGHWATER_TESTED"
"""Where it is set, records are written; else one that is missing fails the test."""
NO_CARD = "cuda, no card"


@dataclass(frozen=True, order=True)
class Ran:
    """An engine that a test ran.

    Attributes:
        version: vLLM's, by its own word.
        runner: `V1` or `V2`, by the worker's word; `none` where no engine was started.
        device: The type of the worker's device; `npu, simulated` where a stand-in is below torch_npu; `cuda, no card`
            where vLLM's build for CUDA was there and no driver.
        beside: What vLLM ran with: `vllm-ascend 0.30.0rc2`; empty where it was alone.
        by: The file of the test.
    """

    version: str
    runner: str
    device: str
    beside: str
    by: str

    @classmethod
    def of_worker(
        cls,
        memory: Mapping[str, Any],
        budget: Mapping[str, Any],
        by: str,
        *,
        is_simulated: bool = False,
        ascend_version: str | None = None,
    ) -> Self:
        """Return what a worker says of itself."""
        device = f"{memory['device']['type']}{', simulated' if is_simulated else ''}"
        engine, beside = budget["engine_budget"], f"vllm-ascend {ascend_version}" if ascend_version else ""
        runner = "V2" if engine["limits"]["v2_runner"] else "V1"
        return cls(str(engine["vllm_version"]).partition("+")[0], runner, device, beside, _name(by))

    @classmethod
    def without_card(cls, version: str, by: str) -> Self:
        return cls(version, "none", NO_CARD, "", _name(by))

    @property
    def engine(self) -> tuple[str, str, str, str]:
        return self.version, self.runner, self.device, self.beside


def rows() -> list[tuple[str, str, str, str]]:
    """Return the engines that docs/tested.toml names, in its order."""
    engines = tomllib.loads(PATH.with_suffix(".toml").read_text("utf-8"))["engine"]
    return [(row["version"], row["runner"], row["device"], row.get("beside", "")) for row in engines]


def records() -> list[Ran]:
    return [Ran(**one) for one in json.loads(PATH.read_text("utf-8"))]


def confirm(found: Ran) -> None:
    """Hold what a test found to the record; or write it there, and drop what docs/tested.toml names no more."""
    assert found.engine in rows(), f"docs/tested.toml has no row of {found.engine}, which {found.by} ran"
    kept = records()
    if os.environ.get(WRITES):
        kept = sorted({found, *(one for one in kept if one.engine in rows())})
        PATH.write_text(json.dumps([asdict(one) for one in kept], indent=1) + "\n", "utf-8")
    assert found in kept, f"{found} is not in docs/tested.json; with {WRITES}=1 this test writes it"


def _name(path: str) -> str:
    return Path(path).resolve().relative_to(PATH.parents[1]).as_posix()

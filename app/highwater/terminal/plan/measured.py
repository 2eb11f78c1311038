"""A start's own figures, from its log as any collector keeps it, or from a file of `highwater explain --json`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from highwater.diagnose.log.reader import Reader, WholeLines
from highwater.explain.command_line import Line, size_of
from highwater.explain.roads import read_content
from highwater.explain.ways_out import OF_ALL, OF_PEAK, carried, default_of
from highwater.model.units import GIB
from kvplan import PlanError
from kvplan.generations import DEFAULT_UTILIZATION

MAX_FILE_BYTES: Final = 64_000_000
_GIB: Final = r"(-?\d{1,6}\.\d{1,4}) ?GiB"  # a start that fails has less than nothing left
_SUMMARY: Final = "Free memory on device "
# vLLM 0.11 to 0.33, v1/worker/gpu_worker.py and gpu_model_runner.py. From 0.27 on the weights and what is not PyTorch's
# are one figure, and the peak holds the graphs' estimate.
_PRINTED: Final[Mapping[str, re.Pattern[str]]] = {
    "weights": re.compile(rf"Model loading took {_GIB}"),
    "kv": re.compile(rf"Available KV cache memory: {_GIB}"),
    "graphs": re.compile(rf"Estimated CUDA graph memory: {_GIB} total"),
    "total": re.compile(rf"{_SUMMARY}\([\d.]{{1,9}}/(\d{{1,6}}\.\d{{1,4}}) GiB\)"),
    "requested": re.compile(rf"{_SUMMARY}.{{1,99}}? utilization is \([\d.]{{1,9}}, {_GIB}\)"),
    "consumed": re.compile(rf"{_SUMMARY}.{{1,199}}? usage is {_GIB} for consumed memory"),
    "activation": re.compile(rf"{_SUMMARY}.{{1,299}}? {_GIB} for peak activation"),
    "non_torch": re.compile(rf"{_SUMMARY}.{{1,399}}? {_GIB} for non-torch memory"),
}
_BEGINS: Final = re.compile(r"Initializing a V1 LLM engine|vLLM API server version")
_ARGUMENTS: Final = re.compile(r"non-default args: (\{.*\})")


@dataclass(slots=True)
class MeasuredStart:
    """One start: bytes by part as a question of docs/plan-by-vllm.md has them, and what they cannot be used for."""

    parts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_measured(path: Path, line: Line, device_bytes: int | None) -> MeasuredStart:
    """Return what the last start in a file measured, of several ranks the one with the fewest bytes left.

    Parts whose flags differ from those of ``line`` are left out, with a note. Raises PlanError: there is no start.
    """
    content = read_content(path, MAX_FILE_BYTES, "for --measured the log of one start")
    try:
        explained = json.loads(content)["explanation"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _of_log(WholeLines().of(content), path, line, device_bytes)
    try:
        binding = min(explained["ranks"], key=lambda rank: rank.get("available_bytes") or 0)
        parts: dict[str, int] = {"buffers": 0}
        names = {"persistent": "non_torch", "consumed": "non_torch"}
        for part in binding["parts"]:
            key = names.get(part["key"], part["key"])
            if key in ("weights", "activation", "non_torch", "graphs"):
                parts[key] = parts.get(key, 0) + int(part["bytes"])
        start = MeasuredStart(parts=parts)
        # The limits have defaults filled in: what the line does not say is no difference.
        settled = line.settled()
        limits = {key: to for key, to in (explained.get("limits") or {}).items() if settled.value(key) is not None}
        parallel = explained.get("parallel") or {}
        reported = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **limits, **parallel}
        _compare(start, reported, settled, [name for name in (*OF_ALL, *OF_PEAK) if name in reported])
        return start
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
        raise PlanError(f"--measured: {path} describes no start: explanation.ranks has no parts") from exc


def _of_log(texts: Iterable[str], path: Path, line: Line, device_bytes: int | None) -> MeasuredStart:
    ranks: dict[str | None, dict[str, int]] = {}
    arguments: dict[str, Any] = {}
    for _, lines in Reader().read(texts):
        for logged in lines:
            if _BEGINS.search(logged.message):
                ranks = {}
            if (given := _ARGUMENTS.search(logged.message)) is not None:
                arguments = {}
                with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # cut, or with objects
                    arguments = dict(ast.literal_eval(given[1]))
            elif not logged.is_clients:
                for name, pattern in _PRINTED.items():
                    if (printed := pattern.match(logged.message)) is not None:
                        ranks.setdefault(logged.process, {})[name] = round(float(printed[1]) * GIB)
    ranks = {process: printed for process, printed in ranks.items() if "weights" in printed or "kv" in printed}
    if not ranks:
        raise PlanError(f"--measured: {path} has no line of a start, such as 'Model loading took 14.99 GiB memory'")
    binding = min(ranks.values(), key=lambda printed: printed.get("kv", 0))
    start = MeasuredStart(parts=_parts(binding, arguments, device_bytes))
    before = Path(str(arguments.get("model_tag", arguments.get("model")) or "")).name
    settled = line.settled()
    now = _name_of(line.model or settled.value("model"))
    if before and now and before != now:
        raise PlanError(
            f"--measured: {path} is a start of {before!r}, and the command line serves {now!r}; if they are one model,"
            " give its folder the log's name"
        )
    _compare(start, arguments, settled, (*OF_ALL, *OF_PEAK))
    return start


def _name_of(model: str | None) -> str:
    """Return a model's name as a log has it; empty: a file alone does not say it."""
    file = Path(model or "")
    if model == "-" or (file.is_file() and file.name != "config.json"):
        return ""
    return file.absolute().parent.name if file.is_file() else file.name


def _parts(printed: Mapping[str, int], arguments: Mapping[str, Any], device_bytes: int | None) -> dict[str, int]:
    """Return the parts, so that they leave what was printed for the KV cache of the share that was asked for."""
    parts = {name: printed[name] for name in ("weights", "activation", "non_torch", "graphs") if name in printed}
    if "consumed" in printed and "weights" in printed:
        parts["non_torch"] = max(printed["consumed"] - printed["weights"], 0)
        parts |= {"buffers": 0, "graphs": 0}  # in the one figure, and in the peak
    total = printed.get("total") or device_bytes
    share = arguments.get("gpu_memory_utilization") or DEFAULT_UTILIZATION
    share = share if isinstance(share, float) and 0 < share <= 1 else 1.0 if share == 1 else DEFAULT_UTILIZATION
    requested = printed.get("requested") or (None if total is None else round(total * share))
    if requested is None or "kv" not in printed or "weights" not in printed:
        return parts
    rest = requested - printed["kv"] - sum(parts.values())
    name = "graphs" if "non_torch" in parts else "non_torch" if "activation" in parts else "activation"
    zero = dict.fromkeys(("weights", "activation", "non_torch", "buffers", "graphs"), 0)
    return {**zero, **parts, name: max(parts.get(name, 0) + rest, 0)}


def _compare(start: MeasuredStart, arguments: Mapping[str, Any], line: Line, names: Iterable[str]) -> None:
    """Leave out what another command line measured, and say so."""
    for name in names:
        before, now = _word(arguments.get(name, default_of(name))), _word(line.value(name) or default_of(name))
        if before == now:
            continue
        kept = carried(start.parts, name)
        lost, start.parts = [part for part in start.parts if part not in kept], kept
        what = f"--{name.replace('_', '-')} {before or 'not given'}, this line {now or 'not given'}"
        start.notes.append(f"the measured start had {what}: its {', '.join(lost) or 'parts'} do not carry over")


def _word(value: object) -> str:
    """Return a value in one spelling, whether a log or a command line has it."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.startswith("{") else size_of(value)
        except (ValueError, RecursionError):
            return str(value)
    if isinstance(value, dict):
        return json.dumps({str(key): one for key, one in value.items()}, sort_keys=True, default=str)
    return "" if value is None else str(value)

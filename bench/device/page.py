"""docs/devices.md, made of the results of the steps, which docs/devices.json keeps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.device.results import Check, StepResult, read_result
from bench.device.steps import STEPS

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS, PAGE = DOCS / "devices.json", DOCS / "devices.md"
ASCEND = Path(__file__).resolve().parents[2] / "tests" / "compat" / "ascend_sources.json"
KINDS = {"cuda": "NVIDIA", "npu": "Ascend", "cpu": "CPU"}
MIB = 1024**2
MAX_FIGURES = 18
_HEAD = """# What ran on which device

For those who decide whether to trust a claim about a device: what ran on which device, with which results, and how to
[run the checks yourself](#running-it-yourself). `make device` writes this page from docs/devices.json, which names
every check.
"""
_RUNNING = """## Running it yourself

On the machine with the device, from a checkout, with the Python that has PyTorch (on an Ascend also torch_npu). Only
the last step needs vLLM. No engine may use the device meanwhile:

```sh
export PYTHONPATH=app:worker_ext:.
python -m bench.device --list            # the steps
python -m bench.device needs             # the modules that are missing here, by step
python -m bench.device reading           # one step, under eight minutes each; or `all`
python -m bench.device page build/device # docs/devices.md, with what these results say
```

Each step writes build/device/STEP-DEVICE.json (`--out` names another folder). The exit status is 1 if a check failed;
checks that are impossible here are skipped, with the reason. Without network, `make device-wheels WHEELS_PYTHON=3.12`
on another machine fetches missing modules (`WHEELS_MACHINE=aarch64` for that architecture); install them with
`pip install --no-index --no-deps build/device-wheels/*.whl`. With `WHEELS_TORCH=2.11.0`, the version there, it
fetches vLLM for the last step too: its Python files and what they import, under 40 MiB, in build/device-vllm.tar.xz.
That engine computes without vLLM's kernels, attention in Triton and the rest in PyTorch. On a device it has not run;
without one it was tried until the worker asks for it (tests/compat/test_device_engine.py). Please send the JSON files.

Without a device, `python -m tests.fakes.cann -m bench.device STEP --device npu:0` runs a step on the simulated one. It
needs a C compiler.
"""

_SIMULATED = """{name}: {total} that a stand-in for CANN counts (tests/fakes/cann), with every operator computed on the
CPU. torch_npu's binary is the real one: its allocator, copies, pinned memory, snapshots and messages. Versions:
{versions}.

It cannot show: operators' and kernels' workspaces, any speed (figures in ms and GB/s are this machine's), work that the
device has yet to do, graphs (a private pool stands for one's), fragmentation below the allocator, HCCL (two ranks
talk through the host), and sleep mode as it ships (the allocator that it needs was compiled from vllm-ascend's source).

vLLM 0.30.0 with vllm-ascend 0.30.0rc2 ran on it too: start, budget, encoder cache, trim, restore at access, reset and
release in one process, and as a server with a sidecar before it. That server ran out of memory without the policy, and
not with it: [the typical case](ascend.md#the-typical-case-on-a-simulated-npu), `make demo-ascend`. A device that is
lost (507010) is named in the report, in `check` and in the incident. Eager: neither graphs nor its
runner V2 (tests/own_engine/test_vllm_ascend.py, test_vllm_ascend_server.py)."""


_TRIED_HEAD = ("vllm-ascend, simulated", "stopped by", "then")
_TRIED = (
    (
        "two ranks, `-tp 2`",
        "`Failed to find function HcclGetRootInfo`: HCCL",
        "runs, with collectives through the host: tests/own_engine/test_vllm_ascend_ranks.py",
    ),
    (
        "sleep mode",
        "`'NoneType' object is not callable` in camem.py: the compiled `vllm_ascend_C`",
        "runs, with vllm-ascend's own allocator compiled from its source: the same test. To be woken it needs "
        "`weight_nz_mode: 0` in `--additional-config`, else `FRACTAL_NZ mode is enabled`",
    ),
    (
        "graphs, by torch.compile",
        "`Operator does not support running with fake tensors: vllm.triton_split_qkv_rmsnorm_mrope`",
        "stopped: the stand-in for that kernel has no form for the compiler",
    ),
    (
        "graphs alone, `FULL_DECODE_ONLY`",
        "`Failed to find function aclmdlRICaptureBegin`",
        "stopped at the first capture: CANN's graphs would need a device that records what it is to compute",
    ),
    (
        "model runner V2",
        "`Model Runner V2 requires Triton`",
        "stopped: with Triton's interpreter as the driver, `Failed to resolve Triton op 'insert_slice'`, of "
        "triton-ascend",
    ),
    (
        "0.23.0.post1, under vLLM 0.23.0",
        "`OPS function error: AddRmsNorm`: an operator that 0.30 does not call",
        "runs, with stand-ins for that and for `_npu_reshape_and_cache`: tests/own_engine/test_vllm_ascend_older.py",
    ),
)
"""Each try: its subject, its first error, and what came of it."""
_TRIED_WITH = "On the simulated device, vLLM 0.30.0 and vllm-ascend 0.30.0rc2 where no other is named."


def merge(results: Iterable[StepResult], folder: Path) -> list[StepResult]:
    """Return the kept results with those of a folder put in the place of older ones of the same step and device."""
    by_key = {_key(result): result for result in results}
    for path in sorted(folder.glob("*.json")):
        result = read_result(json.loads(path.read_text(encoding="utf-8")))
        by_key[_key(result)] = result
    order = list(STEPS)
    return sorted(by_key.values(), key=lambda result: (str(result.device["type"]), order.index(result.step)))


def kept(path: Path = RESULTS) -> list[StepResult]:
    """Return the results that the documentation keeps."""
    return [read_result(one) for one in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def devices_page(results: Sequence[StepResult], ascend: Mapping[str, Any] | None = None) -> str:
    """Return the whole page, Markdown.

    Args:
        results: The results to show.
        ascend: The table of what was read in Ascend's packages; None without one.
    """
    parts = [_HEAD, _overview(results)]
    by_device: dict[str, list[StepResult]] = {}
    for result in results:
        by_device.setdefault(str(result.device["name"]), []).append(result)
    parts += [_device(of_one) for of_one in by_device.values()]
    if ascend is not None:
        parts.append(_ascend(ascend))
    parts += ["## Tried, and what stopped it", "", _TRIED_WITH, "", *_table(_TRIED_HEAD, _TRIED), ""]
    return "\n".join([*parts, _RUNNING])


def _key(result: StepResult) -> tuple[str, str]:
    return result.step, str(result.device["name"])


def _overview(results: Sequence[StepResult]) -> str:
    lines = []
    for kind, vendor in KINDS.items():
        of_both = [result for result in results if result.device["type"] == kind]
        of_kind = [result for result in of_both if not _is_simulated(result)]
        simulated = [result for result in of_both if _is_simulated(result)]
        absent = [name for name in STEPS if name not in {result.step for result in of_kind}]
        if simulated and not of_kind:
            on = f"On a [simulated device]({_anchor(simulated[0])}), under {_vendor_torch(simulated[0])}"
            lines.append(f"- **{vendor}: not run on a device.** {on}: {_counts(simulated)}.")
        elif not of_kind:
            lines.append(f"- **{vendor}: no step has run.** Claims come from sources and simulation.")
        else:
            names = ", ".join(dict.fromkeys(str(result.device["name"]) for result in of_kind))
            not_run = f" Not run: {', '.join(absent)}." if absent else ""
            lines.append(f"- **{vendor}** ({names}): {_counts(of_kind)}.{not_run}")
    return "\n".join([*lines, ""])


def _is_simulated(result: StepResult) -> bool:
    return bool(result.device.get("is_simulated"))


def _vendor_torch(result: StepResult) -> str:
    return f"the real torch_npu {result.versions['torch_npu'].partition('+')[0]}"


def _simulated_head(result: StepResult) -> str:
    return f"Simulated device, {_vendor_torch(result).removeprefix('the ')}, {result.started.partition(' ')[0]}"


def _anchor(result: StepResult) -> str:
    words = _simulated_head(result).lower().replace(" ", "-")
    return "#" + "".join(letter for letter in words if letter.isalnum() or letter in "-_")


def _counts(results: Sequence[StepResult]) -> str:
    passed, failed, skipped = (
        sum(result.count(status) for result in results) for status in ("passed", "failed", "skipped")
    )
    return f"{passed} checks passed, {failed} failed, {skipped} were skipped"


def _device(results: Sequence[StepResult]) -> str:
    first = results[0]
    kind, name = KINDS[str(first.device["type"])], first.device["name"]
    driver = first.device["driver"] or "none"
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    total = _value(first.device["total_bytes"], "bytes")
    lines = [f"## {kind}: {name}", "", f"Memory: {total}. Driver: {driver}. Versions: {versions}.", ""]
    if _is_simulated(first):
        lines = [f"## {_simulated_head(first)}", "", _SIMULATED.format(name=name, total=total, versions=versions), ""]
    lines += _skipped([check for result in results for check in result.checks])
    for result in results:
        lines += [f"### {STEPS[result.step].SAYS[0].upper()}{STEPS[result.step].SAYS[1:]}", ""]
        command = result.command
        if _is_simulated(result):
            command = command.replace("python -m", "python -m tests.fakes.cann -m", 1)
        ran = f"`{command}`, {result.started} UTC, {result.seconds:.0f} s"
        skipped = result.count("skipped")
        lines += [f"{ran}: {result.count('passed')} passed{f', {skipped} skipped' if skipped else ''}.", ""]
        if result.error:
            lines += [f"The step ended early: {_cell(result.error)}", ""]
        rows = [(check.says, check.status, _seen(check)) for check in result.checks if check.status == "failed"]
        lines += [*_table(("check", "result", "seen"), rows), ""] if rows else []
        if result.figures:
            figures = [f"`{figure.name}` {_value(figure.value, figure.unit)}" for figure in result.figures]
            more = len(figures) - MAX_FIGURES
            rest = f"; {more} more are in docs/devices.json" if more > 0 else ""
            lines += [f"Measured: {', '.join(figures[:MAX_FIGURES])}{rest}.", ""]
    return "\n".join(lines)


def _skipped(checks: Sequence[Check]) -> list[str]:
    """Return how many checks were skipped for which reason; docs/devices.json names the checks."""
    reasons = Counter(check.why or "no reason given" for check in checks if check.status == "skipped")
    return [f"{'; '.join(f'{count} skipped: {_cell(why)}' for why, count in reasons.items())}.", ""] if reasons else []


def _seen(check: Check) -> str:
    """Return what a failed check saw, and the bound that it missed."""
    seen = check.why or ("" if check.value is None else _value(check.value, ""))
    return f"{seen}; {check.bound}" if check.bound else seen


def _ascend(table: Mapping[str, Any]) -> str:
    """Return what differs from version to version as a table, and how many names do not."""
    versions: dict[str, dict[tuple[str, str], list[str]]] = {}
    for entry in table["found"]:
        found = versions.setdefault(entry["name"], {})
        found.setdefault((entry["package"], entry["found"]), []).append(entry["version"])
    rows = [
        (f"`{name}`", "; ".join(f"{package} {', '.join(of)}: `{what}`" for (package, what), of in found.items()))
        for name, found in versions.items()
        if len(found) > 1
    ]
    same = sum(len(found) == 1 for found in versions.values())
    lines = ["## Ascend: read in the packages", "", str(table["note"]), ""]
    lines += [*_table(("name", "found"), rows), ""] if rows else []
    if same:
        where = "tests/compat/ascend_sources.json has the signatures"
        lines += [f"{same} more are the same in every version; {where}.", ""]
    return "\n".join(lines)


def _value(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return f"{value / MIB:z,.1f} MiB"
    number = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{number} {unit}".rstrip()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table of Markdown; by hand, for the machine with the device may have no library for it."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(_cell, line))} |" for line in lines]


def _cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())

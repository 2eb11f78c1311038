"""docs/devices.md, made of the results of the steps, which docs/devices.json keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.device.results import Check, StepResult, read_result
from bench.device.steps import STEPS

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS, PAGE = DOCS / "devices.json", DOCS / "devices.md"
KINDS = {"cuda": "NVIDIA", "npu": "Ascend", "cpu": "CPU"}
GIB = 1024**3
SHOWN = {
    "release_median": "`release` stops the engine, median",
    "trim_median": "`trim` stops the engine, median",
    "memory_median": "a reading by a call, median",
    "sample_idle_median": "a recorder's sample, median",
    "pinned_to_host": "trim, pinned memory",
    "pinned_to_device": "restore, pinned memory",
}
"""The figures that the page shows, and what it calls them; docs/devices.json has all."""
_HEAD = """# What ran on which device

For those who decide whether to trust a claim about a device: what ran where, and how to [run it
yourself](#running-it-yourself). `make device` writes this page from docs/devices.json, which names every check, figure
and version.
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

Each step writes build/device/STEP-DEVICE.json; please send these files. The exit status is 1 if a check failed;
impossible ones are skipped, with the reason in that file. Without network, `make device-wheels
WHEELS_PYTHON=3.12 WHEELS_TORCH=2.11.0` on another machine fetches missing modules (`WHEELS_MACHINE=aarch64` for that
architecture), for `pip install --no-index --no-deps build/device-wheels/*.whl`, and vLLM without its kernels.

Without a device, `python -m tests.fakes.cann -m bench.device STEP --device npu:0` runs a step on the simulated one. It
needs a C compiler.
"""

_SIMULATED = """A stand-in for CANN counts {total} (tests/fakes/cann), and every operator is computed on the CPU.
torch_npu's binary is the real one: its allocator, copies, pinned memory, snapshots and messages.

It cannot show: workspaces of operators, any speed (times are this machine's), work that the device has yet to do,
graphs, model runner V2 (triton-ascend), fragmentation below the allocator, HCCL (two ranks talk through the host), and
sleep mode as it ships (its allocator was compiled from vllm-ascend's source, and vllm-ascend needs `weight_nz_mode: 0`
in `--additional-config` to be woken).

vLLM 0.30.0 with vllm-ascend 0.30.0rc2 ran on it too, eager, with runner V1: start, budget, encoder cache, trim,
restore, reset and release in one process, two ranks, sleep mode, and as a server with a sidecar before it ([the typical
case](ascend.md#the-typical-case-on-a-simulated-npu)). Of other versions of torch_npu and vllm-ascend the names that
Highwater uses were read (tests/compat/ascend_sources.json)."""


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


def devices_page(results: Sequence[StepResult]) -> str:
    """Return the whole page, Markdown."""
    by_device: dict[str, list[StepResult]] = {}
    for result in results:
        by_device.setdefault(str(result.device["name"]), []).append(result)
    parts = [_HEAD, _overview(results), *_steps(by_device), *_figures(by_device)]
    parts += [_device(of_one) for of_one in by_device.values()]
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


def _steps(by_device: Mapping[str, Sequence[StepResult]]) -> list[str]:
    """Return how many checks of each step passed and were skipped on each device, as a table."""
    rows = []
    for step, module in STEPS.items():
        row = [f"`{step}`: {module.SAYS}"]
        for results in by_device.values():
            counts = [
                ", ".join(f"{n} {status}" for status in ("passed", "failed", "skipped") if (n := result.count(status)))
                for result in results
                if result.step == step
            ]
            row.append(counts[0] if counts else "not run")
        rows.append(row)
    return [*_table(("step", *by_device), rows), ""]


def _figures(by_device: Mapping[str, Sequence[StepResult]]) -> list[str]:
    """Return what was measured on each device, as a table of the figures that are shown."""
    measured = [
        {figure.name: _value(figure.value, figure.unit) for result in results for figure in result.figures}
        for results in by_device.values()
    ]
    rows = [(says, *(of_one.get(name, "-") for of_one in measured)) for name, says in SHOWN.items()]
    return [*_table(("measured", *by_device), rows), ""]


def _device(results: Sequence[StepResult]) -> str:
    """Return what is to be known of one device: its memory, versions, and the checks that failed or were skipped."""
    first = results[0]
    kind, name = KINDS[str(first.device["type"])], first.device["name"]
    driver = first.device["driver"] or "none"
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    total = _value(first.device["total_bytes"], "bytes")
    day = first.started.partition(" ")[0]
    lines = [f"## {kind}: {name}", "", f"{day}. Memory: {total}. Driver: {driver}. Versions: {versions}.", ""]
    if _is_simulated(first):
        lines = [f"## {_simulated_head(first)}", "", f"{_SIMULATED.format(total=total)}", ""]
    for result in results:
        if result.error:
            lines += [f"`{result.step}` ended early: {_cell(result.error)}", ""]
        rows = [(check.says, check.status, _seen(check)) for check in result.checks if check.status == "failed"]
        lines += [*_table(("check", "result", "seen"), rows), ""] if rows else []
    return "\n".join(lines)


def _seen(check: Check) -> str:
    """Return what a failed check saw, and the bound that it missed."""
    seen = check.why or ("" if check.value is None else _value(check.value, ""))
    return f"{seen}; {check.bound}" if check.bound else seen


def _value(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return f"{value / GIB:z,.2f} GiB"
    number = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{number} {unit}".rstrip()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table of Markdown; by hand, for the machine with the device may have no library for it."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(_cell, line))} |" for line in lines]


def _cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())

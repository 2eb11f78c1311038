"""`python -m bench.device STEP [--out DIR]`: run a step, write its result; `--list`, `needs`, `wheels` and `page`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from bench.device import needs, vllm_files
from bench.device.results import Findings, StepResult, now
from bench.device.steps import STEPS
from bench.device.torch_device import TorchDevice

OUT = Path("build/device")
WHEELS = Path("build/device-wheels")


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line names; the status is 1 where a check failed."""
    wanted = _arguments(arguments)
    if wanted.list:
        print("\n".join(f"{name:12} {step.SAYS}" for name, step in STEPS.items()))
        return 0
    if wanted.what == "needs":
        print(needs.report())
        return 0
    if wanted.what == "wheels":
        return _fetch(wanted)
    if wanted.what == "page":
        return _write_page(wanted.folder or OUT)
    names = list(STEPS) if wanted.what == "all" else [wanted.what]
    on = TorchDevice(wanted.device)
    results = [run_step(name, on) for name in names]
    for result in results:
        print(f"{summary(result)}\n{result.write(wanted.out)}")
    return int(any(result.has_failed for result in results))


def run_step(name: str, on: TorchDevice) -> StepResult:
    """Run one step. An error within it fails every check that it had not reached, and is kept."""
    step = STEPS[name]
    found, started, began, error = Findings(step.CHECKS), now(), time.monotonic(), None
    print(f"{name} on {on.device} ...", flush=True)
    try:
        step.run(on, found)
    except Exception as exc:  # noqa: BLE001 - what was found so far is worth a page too; the rest fails with it
        traceback.print_exc()
        error = f"{type(exc).__name__}: {exc}"[:1000]
    found.fail_the_rest(f"the step ended before: {error}" if error else "the step did not come to it")
    return StepResult(
        step=name,
        says=step.SAYS,
        device=on.description(),
        versions=on.versions(),
        command=f"python -m bench.device {name} --device {on.device}",
        started=started,
        seconds=round(time.monotonic() - began, 1),
        checks=found.checks,
        figures=found.figures,
        error=error,
    )


def summary(result: StepResult) -> str:
    """Return a result as lines for a terminal."""
    lines = [f"{check.status:8} {check.name}{': ' + check.why if check.why else ''}" for check in result.checks]
    counts = ", ".join(f"{result.count(status)} {status}" for status in ("passed", "failed", "skipped"))
    return "\n".join([*lines, f"{result.step}: {counts}, {result.seconds:.0f} s"])


def _fetch(wanted: argparse.Namespace) -> int:
    machine = {"python": wanted.python, "machine": wanted.machine}
    try:
        size = needs.fetch(WHEELS, **machine)
        print(f"{WHEELS}: {len(list(WHEELS.iterdir()))} wheels, {size / 1024**2:.1f} MiB")
        if wanted.torch:
            size = vllm_files.fetch(vllm_files.ARCHIVE, torch=wanted.torch, **machine)
            print(f"{vllm_files.ARCHIVE}: vLLM {vllm_files.release_for(wanted.torch)}, {size / 1024**2:.1f} MiB")
    except vllm_files.NoReleaseError as error:
        print(f"--torch {wanted.torch}: {error}", file=sys.stderr)
        return 1
    return 0


def _write_page(folder: Path) -> int:
    # Late: the page is written in a checkout, the steps run where only a part of it was carried.
    from bench.device import page  # noqa: PLC0415 - see above

    results = page.merge(page.kept(), folder)
    page.RESULTS.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")
    page.PAGE.write_text(page.devices_page(results), encoding="utf-8")
    print(f"{page.PAGE}: {len(results)} results")
    return 0


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.device", description=(__doc__ or "").partition("\n")[0])
    others = ("all", "needs", "wheels", "page")
    parser.add_argument("what", nargs="?", choices=[*STEPS, *others], help="a step, or one of the other commands")
    parser.add_argument("folder", nargs="?", type=Path, help=f"page: the folder of the results; {OUT} by default")
    parser.add_argument("--list", action="store_true", help="the steps, a line each")
    parser.add_argument("--device", help="cuda:0, npu:0 or cpu; by default the first accelerator, else the CPU")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder for results; %(default)s by default")
    parser.add_argument("--python", default="3.12", help="wheels: for this Python; %(default)s by default")
    parser.add_argument("--torch", help="wheels: vLLM too, without its kernels, for this PyTorch, such as 2.11.0")
    parser.add_argument("--machine", default="x86_64", help="wheels: for this architecture; %(default)s by default")
    wanted = parser.parse_args(arguments)
    if wanted.what is None and not wanted.list:
        parser.error("name a step, or --list")
    return wanted


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.fakes.cann -m MODULE ...`: run a program of this checkout with a simulated NPU of 8 GiB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from highwater.terminal.demo.engine import ensure_environment
from tests.engines import with_modules_of_the_sidecar
from tests.fakes.cann.npu import SimulatedNpu

ROOT = Path(__file__).resolve().parents[3]

if __name__ == "__main__":
    engine = ensure_environment(announce=print)
    with TemporaryDirectory() as folder:
        npu = SimulatedNpu(Path(folder, "cann"), engine, total_bytes=8 << 30)
        environ = npu.environ(*with_modules_of_the_sidecar(engine, Path(folder, "modules")))
        sys.exit(subprocess.run([str(engine.python), *sys.argv[1:]], env=environ, check=False).returncode)

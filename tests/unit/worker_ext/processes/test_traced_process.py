"""A process with the thread that is in each of vLLM's: asked by the command, it names the line that leaks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import highwater_worker

LEAK = """
import multiprocessing, sys, time
sys.path.insert(0, sys.argv[1])
from highwater_worker.processes.writer import start_process_file
multiprocessing.current_process().name = "EngineCore"
start_process_file(sys.argv[2])
print("started", flush=True)
kept = []
while True:
    kept.append(bytearray(10_000))
    time.sleep(0.005)
"""
LINE = 1 + LEAK.splitlines().index("    kept.append(bytearray(10_000))")


def test_a_leaking_process_is_named_by_file_and_line(tmp_path):
    """With its thread, its files and the command between them, all real; and it lives on without tracemalloc."""
    script, folder = tmp_path / "leaks.py", tmp_path / "rings"
    script.write_text(LEAK)
    folder.mkdir()
    package = Path(highwater_worker.__file__).parents[1]
    leaks = [sys.executable, str(script), str(package), str(folder)]
    with subprocess.Popen(leaks, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            _wait_for(folder)
            command = [sys.executable, "-m", "highwater", "host", "trace", "engine-core", "--minutes", "0.05", "--json"]
            done = subprocess.run(
                [*command, "--folder", str(folder)], capture_output=True, text=True, check=False, timeout=240
            )
            assert done.returncode == 0, done.stdout + done.stderr
            result = json.loads(done.stdout)
            first = result["lines"][0]
            assert (Path(first["file"]).name, first["line"]) == ("leaks.py", LINE)
            assert first["bytes"] > 10_000
            assert process.poll() is None
        finally:
            process.kill()


def _wait_for(folder: Path) -> None:
    """Wait until the process has written its file: it does so after a second."""
    deadline = time.monotonic() + 60
    while not list(folder.glob("*.process")):
        assert time.monotonic() < deadline, "the process wrote no file within a minute"
        time.sleep(0.05)

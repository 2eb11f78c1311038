"""The machine's boot and processes, as its ``/proc`` shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from highwater.process.clocks import Machine

BOOT = "0b0e7a4e-0000-4000-8000-000000000001"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with process 7, started at tick 99, whose name holds a parenthesis."""
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text(f"{BOOT}\n")
    (tmp_path / "proc/7").mkdir()
    (tmp_path / "proc/7/stat").write_text(f"7 (a ) b) T 3{' 0' * 17} 99 0\n")
    return Machine(root=tmp_path)


def test_a_file_of_this_boot_is_told_from_others(machine: Machine, tmp_path: Path):
    assert machine.is_boot(BOOT)
    assert not machine.is_boot("another")
    assert not machine.is_boot(None)
    assert not Machine(root=tmp_path / "missing").is_boot(None)


def test_a_process_is_known_by_its_number_and_its_start(machine: Machine):
    assert machine.process_state(7, 99) == "T"
    assert machine.process_state(7, 100) is None
    assert machine.process_state(8, 99) is None


@pytest.mark.parametrize("text", ["", "7 (a) S 1", f"7 (a) S x{' y' * 18} 0"])
def test_what_the_kernel_does_not_show_is_unknown(machine: Machine, text: str, tmp_path: Path):
    (tmp_path / "proc/7/stat").write_text(text)
    assert machine.process_state(7, 99) == "?"

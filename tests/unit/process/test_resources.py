"""The limit of open files is raised, and connections stay below it."""

from __future__ import annotations

import ctypes
import platform
import resource
import subprocess
import sys

import pytest

from highwater.process import resources


@pytest.fixture
def limits(monkeypatch):
    """Set the limits that the process has, soft and hard; the list is what it has asked for since."""

    def set_limits(soft: int, hard: int, *, refuses: bool = False) -> list[tuple[int, int]]:
        held, asked = [(soft, hard)], []

        def setrlimit(_, wanted):
            if refuses:
                raise ValueError("current limit exceeds maximum limit")
            asked.append(wanted)
            held[:] = [wanted]

        monkeypatch.setattr(resource, "getrlimit", lambda _: held[0])
        monkeypatch.setattr(resource, "setrlimit", setrlimit)
        return asked

    return set_limits


def test_the_soft_limit_is_raised_to_the_hard_one(limits):
    """The soft one is for programs that use select(2): systemd and shells set 1,024."""
    asked = limits(1024, 524_288)
    assert resources.raise_limit() == 524_288
    assert asked == [(524_288, 524_288)]


def test_a_limit_that_is_not_granted_stays(limits):
    limits(256, resource.RLIM_INFINITY, refuses=True)
    assert resources.raise_limit() == 256


@pytest.mark.parametrize("limit", [256, 1024, 4096, 20_000])
def test_connections_leave_room_for_all_else(limits, limit):
    limits(limit, limit)
    assert 2 * resources.default_connections() + resources.RESERVED <= limit
    assert resources.default_connections() == resources.room_at_most()
    beside = 2 * resources.default_connections(has_control_port=True) + resources.control_connections()
    assert beside + resources.RESERVED <= limit
    assert resources.default_connections(has_control_port=True) == resources.room_at_most(has_control_port=True)


def test_there_is_an_end_where_files_have_none(limits):
    limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert resources.default_connections(has_control_port=True) == resources.MAX_CONNECTIONS
    assert resources.control_connections() == resources.MAX_CONTROL_CONNECTIONS


def test_there_is_room_for_one_where_there_is_none(limits):
    limits(32, 32)
    assert resources.default_connections() == 1
    assert resources.control_connections() >= 1


# Pieces of bodies as uvloop reads them, of four at once, taken and given back.
PAGE_FAULTS = """
import resource, sys
from highwater.process.resources import retain_freed_memory
if sys.argv[1] == "kept":
    assert retain_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    [bytes(256 * 1024) for _ in range(4)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PAGE_FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_the_pages_of_a_piece_are_used_again():
    """Without it, each of 200 pieces of 256 KB costs its 64 pages anew."""
    assert page_faults("kept") < page_faults("as it is") / 10


def test_another_c_library_is_left_alone(monkeypatch):
    class Library:
        def __init__(self, name):
            assert name is None

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert resources.retain_freed_memory() is False

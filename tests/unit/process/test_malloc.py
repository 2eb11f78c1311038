"""glibc is told to keep its pages, and only glibc."""

import ctypes
import platform
import subprocess
import sys

import pytest

from highwater.process import resources

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

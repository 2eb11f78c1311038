"""`release` returns what nobody uses, and says honestly what that gained."""

from __future__ import annotations

import ctypes
import json
import sys

import pytest

from tests.fakes.raising import raising
from tests.unit.worker_ext.fakes import ask, fake_worker, in_a_thread


class FakeLibrary:
    """A C library with these functions; it keeps the calls."""

    def __init__(self, *functions: str) -> None:
        self.calls: list[str] = []
        for name in functions:
            setattr(self, name, lambda *_, name=name: self.calls.append(name))


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_cached_blocks_go_back_to_the_device(kind, torch_device):
    torch_device(kind)
    answer = ask(fake_worker(kind), "release")
    assert answer["mechanism"] == "empty_cache"
    assert answer["freed_bytes"] == 250
    assert (answer["before"]["free_bytes"], answer["after"]["free_bytes"]) == (1_000, 1_250)
    assert (answer["before"]["reserved_bytes"], answer["after"]["reserved_bytes"]) == (900, 650)
    assert answer["before"]["allocated_bytes"] == answer["after"]["allocated_bytes"] == 600
    assert answer["gc_collected"] >= 0


def test_a_loss_is_told_as_a_loss(torch_device, monkeypatch):
    module = torch_device("cuda")
    monkeypatch.setattr(module, "empty_cache", lambda: setattr(module, "free", 400), raising=False)
    assert ask(fake_worker("cuda"), "release")["freed_bytes"] == -600


def test_an_unknown_gain_is_null(torch_device, monkeypatch):
    monkeypatch.setattr(type(torch_device("npu")), "mem_get_info", raising(RuntimeError("driver says no")))
    answer = ask(fake_worker(), "release")
    assert answer["freed_bytes"] is None
    assert [note["name"] for note in answer["notes"]] == ["free_bytes"]


def test_an_npu_is_left_alone_off_the_main_thread(torch_device):
    """Its workspace's allocator has no lock, and a step may be running."""
    module = torch_device("npu")
    answer = in_a_thread(lambda: json.loads(fake_worker().highwater_rpc("release")))
    assert answer["error"]["code"] == "failed"
    assert ("empty_cache", None) not in module.calls


@pytest.mark.parametrize(
    ("functions", "mechanism"),
    [
        (("malloc_trim",), "malloc_trim"),
        (("malloc_trim", "mallctl"), "jemalloc"),
        (("malloc_trim", "MallocExtension_ReleaseFreeMemory"), "tcmalloc"),
        ((), "unsupported"),
    ],
)
def test_the_heap_is_trimmed_by_the_allocator_that_keeps_it(functions, mechanism, monkeypatch):
    library = FakeLibrary(*functions)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    answer = ask(fake_worker("cpu", None), "release")
    assert answer["mechanism"] == mechanism
    assert library.calls == list(functions[-1:])
    assert [note["name"] for note in answer["notes"]] == (["mechanism"] if mechanism == "unsupported" else [])


def test_a_cpu_worker_gains_what_its_process_lost():
    answer = ask(fake_worker("cpu", None), "release")
    assert answer["freed_bytes"] == answer["before"]["rss_bytes"] - answer["after"]["rss_bytes"]
    assert answer["before"]["reserved_bytes"] is None


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_pinned_host_memory_goes_back_too(kind, torch_device):
    """torch would keep without end what a restore has left behind."""
    module = torch_device(kind)
    stats = {"allocated_bytes.current": 900, "active_bytes.current": 500}
    module.host_memory_stats = lambda: stats
    empty = lambda: stats.update({"allocated_bytes.current": 512})  # noqa: E731 - one statement
    if kind == "cuda":
        sys.modules["torch"]._C._host_emptyCache = empty
    else:
        module.host_empty_cache = empty
    assert ask(fake_worker(kind), "memory")["host_memory"]["pinned_bytes"] == 900
    answer = ask(fake_worker(kind), "release")
    assert (answer["before"]["pinned_bytes"], answer["after"]["pinned_bytes"]) == (900, 512)
    assert answer["freed_pinned_bytes"] == 388
    assert answer["notes"] == []


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_a_torch_that_cannot_give_pinned_memory_back_is_no_error(kind, torch_device):
    torch_device(kind)
    answer = ask(fake_worker(kind), "release")
    assert (answer["freed_pinned_bytes"], answer["mechanism"], answer["notes"]) == (None, "empty_cache", [])


def test_pinned_memory_that_does_not_go_back_is_noted(torch_device):
    torch_device("npu").host_empty_cache = raising(RuntimeError("driver says no"))
    answer = ask(fake_worker(), "release")
    assert answer["freed_bytes"] == 250
    assert answer["notes"] == [{"name": "freed_pinned_bytes", "reason": "RuntimeError: driver says no"}]

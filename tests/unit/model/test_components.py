"""A component of device memory is known in few places, and every one of them has it."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.model import components
from highwater.model.components import BY_NAME, COMPONENT_NAMES, ROW, STACKED, MemoryPoint, account, thin
from highwater.model.rank import Components, EncoderCache, Note, RankReading, TorchMemory
from tests.fakes.engine import CACHED, KV_POOL, NON_TORCH, OTHER_TENSORS, USED_READY, WEIGHTS
from tests.unit.model.story import cpu, story, worker

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder, ending in (
        ("app", "py"),
        ("app", "js"),
        ("app", "css"),
        ("worker_ext", "py"),
        ("helm/source", "py"),
    )
    for path in (ROOT / folder).rglob(f"*.{ending}")
]
# Written by `make docs` from app/highwater/model/components.py.
WRITTEN = {"app/highwater/dashboard/facts.js", "app/highwater/dashboard/components.css"}


def test_every_component_has_its_row():
    assert tuple(BY_NAME) == COMPONENT_NAMES == tuple(field.name for field in fields(Components))
    for what in ("title", "meaning", "explained", "letter", "terminal", "light", "dark", "grafana", "layer"):
        assert len({getattr(row, what) for row in components.COMPONENTS}) == len(COMPONENT_NAMES), what
    assert sorted(row.layer for row in STACKED) == list(range(len(COMPONENT_NAMES)))


def test_everybody_who_shows_components_shows_them_all():
    page = (ROOT / "app/highwater/dashboard/facts.js").read_text()
    board = (ROOT / "helm/dashboards/highwater-server.json").read_text()
    style = (ROOT / "app/highwater/dashboard/components.css").read_text()
    assert set(COMPONENT_NAMES) <= set(ROW)
    assert re.findall(r'field: "(\w+)"', page) == [row.name for row in STACKED]
    for row in components.COMPONENTS:
        assert style.count(f"{row.variable}:") == 2, "light and dark"
        assert f'"fixedColor": "{row.grafana}"' in board


def test_one_more_component_touches_five_files_at_most():
    """Those that name the weights, which the worker reads and the accounting places on its own: the next one is alike.

    How the worker measures it (`worker_ext/highwater_worker/memory/storages.py`) is a file of its own, and the budget
    of a start has parts of its own, in vLLM's terms.
    """
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if re.search(r"\bweights_bytes\b|\"weights\"|--c-weights\b", path.read_text(encoding="utf-8"))
    }
    of_the_start = re.compile(
        r"app/kvplan/|app/highwater/(explain/|terminal/(explain|plan/)|[\w/]+/(engine_)?budget)|worker_ext/.*/(plan/\w+|engine_budget|start_phases)\.py"
    )
    own = {
        "worker_ext/highwater_worker/memory/storages.py",
        "app/highwater/watch/starts.py",  # a phase of the start
        "worker_ext/highwater_worker/state.py",  # vLLM's name for a pool that sleeps
    }
    assert {name for name in naming - WRITTEN - own if of_the_start.match(name) is None} == {
        "app/highwater/model/components.py",
        "app/highwater/model/rank.py",
        "app/highwater/watch/recorder/rank.py",
        "worker_ext/highwater_worker/recorder/reading.py",
    }


def test_a_component_that_is_added_is_written_everywhere(monkeypatch):
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    added = replace(BY_NAME["weights_bytes"], name="graphs_bytes", title="graphs", light="#123456", layer=6)
    for name, rows in (("COMPONENTS", components.COMPONENTS), ("STACKED", STACKED)):
        monkeypatch.setattr(tables, name, (*rows, added))
    assert 'field: "graphs_bytes", name: "graphs", variable: "--c-graphs"' in tables.facts_module()
    assert "--c-graphs: #123456;" in tables.components_style()
    assert "| `graphs_bytes` " in tables.components_table()


# --- the accounting: exclusive components that sum to what is used, whatever the workers say ---


GIB = 1024**3
sizes = st.none() | st.integers(-GIB, 80 * GIB)


def parts(reading: RankReading) -> dict[str, int | None]:
    return {name: getattr(reading.components, name) for name in COMPONENT_NAMES}


@given(
    used=st.integers(0, 80 * GIB),
    weights=sizes,
    kv=sizes,
    encoder=sizes,
    allocated=sizes,
    reserved=sizes,
)
def test_known_components_sum_to_used_exactly(*, used, weights, kv, encoder, allocated, reserved):
    """Whatever is unknown, negative or too large: no byte is counted twice, and none is lost."""
    cache = None if encoder is None else EncoderCache(entries=1, device_bytes=encoder)
    torch = TorchMemory(allocated_bytes=allocated, reserved_bytes=reserved)
    reading = account(
        worker(used_bytes=used, weights_bytes=weights, kv_cache_bytes=kv, encoder_cache=cache, torch=torch)
    )
    known = [size for size in parts(reading).values() if size is not None]
    assert sum(known) == used
    assert all(size >= 0 for size in known)


def test_the_story_is_accounted_for_when_up():
    reading = story()[0]
    assert reading.used_bytes == USED_READY
    assert parts(reading) == {
        "weights_bytes": WEIGHTS,
        "kv_cache_bytes": KV_POOL,
        "encoder_cache_bytes": 0,
        "other_tensors_bytes": OTHER_TENSORS,
        "torch_cached_bytes": CACHED,
        "non_torch_bytes": NON_TORCH,
    }
    assert reading.notes == ()


def test_a_part_that_does_not_fit_is_cut_and_noted():
    """A sleeping engine's pools are unmapped though PyTorch counts them."""
    reading = account(worker(used_bytes=100, weights_bytes=70, kv_cache_bytes=50))
    assert (reading.components.weights_bytes, reading.components.kv_cache_bytes) == (70, 30)
    assert reading.components.non_torch_bytes == 0
    assert Note(name="kv_cache_bytes", reason="50 bytes counted, of which only 30 fit into used") in reading.notes


@pytest.mark.parametrize("name", ["weights_bytes", "kv_cache_bytes"])
def test_an_unknown_part_is_null_and_said_so(name):
    """Absent knowledge is None, never 0; other tensors cannot be told from it."""
    known = {"weights_bytes": 20, "kv_cache_bytes": 30} | {name: None}
    torch = TorchMemory(allocated_bytes=60, reserved_bytes=80)
    reading = account(worker(used_bytes=100, torch=torch, **known))
    assert getattr(reading.components, name) is None
    assert reading.components.other_tensors_bytes is None
    assert reading.components.torch_cached_bytes == 20
    assert [note.name for note in reading.notes] == [name]


def test_without_used_bytes_nothing_is_summed():
    reading = account(worker(weights_bytes=70, total_bytes=100))
    assert reading.components == Components(weights_bytes=70)
    assert reading.used_ratio is None
    assert [note.name for note in reading.notes] == ["used_bytes"]


def test_on_cpu_the_parts_sum_to_the_rss():
    """No allocator statistics there: other tensors and reserve are None, the heap stands under non_torch."""
    reading = account(cpu(encoder_cache=EncoderCache(entries=2, device_bytes=GIB // 8)))
    assert reading.components.other_tensors_bytes is None
    assert reading.components.torch_cached_bytes is None
    assert reading.components.non_torch_bytes == 2 * GIB - GIB // 4 - GIB // 2 - GIB // 8
    assert reading.used_ratio == 2 / 24


def test_what_the_workers_noted_stays():
    noted = Note(name="torch", reason="torch.npu has no memory_stats")
    assert account(cpu(notes=(noted,))).notes[0] == noted


# --- a rank's memory at one moment, and series of such points ---


def points(*used: int | None) -> tuple[MemoryPoint, ...]:
    """A second apart."""
    return tuple(MemoryPoint(at=float(index), used_bytes=size) for index, size in enumerate(used))


@pytest.mark.parametrize(
    ("count", "most", "recent"),
    [(0, 10, 5), (5, 10, 5), (10, 10, 5), (11, 10, 5), (1200, 600, 60), (1200, 7, 1), (1200, 1, 1), (3, 2, 1)],
)
def test_thinning_keeps_order_and_end(count, most, recent):
    given = points(*(index % 7 for index in range(count)))
    thinned = thin(given, most, recent=recent)
    assert len(thinned) == min(count, most)
    assert list(thinned) == sorted(thinned, key=lambda point: point.at)
    assert set(thinned) <= set(given)
    assert thinned[-recent:] == given[-recent:]


def test_a_rise_of_one_point_is_kept():
    given = points(*[1] * 40, 9, *[1] * 40)
    assert max(point.used_bytes for point in thin(given, 10)) == 9


def test_unknown_use_is_thinned_like_any_other():
    assert len(thin(points(*[None] * 99), 10)) == 10

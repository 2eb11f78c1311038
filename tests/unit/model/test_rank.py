"""The encoder cache over all ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import highwater
from highwater.diagnose.finding import ADVICE
from highwater.model.components import COMPONENT_NAMES, account
from highwater.model.rank import DEVICES, Device, EncoderCache, EncoderCacheTotals, HostMemory
from highwater.model.remedies import host_used
from highwater_worker.devices import FAMILIES
from tests.fakes.engine import IMAGE_BYTES, IMAGES
from tests.fakes.ranks import reading
from tests.unit.model.story import story, worker


def test_encoder_totals_count_entries_once_and_bytes_on_every_rank():
    totals = EncoderCacheTotals.of(story(images=True))
    assert (totals.entries, totals.device_bytes) == (IMAGES, 2 * IMAGES * IMAGE_BYTES)
    assert EncoderCacheTotals.of([account(worker(used_bytes=1))]) is None


def test_bytes_are_summed_over_ranks_and_of_all_else_the_most_counts():
    behind = EncoderCache(
        entries=3,
        device_bytes=10,
        host_bytes=100,
        capacity_embeds=6,
        oldest_age_seconds=4.0,
        spills=5,
        restores=2,
        restore_seconds=0.5,
    )
    ahead = EncoderCache(
        entries=4,
        device_bytes=20,
        host_bytes=200,
        capacity_embeds=7,
        oldest_age_seconds=9.0,
        spills=6,
        restores=3,
        restore_seconds=1.5,
    )
    unknown = replace(behind, device_bytes=0, host_bytes=0, capacity_embeds=None, oldest_age_seconds=None)
    caches = (behind, ahead, unknown, None)
    ranks = [replace(reading(rank), encoder_cache=cache) for rank, cache in enumerate(caches)]
    assert EncoderCacheTotals.of(ranks) == EncoderCacheTotals(
        entries=4,
        device_bytes=30,
        host_bytes=300,
        capacity_embeds=7,
        oldest_age_seconds=9.0,
        spills=6,
        restores=3,
        restore_seconds=1.5,
    )


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 120.0),
        ({"host_bytes": 30}, 180.0),
        ({"embeds": 0}, None),
        ({"device_bytes": 0}, None),
        ({"capacity_embeds": None}, None),
    ],
)
def test_its_budget_is_in_bytes_by_what_each_embedding_holds(changes, limit):
    cache = EncoderCache(entries=3, device_bytes=60, embeds=4, capacity_embeds=8)
    assert replace(cache, **changes).budget_bytes == limit


# --- the host memory of a worker ---


@pytest.mark.parametrize(
    ("host", "share"),
    [
        (HostMemory(cgroup_used_bytes=1, cgroup_limit_bytes=4, node_total_bytes=100, node_available_bytes=50), (1, 4)),
        (HostMemory(cgroup_used_bytes=1, node_total_bytes=100, node_available_bytes=40), (60, 100)),
        (HostMemory(cgroup_used_bytes=0, cgroup_limit_bytes=4, node_total_bytes=100, node_available_bytes=50), (0, 4)),
        (HostMemory(cgroup_limit_bytes=4, node_total_bytes=100, node_available_bytes=0), (100, 100)),
        (HostMemory(cgroup_limit_bytes=4, node_total_bytes=100), (None, None)),
        (HostMemory(rss_bytes=5), (None, None)),
    ],
)
def test_host_memory_is_the_limits_where_there_is_one(host, share):
    """Else the node's, else not known."""
    reading = account(worker(host_memory=host))
    assert reading.host_memory.share == share
    assert host_used([reading]) == share[0]
    used, total = share
    assert reading.host_memory.used_ratio == (None if used is None else used / total)


def test_of_several_workers_hosts_the_fullest_counts():
    """Workers of one host report the same figures, so that a sum would count these once a worker."""
    used = [HostMemory(cgroup_used_bytes=size, cgroup_limit_bytes=10) for size in (3, 5, 0)]
    readings = [account(worker(host_memory=host)) for host in (*used, HostMemory(rss_bytes=99))]
    assert host_used(readings) == 5


# --- device families: the sidecar's table and the worker's classes know the same ones ---


def test_sidecar_and_worker_know_the_same_families():
    assert {kind: row.is_host_memory for kind, row in DEVICES.items()} == {
        family.type: family.is_host_memory for family in FAMILIES
    }


def test_a_row_names_advice_and_components_that_exist():
    for row in DEVICES.values():
        assert {*row.against_fragmentation, *row.against_non_torch} <= ADVICE.keys()
        assert set(row.release_frees) <= set(COMPONENT_NAMES)


def test_no_other_module_asks_for_a_family_by_name():
    """What differs by family is a field of its row."""
    asks = re.compile(r"""\b(?:device(?:\.type|_type)?|kind)\s*(?:==|!=)\s*["'](?:npu|cuda|cpu)["']""")
    sources = Path(highwater.__file__).parent.rglob("*.py")
    assert [str(one) for one in sources if asks.search(one.read_text("utf-8"))] == []


def test_of_an_unknown_device_nothing_is_assumed():
    assert not Device(type=None).traits.is_host_memory
    assert Device(type="xpu").traits.platform is None
    assert Device(type="tpu").traits == Device().traits

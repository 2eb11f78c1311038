"""The parts of a container sum to what its kernel counts, whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from highwater.host.reading import ContainerMemory, HostReading, ProcessMemory, ShmMemory, ShmOwner
from highwater.host.report import parts_of
from highwater.model.units import MIB
from tests.unit.host.recorded import reading

_SIZES = st.integers(0, 2**45)
_MAYBE = st.none() | _SIZES
_CONTAINERS = st.builds(
    ContainerMemory,
    key=st.just("c"),
    used_bytes=_SIZES,
    anonymous_bytes=_MAYBE,
    shmem_bytes=_MAYBE,
    page_cache_bytes=_MAYBE,
    droppable_bytes=_MAYBE,
    kernel_bytes=_MAYBE,
    reclaimable_kernel_bytes=_MAYBE,
    page_tables_bytes=_MAYBE,
    sock_bytes=_MAYBE,
)
_PROCESSES = st.lists(
    st.builds(
        ProcessMemory,
        role=st.sampled_from(["api_server", "worker", "other"]),
        name=st.text(max_size=5),
        pid=st.integers(1, 9),
        container=st.sampled_from(["c", "d", None]),
        anonymous_bytes=_MAYBE,
    ),
    max_size=6,
).map(tuple)
_SHM = st.none() | st.builds(
    ShmMemory,
    owners=st.lists(
        st.builds(ShmOwner, owner=st.sampled_from(["nccl", "other"]), files=st.just(1), used_bytes=_SIZES), max_size=3
    ).map(tuple),
)


@given(container=_CONTAINERS, processes=_PROCESSES, shm=_SHM)
def test_the_parts_always_sum_to_what_the_kernel_counts(container, processes, shm):
    parts = parts_of(HostReading(taken_at=0.0, processes=processes, container=container, shm=shm))
    total = sum(row.bytes for row in parts.rows)
    assert total + parts.not_attributed_bytes - parts.counted_twice_bytes == container.used_bytes
    assert min([row.bytes for row in parts.rows] + [parts.not_attributed_bytes, parts.counted_twice_bytes]) >= 0


def test_each_owner_is_named():
    parts = parts_of(reading())
    shown = {row.name: row.bytes // MIB for row in parts.rows}
    assert list(shown)[:3] == ["worker rank 0", "API server", "page cache"]
    assert shown["/dev/shm: RPC rings of vLLM"] == 1_400
    assert shown["other shared memory"] == 100
    assert [row.name for row in parts.rows if row.can_be_dropped] == ["page cache"]
    # 100 MiB of anonymous memory that no process has, and 100 MiB that the kernel charged and names nowhere.
    assert (parts.not_attributed_bytes, parts.counted_twice_bytes) == (200 * MIB, 0)


def test_pages_that_a_forked_child_shares_are_not_taken_for_more_memory():
    given_ = reading()
    child = replace(given_.processes[0], name="API server 1", pid=13)
    parts = parts_of(replace(given_, processes=(*given_.processes, child)))
    assert parts.counted_twice_bytes == 1_900 * MIB


def test_processes_of_another_container_are_not_in_the_sum():
    given_ = reading()
    elsewhere = replace(given_.processes[0], name="API server elsewhere", container="d")
    assert parts_of(replace(given_, processes=(*given_.processes, elsewhere))) == parts_of(given_)


def test_without_a_container_processes_are_listed_and_sum_to_nothing():
    parts = parts_of(replace(reading(), container=None))
    assert (parts.used_bytes, parts.not_attributed_bytes, len(parts.rows)) == (None, None, 3)

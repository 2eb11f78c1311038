"""Display names of processes."""

from __future__ import annotations

import pytest

from highwater.host.reading import name_of


@pytest.mark.parametrize(
    ("dp_rank", "rank", "name"),
    [
        (None, None, "worker"),
        (None, 0, "worker rank 0"),
        (0, 1, "worker rank 1"),
        (1, 0, "worker rank 1.0"),
        (2, 1, "worker rank 2.1"),
    ],
)
def test_a_worker_is_named_as_its_rank_is_elsewhere(dp_rank, rank, name):
    """With the engine's number from the second on: each engine numbers its ranks from 0."""
    assert name_of("worker", rank=rank, dp_rank=dp_rank) == name

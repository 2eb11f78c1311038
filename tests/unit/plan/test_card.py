"""A card beside bytes that were given for the KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from highwater.plan.card import judge_given

GIB = 1 << 30


def answer(**changed: Any) -> dict[str, Any]:
    return {
        "kv_cache": {"available_bytes": 5 * GIB},
        "ranks": [{"weights": [15 * GIB, 14 * GIB, 16 * GIB, "estimated", ""]}],
        **changed,
    }


def test_given_bytes_are_judged_by_the_least_weights_and_what_others_use() -> None:
    enough = judge_given(answer(), 20 * GIB, 0)
    assert enough is not None
    assert enough.fits is None
    assert "0 B are left beside the weights" in enough.why
    too_full = judge_given(answer(), 20 * GIB, 2 * GIB)
    assert too_full is not None
    assert too_full.fits is False
    assert (
        "do not hold the weights (at least 14.00 GiB), the KV cache (5.00 GiB) and the 2.00 GiB in use" in too_full.why
    )


@pytest.mark.parametrize("changed", [{"budget": {"total_bytes": 1}}, {"kv_cache": {}}, {"ranks": []}])
def test_a_share_or_unknown_weights_are_not_judged(changed: dict[str, Any]) -> None:
    assert judge_given(answer(**changed), 20 * GIB, 0) is None

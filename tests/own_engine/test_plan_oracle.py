"""The planned KV pool beside vLLM's own functions: a sample of random KV caches, on the current version."""

from __future__ import annotations

import pytest

from highwater.demo.environment import DEFAULT_VERSION
from kvplan.versions import NEWEST_KNOWN, text_of
from tests.oracles import disagreements


@pytest.mark.parametrize("version", [DEFAULT_VERSION, text_of(NEWEST_KNOWN)])
def test_the_plan_is_what_vllm_makes_of_random_caches(version: str) -> None:
    assert disagreements(version, count=60, seed=16) == []

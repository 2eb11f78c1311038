"""The planned KV pool beside vLLM's own functions: a sample of random KV caches, on the current version."""

from __future__ import annotations

from highwater.terminal.demo.engine import DEFAULT_VERSION
from tests.oracles import disagreements


def test_the_plan_is_what_vllm_makes_of_random_caches() -> None:
    assert disagreements(DEFAULT_VERSION, count=60, seed=16) == []

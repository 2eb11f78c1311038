"""The routes of the vLLM that is installed are the recorded ones, which the allow list is tried with."""

from __future__ import annotations

from highwater.terminal.demo.engine import EngineEnvironment
from tests.fakes.vllm_routes import recorded, routes_in


def test_its_routes_are_those_that_are_recorded(engine_environment: EngineEnvironment):
    """One that is new must be recorded, then admitted or refused knowingly (tests/unit/gated_proxy/test_allowlist)."""
    (package,) = engine_environment.root.glob("lib/python3*/site-packages/vllm")
    found = routes_in(package)
    assert found <= set(recorded())
    assert {"POST /collective_rpc", "POST /v1/chat/completions", "MOUNT /metrics"} <= found

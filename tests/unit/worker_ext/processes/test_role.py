"""What a process is to vLLM, by the names that vLLM gives its processes."""

from __future__ import annotations

import pytest

from highwater_worker.processes.role import Role, role_of


@pytest.mark.parametrize(
    ("name", "children", "arguments", "role"),
    [
        ("ApiServer_0", (), (), Role("api_server", 0)),
        ("ApiServer_12", (), (), Role("api_server", 12)),
        ("APIServer_DPRank_1", (), (), Role("api_server", 1)),
        ("EngineCore", (), (), Role("engine_core")),
        ("EngineCore_DP3", (), (), Role("engine_core", 3)),
        ("VllmWorker-7", (), (), Role("worker", 7)),
        ("VLLM_DP_Coordinator", (), (), Role("coordinator")),
        ("ForkPoolWorker-1", (), (), Role("other")),
        ("MainProcess", ("ApiServer_0", "ApiServer_1", "EngineCore_DP0"), ("vllm", "serve"), Role("launcher")),
        ("MainProcess", ("APIServer_DPRank_0",), ("vllm", "serve"), Role("launcher")),
        ("MainProcess", ("EngineCore",), ("/x/app.py",), Role("api_server")),
        ("MainProcess", (), ("/usr/bin/vllm", "serve", "model"), Role("api_server")),
        ("MainProcess", (), ("/x/vllm/entrypoints/openai/api_server.py",), Role("api_server")),
        ("MainProcess", (), ("/x/train.py",), Role("other")),
        ("MainProcess", (), (), Role("other")),
    ],
)
def test_the_role_follows_from_the_name(name, children, arguments, role):
    """The main process serves unless it has started others that do."""
    assert role_of(name, children, arguments) == role

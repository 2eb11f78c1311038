"""What a process is to vLLM, by the names that vLLM gives its processes."""

from __future__ import annotations

import pytest

from highwater_worker.processes.role import Role, role_of, serves_grpc


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


@pytest.mark.parametrize(
    ("arguments", "serves"),
    [
        (("/usr/bin/vllm", "serve", "model", "--grpc-port", "50051"), True),
        (("vllm", "serve", "model", "--grpc_port=0"), True),
        (("vllm", "serve", "model", "--port", "8000"), False),
        (("/x/vllm/entrypoints/openai/api_server.py", "--config-format", "hf"), False),
        (("vllm", "serve", "--config", "serve.yaml"), None),
        (("vllm", "serve", "--config=serve.yaml", "--grpc-port=1"), True),
        (("/srv/vllm/wrapper.py", "model"), None),
        (("/x/ray/default_worker.py",), None),
        ((), None),
    ],
)
def test_a_grpc_port_is_known_by_vllms_own_command_line(arguments, serves):
    assert serves_grpc(arguments) is serves

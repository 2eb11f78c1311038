"""The head of an answer says who speaks, or null."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from highwater_worker.engine_view import identity, model_name, ranks_expected, serves_grpc
from tests.unit.worker_ext.fakes import fake_worker


def parallel(**sizes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | sizes)


def test_ranks_come_from_the_engine():
    """Rank 3 of 2 x 2 is the second of the second stage, in the third replica."""
    assert identity(fake_worker()) == {
        "rank": 3,
        "local_rank": 1,
        "dp_rank": 2,
        "tp_rank": 1,
        "pp_rank": 1,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]),
    }


@pytest.mark.parametrize(
    ("rank", "sizes", "expected"),
    [
        (5, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, (1, 1)),
        (5, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}, (1, 1)),
        (3, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}, (1, 0)),
        (6, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (0, 1)),
        (0, {"tensor_parallel_size": 0}, (None, None)),
        (None, {}, (None, None)),
        (1, {"pipeline_parallel_size": "2"}, (0, None)),
        (1, {"prefill_context_parallel_size": None}, (0, None)),
    ],
)
def test_ranks_follow_the_engines_layout(rank, sizes, expected):
    head = identity(fake_worker(rank=rank, parallel_config=parallel(**sizes)))
    assert (head["tp_rank"], head["pp_rank"]) == expected


def test_an_older_engine_has_the_replicas_rank_alone():
    """The index came when newer engines began to reset the rank."""
    assert identity(fake_worker(parallel_config=parallel(data_parallel_rank=1)))["dp_rank"] == 1


def test_what_cannot_be_read_is_null():
    class Worker:
        @property
        def rank(self) -> int:
            raise RuntimeError

    head = identity(Worker())
    assert [head[name] for name in ("rank", "local_rank", "dp_rank", "tp_rank", "pp_rank")] == [None] * 5


@pytest.mark.parametrize(
    ("balancer", "expected"),
    [({}, 4), ({"data_parallel_external_lb": True}, 2), ({"data_parallel_hybrid_lb": True}, 2)],
)
def test_the_last_replica_of_a_dense_model_knows_how_many_there_are(balancer, expected):
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 1, "data_parallel_index": 1}
    assert ranks_expected(fake_worker(parallel_config=parallel(**sizes, **balancer))) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # Of a world of eight, with experts that they share.
        ({"data_parallel_external_lb": True, "data_parallel_size": 8, "data_parallel_index": 5}, 2),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size": 8, "data_parallel_size_local": 4}, 8),
        # Of a dense model each says that it is alone, and where it stands among those of its server.
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 1, "data_parallel_rank_local": 3}, 8),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 1, "data_parallel_rank_local": None}, 2),
        ({"data_parallel_size": 8, "data_parallel_index": 5}, 16),
    ],
)
def test_a_server_behind_a_load_balancer_has_its_own_replicas_alone(sizes, expected):
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 1, "data_parallel_index": 5} | sizes
    assert ranks_expected(fake_worker(parallel_config=parallel(**sizes))) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"served_model_name": ["qwen", "other"], "model": "/models/q"}, "qwen"),
        ({"served_model_name": "qwen", "model": "/models/q"}, "qwen"),
        ({"served_model_name": None, "model": "/models/q"}, "/models/q"),
        ({"served_model_name": [], "model": 7}, None),
        ({}, None),
    ],
)
def test_the_model_has_the_name_under_which_it_is_served(config, expected):
    worker = fake_worker()
    worker.vllm_config.model_config = SimpleNamespace(**config)
    assert model_name(worker) == expected


def test_how_many_workers_an_engine_has():
    worker = fake_worker()
    assert ranks_expected(worker) == 2 * 2 * 3
    worker.parallel_config.prefill_context_parallel_size = 2
    assert ranks_expected(worker) == 24
    del worker.parallel_config.data_parallel_size
    assert ranks_expected(worker) is None


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

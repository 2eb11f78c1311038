"""Starts vLLM's engine once for each command line, and prints what it made of its KV cache: one JSON object a line.

Run with the engine's interpreter: ``python engine_starts.py < STARTS``, where each line of STARTS is
``{"arguments": ["--model", ...], "environ": {...}}``. The arguments are those of ``vllm serve``, read by vLLM's own
parser with the defaults of its API server. Each start has a process of its own, which loads the model, allocates the
KV cache and warms up as the EngineCore of a server does, and ends there: no tokenizer, no port, no request. vLLM is
imported once and the processes are forked from there, which saves ten seconds a start.
It imports nothing of Highwater.
"""

# ruff: noqa: PLC0415 - vLLM prints while it is imported

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from typing import Any

TEXT_MOST = 4000


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints while it is imported
    from vllm.v1.engine.core import EngineCore  # noqa: F401 - imported once, before every fork

    for line in sys.stdin:
        start = json.loads(line)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.environ.update(start.get("environ") or {})
            with os.fdopen(writer, "w") as pipe:
                json.dump(answer_to(start["arguments"]), pipe)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        answers.write((text or json.dumps({"outcome": "died", "status": status})) + "\n")
        answers.flush()


def answer_to(arguments: list[str]) -> dict[str, Any]:
    """Start the engine and return what came of it, with the lines of its log that concern the KV cache."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            answer = started(arguments)
        except BaseException as error:  # noqa: BLE001 - a refusal is an answer, whatever its class
            answer = refused(error)
        sys.stdout.flush()
        sys.stderr.flush()
        log.seek(0)
        answer["log"] = [line.rstrip() for line in log if "KV cache size" in line or "Maximum concurrency" in line]
        return answer


def started(arguments: list[str]) -> dict[str, Any]:
    """Start the engine and return what it says of its KV cache."""
    from vllm import envs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser

    getattr(envs, "disable_envs_cache", lambda: None)()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    engine_args = AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    kv_cache = core.scheduler.kv_cache_config
    return {
        "outcome": "started",
        "blocks": kv_cache.num_blocks,
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "layers": len(group.layer_names),
                "block_size": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
            }
            for group in kv_cache.kv_cache_groups
        ],
        "bytes": sum(tensor.size for tensor in kv_cache.kv_cache_tensors),
        "block_size": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }


def refused(error: BaseException) -> dict[str, Any]:
    """Return an error's own words, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "outcome": "refused",
        "error": type(error).__name__,
        "message": str(error)[:TEXT_MOST],
        "where": [f"{frame.filename.rpartition('/vllm/')[2]}:{frame.lineno}" for frame in frames[-6:]],
    }


if __name__ == "__main__":
    main()

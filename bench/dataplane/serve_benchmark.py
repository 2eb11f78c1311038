"""`vllm bench serve`, many times in one process: run by the engine's interpreter, and nothing of ours is imported.

It calls what the command calls (vllm/benchmarks/serve.py). The command itself asks for a distribution called `vllm`,
which the CPU build is not, and it takes ten seconds to import what it needs, every time.

Each line of standard input is a JSON list of the command's arguments; each line of standard output says that they have
been run. What vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout

from vllm.benchmarks.serve import add_cli_args, main  # type: ignore[import-not-found]  # the engine has it
from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]


def run(arguments: list[str]) -> None:
    """Run the benchmark once."""
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with redirect_stdout(sys.stderr):
        main(parser.parse_args(arguments))


if __name__ == "__main__":
    for line in sys.stdin:
        run(json.loads(line))
        print("done", flush=True)

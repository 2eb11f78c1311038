"""The data plane beside its peers: the sidecar, nginx and vllm-router before the same fake upstream, in one run.

What is compared are ratios within one run; the numbers themselves are the machine's. No engine is started.
"""

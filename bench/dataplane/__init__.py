"""The data plane beside a peer: the sidecar and nginx before the same fake upstream, in one run.

What is compared are ratios within one run; the numbers themselves are the machine's. No engine is started.
"""

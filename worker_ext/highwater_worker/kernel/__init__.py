"""The kernel's figures of memory: control groups, `/proc`, `/dev/shm`. A leaf, which the sidecar reads with too.

It imports nothing of this package, writes nothing, and raises OSError where the kernel does not say.
"""

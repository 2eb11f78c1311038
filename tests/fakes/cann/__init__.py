"""A simulated NPU below the real torch_npu: a stand-in for CANN in C, and kernels of the CPU's.

device.c and unused.c are all that torch_npu's binary takes of CANN, written after the imports of torch_npu 2.13.0: the
one version whose torch has a CPU build on the package index. on_path/cpu_kernels.py computes the operators.
ascend.py puts vLLM and vllm-ascend on top, with on_vllm_path/ascend_kernels.py.
`python -m tests.fakes.cann -m bench.device reading` runs a program with the device.

It shows torch_npu's allocator, copies, messages, and what Highwater makes of them. It cannot show kernels' workspaces,
speed, fragmentation below the allocator, graphs, or several devices at work (HCCL).
"""

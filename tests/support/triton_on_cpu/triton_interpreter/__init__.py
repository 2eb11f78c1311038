"""A Triton backend `cpu` for vLLM to find, where Triton's interpreter runs every kernel: nothing is ever compiled.

vLLM's V2 model runner wants a Triton that names a CPU. None on the package index does; Triton's own interpreter
(`TRITON_INTERPRET=1`) needs no backend, so this one only has to be there (vllm 0.32.0 triton_utils/importing.py:18).
Triton finds it by its entry point, on the engine's PYTHONPATH.
"""

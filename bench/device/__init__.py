"""Checks on a device what Highwater says of it: `python -m bench.device STEP`, results as JSON, docs/devices.md.

It runs the worker package's own code on a device with PyTorch alone: no vLLM, no network. The same steps run on a CPU;
what only a device can show is skipped there by name.
"""

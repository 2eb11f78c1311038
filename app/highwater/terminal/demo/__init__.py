"""The demonstration: a real vLLM engine on a CPU, a tiny model made by code, and traffic for it.

Nothing here is needed to run the sidecar, and nothing of the sidecar imports it. Nothing is downloaded except by
pip, and nothing is written outside the cache folder and the folders that a caller names.
"""

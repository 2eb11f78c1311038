"""The demonstration: a real vLLM engine on a CPU, a tiny model made by code, and traffic for it.

Nothing is downloaded except by pip, and nothing is written outside the cache folder and the folders that callers name.
"""

"""Highwater's sidecar: the memory control plane that runs beside one vLLM server.

The levels and what may import what are drawn in ``docs/architecture.md`` and held by import-linter: ``pyproject.toml``.
"""

__version__ = "0.1.0"

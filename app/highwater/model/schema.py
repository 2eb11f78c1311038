"""The JSON of these values: its version, its largest number, and the rule by which pydantic writes its schema."""

from __future__ import annotations

from typing import Final

SCHEMA = 1
"""Of every response of the sidecar, the report among them, of a worker's, and of what a command prints as JSON."""
MAX_NUMBER: Final = 2**63 - 1
"""The largest number that is taken from another process: beyond it, sums in floats and in C would go wrong."""
RESPONSE_SCHEMA: Final = {"json_schema_serialization_defaults_required": True}
"""For pydantic: a response has every field, and its schema says so, also of fields that a default fills in."""

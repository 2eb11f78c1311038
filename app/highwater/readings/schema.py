"""The version of the JSON that these values make, and the rule by which pydantic writes its schema."""

from __future__ import annotations

from typing import Final

SCHEMA = 1
RESPONSE_SCHEMA: Final = {"json_schema_serialization_defaults_required": True}
"""For pydantic: a response has every field, and its schema says so, also of fields that a default fills in."""

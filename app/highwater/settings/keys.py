"""The keys of the settings: their dotted names, and the environment variables of these names."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from highwater.settings.settings import Settings

PREFIX = "HIGHWATER_"


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every leaf key in dotted form (``policy.mode``) with its field, in the order of the class."""
    for name, info in Settings.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            for inner, inner_info in info.annotation.model_fields.items():
                yield f"{name}.{inner}", inner_info
        else:
            yield name, info


def is_list(info: FieldInfo) -> bool:
    return isinstance(info.default, tuple)


def variable(key: str) -> str:
    return PREFIX + key.upper().replace(".", "__")

"""What the versions of vLLM do differently where they size a KV cache, each rule with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The rules of one version.

    Attributes:
        version: The version asked for, as vLLM writes it.
    """

    version: str


def generation_of(version: str) -> Generation:
    """Return the rules of a version.

    Raises:
        PlanError: The version is not understood, or older than the oldest known.
    """
    raise NotImplementedError

"""What an incident must say, and must not, whichever words its sentences have."""

from __future__ import annotations

import re
from typing import Any

_ACQUITTAL = re.compile(r"(?<!device )memory was not (short|the cause)", re.IGNORECASE)
_KERNEL = ("killed_by_kernel", "host_memory")
Incident = dict[str, Any]


def acquits_memory(text: str) -> bool:
    """Return whether it says that memory was not short without saying that it means the device's."""
    return _ACQUITTAL.search(text) is not None


def blames_host_memory(incident: Incident) -> bool:
    """Return whether a likely cause is the container's memory."""
    return any(each["name"] in _KERNEL and each["weight"] == "likely" for each in incident["findings"])


def names_last_state(text: str) -> bool:
    """Return whether it says how to ask Kubernetes for what only Kubernetes knows."""
    return "kubectl" in text and re.search(r"last ?state", text, re.IGNORECASE) is not None


def kinds(incidents: list[Incident]) -> list[str]:
    return [each["kind"] for each in reversed(incidents)]

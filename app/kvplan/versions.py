"""The versions of vLLM whose sources were read, and the newest beside which tests run."""

from typing import Final, TypeAlias

# The numbers of a version: 0.20.1 is (0, 20, 1). A minor release, (0, 20), compares with it too.
Release: TypeAlias = tuple[int, ...]

OLDEST_KNOWN: Final[Release] = (0, 11, 0)  # planned by the rules of the next
OLDEST_READ: Final[Release] = (0, 12, 0)
NEWEST_KNOWN: Final[Release] = (0, 33, 0)
NEWEST_TESTED: Final[Release] = (0, 32, 0)  # docs/tested.toml (tests/helm/test_tested.py)


def text_of(release: Release) -> str:
    return ".".join(map(str, release))

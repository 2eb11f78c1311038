"""`highwater check` on `/dev/shm`: before the SIGBUS, and skipped where nobody sees it."""

from __future__ import annotations

import pytest

from highwater.commands.shm_check import judge_shm

MIB = 1 << 20
NEEDS = {"known_bytes": 664 * MIB, "short_bytes": 0, "rows": [{"name": "NCCL", "bytes": None}]}


def host(size, free, promised, needs=None):
    shm = {"size_bytes": size * MIB, "free_bytes": free * MIB, "promised_bytes": promised * MIB}
    return {"reading": {"shm": shm}, "shm_needs": needs or {}}


@pytest.mark.parametrize(
    ("given", "level", "word"),
    [
        ({}, "skip", "HIGHWATER_RECORDER_DIR"),
        ({"reading": {"shm": None}}, "skip", "not known"),
        ({"reading": 5}, "skip", "not known"),
        (host(2000, 1900, 100, NEEDS), "ok", "can need 664 MiB, and what NCCL need is not known"),
        (host(2000, 1900, 100), "ok", "no worker reports its settings"),
        (host(64, 4, 100, NEEDS), "fail", "too small by 96.0 MiB"),
        (host(64, 64, 0, NEEDS | {"short_bytes": 600 * MIB}), "warn", "too small by 600 MiB before a SIGBUS"),
    ],
)
def test_the_level_follows_from_what_is_free_promised_and_needed(given, level, word):
    """Files that have promised more than there is are a failure; a rule's sum is a warning."""
    found, text, change = judge_shm(given)
    assert (found, word in text) == (level, True), text
    assert (change is not None) == (level in {"warn", "fail"})

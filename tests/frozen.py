"""A pytest plugin (`-p tests.frozen`): the garbage collector passes over what was there before the first test.

Thousands of collected tests and all imported modules are otherwise walked through by every full collection, whichever
test or part of ours asks for one: a third of a second each time.
"""

from __future__ import annotations

import gc

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze what is there; `gc.get_freeze_count` tells what a test froze, as without this plugin."""
    gc.collect()
    gc.freeze()
    count = gc.get_freeze_count
    of_pytest = count()
    # `trim` refuses where frozen objects may hold the encoder cache unseen: pytest's do not.
    gc.get_freeze_count = lambda: max(count() - of_pytest, 0)

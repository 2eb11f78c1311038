"""What holds for every test."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
WITH_TOOLS = {HERE / "browser", HERE / "observability"}

# A machine that is busy with something else makes an example slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _state_home() -> Iterator[None]:
    """Sidecars keep their tokens in a folder of the test run, not in the home of whoever runs it."""
    with tempfile.TemporaryDirectory(prefix="highwater-tests-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if WITH_TOOLS & {*item.path.parents}:
            item.add_marker(pytest.mark.tools)

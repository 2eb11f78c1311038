"""What holds for every test."""

from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
WITH_TOOLS = {HERE / "browser", HERE / "observability"}

# A machine that is busy with something else makes an example slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if WITH_TOOLS & {*item.path.parents}:
            item.add_marker(pytest.mark.tools)

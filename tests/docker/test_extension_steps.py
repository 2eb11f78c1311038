"""The worker package's own image without Docker: its steps, and whether vLLM would find the plugin in it."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from highwater import __version__
from tests.docker.image import DOCKER, build
from tests.docker.stage import obstacle

pytestmark = pytest.mark.timeout(1800)


def test_an_image_volume_is_all_that_an_engine_needs_on_its_path(tmp_path: Path) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    root = build(DOCKER / "extension.Dockerfile", tmp_path).stage.folder
    (found,) = distributions(path=[str(root)])
    (plugin,) = found.entry_points
    assert (found.name, found.version) == ("vllm-highwater-worker", __version__)
    assert (plugin.group, plugin.value) == ("vllm.general_plugins", "highwater_worker.plugin:register")
    assert (root / "highwater_worker" / "plugin.py").is_file()
    assert not list((root / "highwater_worker").rglob("*.pyc"))

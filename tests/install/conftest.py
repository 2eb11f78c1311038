"""A reader's shell in a folder of their own: the page's commands, with real programs, a clone of ours beside them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.install.file_cluster import FileCluster, Object, new_cluster
from tests.install.page import ROOT, Block, write_files
from tests.support.kubernetes_tools import BUNDLES, NEW, Bundle, Tools, tools


class Reader:
    """Somebody who follows a page literally."""

    def __init__(self, folder: Path, real: Tools, cluster: FileCluster) -> None:
        self.folder, self.cluster, self.real = folder, cluster, real
        (folder / "helm").symlink_to(ROOT / "helm")
        self._environ = real.environ(folder) | {
            "PATH": f"{cluster.programs()}{os.pathsep}{os.environ['PATH']}",
            "FILE_CLUSTER": str(folder / "cluster"),
            "FILE_CLUSTER_TOOLS": str(real.bin),
        }

    def write(self, found: list[Block]) -> None:
        """Write the files that these blocks are."""
        write_files(found, self.folder)

    def run(self, text: str) -> str:
        """Run a block; the first command that fails fails the test, with what it said."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def _maker(bundle: Bundle, folder: Path) -> Callable[..., Reader]:
    real = tools(bundle)

    def made(*things: Object) -> Reader:
        return Reader(folder, real, new_cluster(folder / "cluster", real.bin, *things))

    return made


@pytest.fixture(params=BUNDLES, ids=str)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Reader]:
    """Return a reader whose cluster has these objects in it; once with the old programs, once with the new."""
    return _maker(request.param, tmp_path)


@pytest.fixture
def newest(tmp_path: Path) -> Callable[..., Reader]:
    """Return a reader as `reader` does, with the new programs only."""
    return _maker(NEW, tmp_path)

"""The sidecar's image, its steps carried out once for each state of what it is made of."""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
from pathlib import Path

import pytest

from highwater.terminal.demo.engine import cache_dir
from tests import build_support
from tests.docker.image import DOCKER, ROOT, Image, build, instructions
from tests.docker.stage import obstacle

DOCKERFILE = DOCKER / "Dockerfile"
KEPT = 2


@pytest.fixture(scope="session")
def image() -> Image:
    """The image; skipped where its steps cannot be run."""
    if reason := build_support.obstacle() or obstacle():
        pytest.skip(reason)
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = cache / f"image-{_digest()}"
        if not built.exists():
            draft = cache / "image-draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            build(DOCKERFILE, draft)
            shutil.rmtree(draft / "build")  # hundreds of megabytes that no image has
            draft.rename(built)  # in one piece: a folder of this name is complete
        built.touch()
        old = sorted(cache.glob("image-*"), key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]
        for folder in old:
            shutil.rmtree(folder)
    return build(DOCKERFILE, built, only_read=True)


def _digest() -> str:
    """Of everything that the image is made of."""
    sources = {source for name, value in instructions(DOCKERFILE) if name == "COPY" for source in value.split()[:-1]}
    files = [DOCKERFILE, ROOT / ".dockerignore", *Path(__file__).parent.glob("*.py")]
    for source in sorted(sources):
        place = ROOT / source
        files += sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    digest = hashlib.sha256(platform.python_version().encode())
    for path in files:
        if path.is_file() and path.suffix not in {".pyc", ".so"}:
            digest.update(b"%b\0%b\0" % (str(path.relative_to(ROOT)).encode(), path.read_bytes()))
    return digest.hexdigest()[:12]

"""The version, in every place that states it: read them all, or write them all (`make version V=1.2.3`).

Distributions, images and the chart are of one version: they are built from one commit and tested together.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
# PEP 440 and semantic versioning both read it; the chart needs the second.
VERSION: Final = r"[0-9]+\.[0-9]+\.[0-9]+(?:rc[0-9]+)?"
_IMAGE: Final = r"registry\.example\.org/highwater:"
_NEW_TAG: Final = "newName: registry.example.org/highwater, newTag: "  # kustomize
_GIVEN = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(rc[0-9]+)?")


class Place(NamedTuple):
    """A place that states the version: a file, and the text before and behind it, as regular expressions."""

    file: str
    before: str
    behind: str = ""
    is_semver: bool = False
    """A release candidate is written 1.2.3-rc.1 there, as Helm wants it, and 1.2.3rc1 elsewhere."""

    def pattern(self) -> re.Pattern[str]:
        """Return the expression: before, version, behind."""
        version = VERSION.replace("rc", r"-rc\.") if self.is_semver else VERSION
        return re.compile(f"({self.before})({version})({self.behind})", re.MULTILINE)


PLACES: Final = (
    Place("app/highwater/__init__.py", r'^__version__ = "', '"'),
    Place("worker_ext/highwater_worker/wire.py", r'^EXTENSION_VERSION = "', '"'),
    Place("pyproject.toml", r'^version = "', '"'),
    Place("pyproject.toml", r'"vllm-highwater-worker==', '"'),
    Place("worker_ext/pyproject.toml", r'^version = "', '"'),
    Place("helm/Chart.yaml", "^version: ", "$", is_semver=True),
    Place("helm/Chart.yaml", '^appVersion: "', '"$'),
    Place("docker/Dockerfile", "^ARG VERSION=", "$"),
    Place("docker/vllm.Dockerfile", "^ARG VERSION=", "$"),
    Place("docker/extension.Dockerfile", "^ARG VERSION=", "$"),
    Place("helm/ci/statefulset-values.yaml", "registry.example.org/highwater, tag: ", "}"),
    Place("docs/docker.md", "--build-arg VERSION=", "(?= )"),
    Place("docs/install/index.md", _IMAGE, "(?= )"),
    Place("docs/install/index.md", f"push {_IMAGE}", "$"),
    Place("docs/install/attach.md", _IMAGE, "(?= )"),
    Place("docs/install/kserve/llm.yaml", _IMAGE, "$"),
    Place("docs/install/kserve/service.yaml", _IMAGE, "$"),
    Place("docs/install/llm-d/values.yaml", _IMAGE, "$"),
    Place("docs/install/ray/service.yaml", _IMAGE, "$"),
    Place("docs/install/leaderworkerset/kustomization.yaml", _NEW_TAG, "(?=})"),
    Place("docs/install/production-stack/highwater/kustomization.yaml", _NEW_TAG, "(?=})"),
)


class VersionError(Exception):
    """The places disagree, or one of them states no version; the message is for people."""


def semver(version: str) -> str:
    """Return a version as semantic versioning writes it: ``1.2.3-rc.1`` for ``1.2.3rc1``."""
    return re.sub(r"rc(\d+)$", r"-rc.\1", version)


def stated(root: Path = ROOT) -> dict[Place, str]:
    """Return what each place states, as Python writes it.

    Raises:
        VersionError: One of them states none.
    """
    found = {}
    for place in PLACES:
        match = place.pattern().search((root / place.file).read_text(encoding="utf-8"))
        if match is None:
            raise VersionError(f"{place.file}: no version behind {place.before!r}; release/version.py names the place")
        found[place] = match[2].replace("-rc.", "rc")
    return found


def current(root: Path = ROOT) -> str:
    """Return the one version that all places state.

    Raises:
        VersionError: They disagree, or one states none.
    """
    found = stated(root)
    versions = sorted(set(found.values()))
    if len(versions) > 1:
        lines = "\n".join(f"  {version:12} {place.file}" for place, version in found.items())
        raise VersionError(f"the version is stated in {len(versions)} ways:\n{lines}\nmake version V=... writes one")
    return versions[0]


def write(version: str, root: Path = ROOT) -> list[str]:
    """Write a version to every place, and return the files that changed.

    Raises:
        VersionError: It is no version, or a place has none to replace; nothing is written then.
    """
    if not _GIVEN.fullmatch(version):
        raise VersionError(f"{version!r} is no version of this project; one is 1.2.3, or 1.2.3rc1")
    stated(root)
    changed = []
    for name in dict.fromkeys(place.file for place in PLACES):
        path = root / name
        before = after = path.read_text(encoding="utf-8")
        for place in PLACES:
            if place.file == name:
                wanted = semver(version) if place.is_semver else version
                after = place.pattern().sub(rf"\g<1>{wanted}\g<3>", after)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(name)
    return changed


def main() -> int:
    """Print the version, or write the one that is given."""
    try:
        if len(sys.argv) > 1:
            for name in write(sys.argv[1]):
                print(f"{sys.argv[1]} -> {name}")
        print(current())
    except VersionError as exc:
        print(f"version: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

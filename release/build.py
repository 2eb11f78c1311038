"""Builds the files of a release: wheels and sdists of both distributions, and the chart's package.

The same commit gives the same bytes, whoever builds, when, where and under which umask: only files that git tracks are
built, with fixed modes, and every time in an archive is the commit's. What people rebuild they can compare.

On an index there is no repository around a README: its relative links become links to the files of this version's tag.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Final

from helm_python.chart import package

from release.version import ROOT, current

READMES: Final = ("README.md", "worker_ext/README.md")
SUMS: Final = "SHA256SUMS"
# Code comes first, so that what looks like a link within it is left alone.
_LINK = re.compile(
    r"(?P<code>```.*?```|`[^`\n]+`(?!\]))|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://)([^)\s]+)\)", re.DOTALL
)


def absolute_links(text: str, folder: str, repository: str, version: str) -> str:
    """Return Markdown with its relative links made absolute, to the files of a version's tag.

    Args:
        text: The Markdown.
        folder: Its folder within the repository; empty for the root.
        repository: The repository's URL.
        version: The version.
    """

    def absolute(match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match[0]
        _, mark, shown, target = match.groups()
        path, _, anchor = target.partition("#")
        # A heading of the page itself has no anchor on an index.
        where = os.path.normpath(os.path.join(folder, path)) if path else os.path.join(folder, "README.md")
        kind = "raw" if mark else "blob"
        return f"{mark}[{shown}]({repository}/{kind}/v{version}/{where}{f'#{anchor}' if anchor else ''})"

    return _LINK.sub(absolute, text)


def build(out: Path, *, root: Path = ROOT) -> list[Path]:
    """Build everything into a folder, and return the files, their checksums last.

    Args:
        out: Gets the files; what it has of an earlier build is removed.
        root: A checkout, whose tracked files are built as they stand there.
    """
    version = current(root)
    repository = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    epoch = _git(root, "log", "-1", "--format=%ct").strip()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        tree = Path(work) / "tree"
        _copy_tracked(root, tree)
        for name in READMES:
            text = (tree / name).read_text(encoding="utf-8")
            folder = os.path.dirname(name)
            (tree / name).write_text(absolute_links(text, folder, repository, version), encoding="utf-8")
        shutil.copy(tree / "LICENSE", tree / "worker_ext" / "LICENSE")  # each distribution carries it
        for project in (tree / "worker_ext", tree):
            _build_distribution(project, out, epoch)
        _package_chart(tree / "helm", out, int(epoch))
    files = sorted(path for path in out.iterdir() if path.is_file())
    sums = out / SUMS
    sums.write_text("".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files))
    return [*files, sums]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def _copy_tracked(root: Path, tree: Path) -> None:
    for name in _git(root, "ls-files", "-z").split("\0"):
        source = root / name
        if not name or not source.is_file():
            continue
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
    for folder in (tree, *(path for path in tree.rglob("*") if path.is_dir())):
        folder.chmod(0o755)


def _build_distribution(project: Path, out: Path, epoch: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HATCH_")}
    environ |= {"SOURCE_DATE_EPOCH": epoch, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(out.resolve())]
    subprocess.run(command, cwd=project, env=environ, check=True, stdout=subprocess.DEVNULL)


def _package_chart(chart: Path, out: Path, epoch: int) -> None:
    """Package the chart as Helm does, and fix what Helm takes from the clock and the machine."""
    with tempfile.TemporaryDirectory() as work:
        packaged = Path(str(package(chart, destination=work)))
        plain = io.BytesIO()
        with tarfile.open(packaged) as given, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as fixed:
            for member in sorted((one for one in given if one.isfile()), key=lambda one: one.name):
                entry = tarfile.TarInfo(member.name)
                entry.size, entry.mtime, entry.mode = member.size, epoch, 0o644
                fixed.addfile(entry, given.extractfile(member))
        (out / packaged.name).write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))


def main() -> None:
    """Build into a folder, and list what was made."""
    parser = argparse.ArgumentParser(prog="python -m release.build", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="gets the files; emptied first")
    for file in build(parser.parse_args().out):
        print(file)


if __name__ == "__main__":
    main()

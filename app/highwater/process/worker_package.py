"""Copies the worker package to a folder for an engine's ``PYTHONPATH``, with the metadata that vLLM finds it by.

Nothing is installed into the engine's environment. The folder is for the copy alone: one that holds anything else is
refused, so that no other file goes onto an engine's path or is removed. ::

    FOLDER/.highwater-worker-3q2x8k1z/...                    the copy, whole before it has a name
    FOLDER/highwater_worker -> .highwater-worker-3q2x8k1z/highwater_worker
    FOLDER/vllm_highwater_worker-0.1.0.dist-info -> .highwater-worker-3q2x8k1z/vllm_highwater_worker-0.1.0.dist-info

A link is replaced in one step, which a mounted folder cannot be: an engine that starts at any moment finds the old
package or the new one.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from highwater.process.errors import HighwaterError, os_reason

# A CPU build of torch beside another torchvision, as pip installs them, cannot import vLLM without it.
SHIM_FOLDER = Path(__file__).parent / "shim"
DISTRIBUTION = "vllm-highwater-worker"
PACKAGE = "highwater_worker"
_STORE_PREFIX = ".highwater-worker-"
_METADATA_PREFIX = "vllm_highwater_worker-"
_METADATA_SUFFIX = ".dist-info"
_METADATA_FILES = ("METADATA", "entry_points.txt")
# A mounted disk has it at its root.
_NOT_FOREIGN = frozenset({"lost+found"})
# Readable by all, whatever the umask is: the engine may run as another user.
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644


class WorkerPackageError(HighwaterError):
    """The worker package cannot be copied. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class CopiedPackage:
    folder: Path
    version: str
    is_new: bool


def copy_worker_package(folder: Path) -> CopiedPackage:
    """Copy the worker package that is installed beside this one, in place of an older copy.

    Raises WorkerPackageError: it is not installed as files, the folder holds something else, or cannot be written.
    """
    version, files = _installed()
    try:
        folder, place = folder.absolute(), package_folder()
        if not str(folder).isprintable() or os.pathsep in str(folder):
            raise WorkerPackageError(
                f"{str(folder)!r} cannot be on a PYTHONPATH: name a folder without {os.pathsep!r} in its path"
            )
        if place is not None and folder.resolve().is_relative_to(place.resolve()):
            raise WorkerPackageError(
                f"{folder} lies within the worker package itself: name a folder outside of {place}"
            )
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in missing:
            place.chmod(_FOLDER_MODE)
        with _locked(folder):
            _refuse_foreign(folder)
            content, names = {}, _metadata_names(folder)
            if names == [_metadata_name(version)]:
                content = {
                    path.relative_to(folder).as_posix(): path.read_bytes()
                    for name in (PACKAGE, *names)
                    for path in _sources(folder / name)
                }
            is_new = content != files
            if is_new:
                _replace(folder, files)
            _remove_older(folder)
    except OSError as exc:
        place = exc.filename or folder
        raise WorkerPackageError(
            f"the worker package cannot be copied to {folder}: {place}: {os_reason(exc)}; name a folder that this user "
            "can write to"
        ) from exc
    return CopiedPackage(folder, version, is_new)


def package_folder() -> Path | None:
    """Return where the package is imported from; ``None``: it is no folder of files here.

    An editable install has its files elsewhere than its metadata.
    """
    spec = find_spec(PACKAGE)
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return next((place for place in places[:1] if (place / "__init__.py").is_file()), None)


def _installed() -> tuple[str, dict[str, bytes]]:
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError as exc:
        raise WorkerPackageError(
            f"the distribution {DISTRIBUTION} is not installed beside highwater: run `pip install {DISTRIBUTION}`, or "
            "`pip install ./worker_ext` in the repository"
        ) from exc
    place = package_folder()
    if place is None:
        raise WorkerPackageError(f"the package {PACKAGE} is not a folder of files here, and so cannot be copied")
    files = {f"{PACKAGE}/{path.relative_to(place).as_posix()}": path.read_bytes() for path in _sources(place)}
    metadata = _metadata_name(installed.version)
    for name in _METADATA_FILES:
        text = installed.read_text(name)
        if text is None:
            raise WorkerPackageError(f"the installed {DISTRIBUTION} has no {name}: install it again")
        files[f"{metadata}/{name}"] = text.encode()
    files[f"{metadata}/INSTALLER"] = b"highwater\n"
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(content).digest()) for name, content in files.items()}
    lines = [f"{name},sha256={digests[name].rstrip(b'=').decode()},{len(files[name])}" for name in files]
    files[f"{metadata}/RECORD"] = "\n".join([*lines, f"{metadata}/RECORD,,", ""]).encode()
    return installed.version, files


def _sources(package: Path) -> Iterator[Path]:
    return (
        path
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    )


def _metadata_name(version: str) -> str:
    return f"{_METADATA_PREFIX}{version}{_METADATA_SUFFIX}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other copiers out: of two at once, the second finds the first one's copy."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _refuse_foreign(folder: Path) -> None:
    foreign = []
    for path in sorted(folder.iterdir()):
        name = path.name
        is_link_of_ours = path.is_symlink() and str(path.readlink()).startswith(_STORE_PREFIX)
        is_ours = is_link_of_ours and (name == PACKAGE or _is_metadata(name))
        if not (is_ours or name in _NOT_FOREIGN or name.startswith(_STORE_PREFIX)):
            foreign.append(name)
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise WorkerPackageError(
            f"{folder} holds {foreign[0]}{more}, which `highwater extension` did not write; name an empty folder, or "
            "one that holds an older copy and nothing else"
        )


def _is_metadata(name: str) -> bool:
    return name.startswith(_METADATA_PREFIX) and name.endswith(_METADATA_SUFFIX)


def _replace(folder: Path, files: Mapping[str, bytes]) -> None:
    store = Path(tempfile.mkdtemp(prefix=_STORE_PREFIX, dir=folder))
    try:
        for name, content in files.items():
            path = store / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(_FILE_MODE)
        for path in (store, *(path for path in store.rglob("*") if path.is_dir())):
            path.chmod(_FOLDER_MODE)
        # First the package, then the metadata that makes an engine load it.
        for name in sorted({name.partition("/")[0] for name in files}):
            draft = folder / f"{_STORE_PREFIX}{name}"
            draft.unlink(missing_ok=True)
            draft.symlink_to(Path(store.name) / name)
            draft.replace(folder / name)  # in one step for its readers
    except BaseException:
        if not any(_leads_to(folder / name, store) for name in (PACKAGE, *_metadata_names(folder))):
            shutil.rmtree(store, ignore_errors=True)
        raise


def _remove_older(folder: Path) -> None:
    """Remove whatever does not belong to the copy in place: of the one before it, or of one that was cut off."""
    store = folder / (folder / PACKAGE).readlink().parts[0]
    for path in folder.iterdir():
        if _is_metadata(path.name) and not _leads_to(path, store):
            path.unlink()
        elif path.name.startswith(_STORE_PREFIX) and path != store:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def _metadata_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if _is_metadata(path.name)]


def _leads_to(link: Path, store: Path) -> bool:
    return link.is_symlink() and link.readlink().parts[0] == store.name

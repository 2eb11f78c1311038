"""A model's config.json, wherever it is: a folder, a file, standard input, or the local cache of Hugging Face."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from highwater.files.regular import FileTooLargeError, read_regular
from kvplan.errors import PlanError

_MAX_INDEX_BYTES: Final = 100_000_000
_MAX_STDIN_BYTES: Final = 10_000_000


class NoModelError(PlanError):
    """There is no such model here: no other road would find it either."""


def placed(model: str | None, made: Path) -> Path | None:
    """Return a folder in ``made`` for a file or standard input (`-`), which vLLM takes; None: it takes this as it is.

    Raises PlanError: the file holds no JSON object, or the name is a variable's.
    """
    if model is not None and "$" in model and not Path(model).exists():
        raise NoModelError(f"the model is {model!r}, a variable of a shell that is not known here; put its value there")
    if model is None or (model != "-" and not Path(model).is_file()):
        return None
    file = Path(model)
    if file.name == "config.json":
        return file.parent.absolute()
    folder = made / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(sys.stdin.buffer.read(_MAX_STDIN_BYTES) if model == "-" else file.read_bytes())
    read_object(folder / "config.json", _MAX_STDIN_BYTES, "the model's config.json")
    return folder


def folder_of(model: str | None) -> Path:
    """Return the folder with a model's config.json: its own, or that of the cache. Raises PlanError: there is none."""
    if model is None:
        raise NoModelError("the command line names no model; it is a folder, a config.json, - or a Hugging Face id")
    if Path(model, "config.json").is_file():
        return Path(model)
    found = sorted(
        hub_cache().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"),
        key=lambda path: path.stat().st_mtime,
    )
    if not found:
        is_id = model.count("/") == 1 and not model.startswith((".", "/"))
        fetch = f"hf download {model} --include '*.json' fetches what is read" if is_id else "give one that is"
        raise NoModelError(f"model: {model!r} is no folder with a config.json, and is not in the local cache; {fetch}")
    return found[-1].parent


def hub_cache() -> Path:
    """Return the folder in which Hugging Face keeps the models that it fetched."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))


def checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights beside a config.json, or those that its index names; None: not there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        metadata = read_object(index, _MAX_INDEX_BYTES, "an index of safetensors").get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
        if isinstance(size, int):
            return size
    # A link without its file is a weight that was not fetched: what is there is not the whole.
    files = list(folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) or None if all(file.is_file() for file in files) else None


# --- Files that a plan reads: regular ones of a bounded size, as others may have written them; most hold JSON ---


def read_content(path: Path, limit: int, needed: str) -> bytes:
    """Return a file of ``limit`` bytes at most; a link is followed, as in a Hugging Face cache.

    Raises PlanError: it is not a regular file, cannot be read, or is larger. ``needed`` says what is expected there.
    """
    try:
        return read_regular(path, limit, follows_link=True)
    except FileTooLargeError as exc:
        raise PlanError(f"{path}: has more than {limit:,} bytes; {needed} is needed") from exc
    except (OSError, ValueError) as exc:  # a path with a null byte is a ValueError
        raise PlanError(f"{path}: cannot be read: {getattr(exc, 'strerror', None) or exc}; {needed} is needed") from exc


def read_object(path: Path, limit: int, needed: str) -> dict[str, Any]:
    """Return the object in a JSON file, as `read_content` reads it. Raises PlanError: it holds none."""
    try:
        value = json.loads(read_content(path, limit, needed).decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise PlanError(f"{path}: holds no JSON: {exc}; {needed} is needed") from exc
    if not isinstance(value, dict):
        raise PlanError(f"{path}: a JSON object is needed ({needed}), this is a {type(value).__name__}")
    return value

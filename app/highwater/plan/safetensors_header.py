"""The tensors of a checkpoint's safetensors files, from their headers: no weight is read.

A file begins with eight bytes, the length of a JSON object that gives each tensor's dtype, shape and place
(https://github.com/huggingface/safetensors#format). Files come from strangers: lengths are bounded, places are checked
against the file, and names cannot lead out of the folder.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from highwater.files.regular import NotARegularFileError, open_regular
from highwater.plan.checkpoint import Tensor
from highwater.units import ceil_div
from kvplan.errors import PlanError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # The format's own limit.
_MAX_INDEX_BYTES = 100_000_000
_MAX_FILES = 10_000
_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version "
_SHOWN_NAME = 200
_MAX_DIMENSIONS = 64
_FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_BITS = {
    **_FLOATS,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "C64": 64,
}  # fmt: skip


def checkpoint_tensors(folder: Path) -> tuple[Tensor, ...]:
    """Return every tensor of the safetensors files that vLLM would load from a folder; empty if it has no such file.

    Raises PlanError: a file is missing, cut short, or is not a safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        for tensor in read_header(path):
            if tensor.name in tensors:
                raise PlanError(f"{tensor.name!r} is in two safetensors files of {folder}: each should be in one")
            tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _files(folder: Path) -> Iterator[Path]:
    """Return the files of the index where there is one, as vLLM does (`filter_duplicate_safetensors_files`)."""
    index = folder / _INDEX
    if not index.exists():
        found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
        yield from found[: _MAX_FILES + 1]
        return
    with _open(index) as file:
        listed = _object(file.read(_MAX_INDEX_BYTES + 1), index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(listed, Mapping) or not all(isinstance(name, str) for name in listed.values()):
        raise PlanError(f"weight_map is missing in {index}: it should give the file of each tensor")
    names = sorted(set(listed.values()))
    if len(names) > _MAX_FILES:
        raise PlanError(f"weight_map names {len(names)} files in {index}: at most {_MAX_FILES} are read")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise PlanError(f"weight_map names {name[:200]!r} in {index}: it should be a safetensors file beside it")
        path = folder / name
        if not path.exists():
            raise PlanError(f"{name} is named in {index}, but is not in the folder: the checkpoint is incomplete")
        yield path


def read_header(path: Path) -> tuple[Tensor, ...]:
    """Return the tensors of one safetensors file. Raises PlanError: it cannot be read, or is not a safetensors file."""
    with _open(path) as file:
        size = path.stat().st_size
        start = file.read(_LENGTH_BYTES)
        if start == _LFS_POINTER:
            raise PlanError(f"{path} is a pointer of git-lfs, not the file itself: fetch it with `git lfs pull`")
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or length > _MAX_HEADER_BYTES or length > size - _LENGTH_BYTES:
            raise PlanError(
                f"{path} says that its header has {length} bytes, but the file has {size} and a header at most"
                f" {_MAX_HEADER_BYTES}: it is cut short or is not a safetensors file"
            )
        header = _object(file.read(length), path, _MAX_HEADER_BYTES)
    room = size - _LENGTH_BYTES - length
    return tuple(_tensor(name, entry, room, path) for name, entry in header.items() if name != "__metadata__")


def _open(path: Path) -> BinaryIO:
    try:
        return os.fdopen(open_regular(path, follows_link=True), "rb")
    except NotARegularFileError as error:
        raise PlanError(f"{path} is not a regular file") from error
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or error}") from error


def _object(text: bytes, path: Path, most: int) -> Mapping[str, Any]:
    if len(text) > most:
        raise PlanError(f"{path} has more than {most} bytes of JSON: that is not an index or a header")
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"{path} is cut short or is not a safetensors file: its JSON cannot be read ({error})"
        ) from error
    if not isinstance(value, Mapping):
        raise PlanError(f"{path} is not a safetensors file: its JSON should be an object")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name is there twice")
    return value


def _tensor(name: str, entry: object, room: int, path: Path) -> Tensor:
    shown = name[:_SHOWN_NAME]
    described = entry if isinstance(entry, Mapping) else {}
    dtype, shape, place = described.get("dtype"), described.get("shape"), described.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise PlanError(f"dtype of {shown!r} is {str(dtype)[:40]!r} in {path}: it should be one of {', '.join(_BITS)}")
    if not _are_sizes(shape) or not _are_sizes(place) or len(place) != 2:  # noqa: PLR2004 - begin and end
        raise PlanError(f"shape or data_offsets of {shown!r} make no sense in {path}: lists of sizes are needed")
    expected = ceil_div(math.prod(shape) * _BITS[dtype], 8)
    if place[1] - place[0] != expected or place[1] > room:
        raise PlanError(
            f"data_offsets of {shown!r} are {place} in {path}: its shape needs {expected} bytes within the"
            f" {room} that follow the header"
        )
    return Tensor(name, tuple(shape), _BITS[dtype], floating=dtype in _FLOATS)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    # The number of dimensions is bounded, so that their product is.
    return (
        isinstance(values, list)
        and len(values) <= _MAX_DIMENSIONS
        and all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 for value in values)
    )

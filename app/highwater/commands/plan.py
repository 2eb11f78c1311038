"""``highwater plan``: the KV cache that a vLLM command line makes for a model, from its config.json alone."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from highwater.commands.plan_live import ask_sidecar, end_with, grant_for_model, print_json
from highwater.commands.sizes import count_option, device_size_option, vllm_size_option
from highwater.exit_codes import DOES_NOT_FIT, INVALID, OK
from kvplan.errors import PlanError
from kvplan.flags import EngineFlags

if TYPE_CHECKING:
    from highwater.plan.offline import OfflinePlan

# By the names of the command's parameters.
_FOUND_BY_A_WISH: Final = ("max_model_len", "max_num_seqs")
_OF_A_RUNNING_ENGINE: Final = (
    *("vllm_version", "platform", "device_bytes", "in_use_bytes", "measured", "compute_capability", "oracle"),
    "limit_mm_per_prompt",
)

_NOT_ASKED: Final = ("kv_cache_memory_bytes",)  # the bytes of a plan go beside its command line


def _list_architectures(context: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001 - click's signature
    if not value or context.resilient_parsing:
        return
    from highwater.plan.models.architectures import ARCHITECTURES

    click.echo("\n".join(sorted(ARCHITECTURES)))
    context.exit()


def _json_object(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, Any] | None:
    try:
        found = None if value is None else json.loads(value)
    except (ValueError, RecursionError):
        found = value
    if found is not None and not isinstance(found, dict):
        raise click.BadParameter(f"{value!r}; a JSON object is needed", context, parameter)
    return found


_size: Final = partial(click.option, callback=vllm_size_option)
_number: Final = partial(click.option, callback=count_option)
_STATUS: Final = (
    "Exit status: 0 it fits, 1 it does not or may not, 2 the input is refused; without bytes to compare, 0."
)


@click.command(epilog=_STATUS)
@click.argument("model", metavar="CONFIG_OR_DIR", required=False)
@click.option("--live", "live_url", metavar="URL", help="plan the running engine behind this sidecar with other flags")
@click.option("--wish", metavar="TEXT", help="what is to fit, such as '8 x 32k + 4 images of 1080p each'")
@click.option("--vllm-version", metavar="VERSION", help="the version of vLLM  [default: the newest that was tested]")
@click.option("--platform", type=click.Choice(["cuda", "ascend", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--device", "device_bytes", callback=device_size_option, metavar="SIZE",
    help="the memory of one card, such as 80GiB",
)  # fmt: skip
@_size("--in-use", "in_use_bytes", metavar="SIZE", help="what others have in use of it when the engine starts")
@click.option(
    "--measured", type=click.Path(path_type=Path), metavar="FILE",
    help="a start of this model that `highwater explain --json` wrote: what it measured replaces estimates",
)  # fmt: skip
@click.option("--compute-capability", metavar="X.Y", help="the CUDA card's, for MLA's block size  [default: 9.0]")
@_size("--kv-cache-memory-bytes", metavar="SIZE", help="bytes for the KV cache of one rank")
@click.option("--gpu-memory-utilization", type=float, metavar="SHARE", help="the share of the card that vLLM takes")
@_number("--max-model-len", metavar="N", help="the longest sequence")
@_number("--max-num-batched-tokens", metavar="N", help="the tokens of one step")
@_number("--max-num-seqs", metavar="N", help="the requests of one step")
@click.option("-tp", "--tensor-parallel-size", "--tp", type=int, default=1, show_default=True)
@click.option("-pp", "--pipeline-parallel-size", "--pp", type=int, default=1, show_default=True)
@click.option("-dp", "--data-parallel-size", type=int, default=1, show_default=True)
@click.option("-dcp", "--decode-context-parallel-size", type=int, default=1, show_default=True)
@click.option("-pcp", "--prefill-context-parallel-size", type=int, default=1, show_default=True)
@click.option("--enable-expert-parallel", is_flag=True)
@click.option("--dtype", metavar="TYPE", help="auto, bfloat16, float16, float32")
@click.option("--kv-cache-dtype", metavar="TYPE", help="auto, fp8, ...")
@click.option("-q", "--quantization", metavar="METHOD")
@click.option("--block-size", type=int, metavar="N")
@click.option("--num-gpu-blocks-override", type=int, metavar="N")
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=None)
@click.option("--async-scheduling/--no-async-scheduling", default=None)
@click.option("--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager", default=False)
@click.option("--mamba-cache-dtype", metavar="TYPE")
@click.option("--mamba-ssm-cache-dtype", metavar="TYPE")
@click.option("--mamba-block-size", type=int, metavar="N")
@click.option("--mamba-cache-mode", metavar="MODE", help="none, align or all")
@click.option(
    "--limit-mm-per-prompt", callback=_json_object, metavar="JSON", help='items of a prompt, such as {"video": 0}'
)
@click.option("-sc", "--speculative-config", metavar="JSON", help="a drafter, as vLLM takes it")
@click.option(
    "--list-architectures", is_flag=True, is_eager=True, expose_value=False, callback=_list_architectures,
    help="list the architectures that can be planned, and end",
)  # fmt: skip
@click.option("--oracle", metavar="PYTHON", help="ask the vLLM of this interpreter too, and show what differs")
@click.option("--json", "as_json", is_flag=True, help="for programs")
def plan(
    model: str | None,
    *,
    live_url: str | None,
    wish: str | None,
    vllm_version: str | None,
    measured: Path | None,
    oracle: str | None,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - the flags
) -> None:
    """Plan a vLLM command line for a model, exactly as vLLM would size its KV cache.

    CONFIG_OR_DIR is the model's config.json, or the folder that holds it; no weights, device or vLLM are needed. Flags
    are vLLM's; one that is left out takes the default of that version. What cannot be known exactly is refused or
    called unknown. With --live the running engine's own layers and measurements are planned with the flags that are
    given; with --wish the flags are found.
    """
    from highwater.plan import answer, offline
    from highwater.plan.measured import read_start

    try:
        if wish is not None:
            _refuse_given("--wish: it finds this flag itself", _FOUND_BY_A_WISH)
        if live_url is not None:
            _refuse_given("--live: the running engine has its own", _OF_A_RUNNING_ENGINE)
            if model is not None and wish is None:
                raise click.UsageError("--live plans the running engine: leave CONFIG_OR_DIR out, or --live")
            end_with(ask_sidecar(live_url, given, wish, model), as_json=as_json)
        if model is None:
            raise click.UsageError("CONFIG_OR_DIR is missing; without it, --live URL plans a running engine")
        flags, values = EngineFlags(**given), offline.read_config(model)
        tensors = None if flags.device_bytes is None else offline.read_tensors(model)
        start = None if measured is None else read_start(measured)
        version = vllm_version or offline.DEFAULT_VERSION
        preprocessor = offline.read_preprocessor(model)
        plan_flags = partial(
            offline.plan_offline, values, version=version, preprocessor=preprocessor, tensors=tensors, measured=start
        )
        if wish is not None:
            end_with(grant_for_model(model, values, wish, flags, plan_flags), as_json=as_json)
        planned = plan_flags(flags)
        compared = None if oracle is None else _compared(oracle, planned, Path(model))
    except PlanError as exc:
        if as_json:
            print_json({"schema": answer.SCHEMA, "error": str(exc)})
        click.echo(f"highwater: {exc}", err=True)
        sys.exit(INVALID)
    if as_json:
        print_json(answer.plan_json(planned, model, compared))
    else:
        click.echo(answer.plan_text(planned, compared))
    is_unknown = planned.fits is None and planned.available_bytes is None
    sys.exit(OK if planned.fits or is_unknown else DOES_NOT_FIT)


def _refuse_given(why: str, names: Iterable[str]) -> None:
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(parameter for parameter in context.command.params if parameter.name == name)
            raise click.UsageError(f"{why}; leave {max(option.opts, key=len)} out")


def _compared(python: str, planned: OfflinePlan, model: Path) -> dict[str, Any]:
    from highwater.demo.engine import SHIM_FOLDER
    from highwater.files.worker_package import copy_worker_package
    from highwater.plan.oracle import ask_vllm, differences
    from kvplan.flags import command_line, given_flags

    flags = planned.resolved.flags
    if planned.available_bytes is None:
        needed = "the bytes for the KV cache are needed: give --kv-cache-memory-bytes, or --device"
        raise PlanError(f"--oracle: {planned.refusal or needed}")
    if flags.platform == "cpu":
        raise PlanError("--oracle: --platform is 'cpu'; vLLM is asked as for a card: must be cuda or ascend")
    given = {name: value for name, value in given_flags(planned.resolved.given).items() if name not in _NOT_ASKED}
    card = "910B" if flags.platform == "ascend" else flags.compute_capability or "9.0"
    with tempfile.TemporaryDirectory() as made:
        folder = model if model.is_dir() else model.parent
        if not model.is_dir() and model.name != "config.json":  # under another name, vLLM would not read it
            folder = Path(made, "model")
            folder.mkdir()
            (folder / "config.json").symlink_to(model.absolute())
        words = shlex.split(command_line(given, str(folder.absolute())))
        # A CPU build of torch beside another torchvision, as pip installs them, cannot import vLLM without the shim.
        path = (SHIM_FOLDER, copy_worker_package(Path(made, "worker")).folder)
        answer = ask_vllm(python, words, card=card, kv_cache_bytes=planned.pool.available_bytes, path=path)
    return {"vllm_version": answer["versions"]["vllm"], "differences": list(differences(planned.pool, answer))}

"""One question and its answer: effective configuration, weights, encoder, activation, KV cache; how each is known."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import os
import re
import time
import traceback
from pathlib import Path
from typing import Any

from highwater_worker.plan import GUESSED, LOG, NOT_COUNTED, PRETENDED, budget, say, versions
from highwater_worker.plan.cards import STATUS, Card, Figure, exact, kv_cache, left

SCHEMA = 1
STATUSES = {"fits": 0, "not_known": 0, "may_not_fit": 1, "does_not_fit": 1, "refused": 1, "invalid": 2}
"""Exit status by an answer's `status`; `not_known`: no bytes to compare with. Any other is 4: it cannot be asked."""
CANNOT_BE_ASKED = 4
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")
_CONFIGS = ("model", "cache", "parallel", "scheduler", "speculative", "lora", "kv_transfer")
_MAX_PIXELS = 1 << 25


class InvalidError(Exception):
    """The command line is not one that vLLM takes; says so in vLLM's words where they are."""


def answer(question: dict[str, Any], card: Card) -> dict[str, Any]:
    """Answer a question; whatever vLLM raises becomes part of the answer."""
    found: dict[str, Any] = {"schema": SCHEMA, "status": "cannot_be_asked", "stage": "the command line"}
    started, model = time.perf_counter(), ""
    try:
        given = parsed(question["words"])
        model = str(given.model)
        config = engine_config(given)
        found |= {"stage": "construction", "config": _effective(config)}
        _ask(config, question, card, found)
        del found["stage"]
    except InvalidError as error:
        found |= {"status": "invalid", "error": str(error)}
    except Exception as error:  # noqa: BLE001 - it is said in the answer, with where it happened
        found |= _failure(error, found["stage"], model)
    packages = {name: str(importlib.import_module(name).__version__) for name in ("vllm", "torch", "transformers")}
    told = {"pretended": PRETENDED, "not_counted": NOT_COUNTED, "guessed": GUESSED, "log": LOG}
    seconds = round(time.perf_counter() - started, 2)
    return found | {"versions": packages, "card": card._asdict(), **told, "seconds": seconds}


def parsed(words: list[str]) -> Any:
    """Return what vLLM's parser makes of a command line. Raises InvalidError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            arguments = versions.argument_parser().parse_args(words)
    except SystemExit as end:
        last = said.getvalue().strip().rpartition("\n")[2] if end.code else "--help or --version was asked for"
        raise InvalidError(last.partition("error: ")[2] or last) from end
    except (OSError, ValueError) as error:  # of --config
        raise InvalidError(str(error)) from error
    if getattr(arguments, "model_tag", None):
        arguments.model = arguments.model_tag
    return arguments


def engine_config(arguments: Any) -> Any:
    """Return the configuration that the API server would make. Raises whatever vLLM raises."""
    made = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(arguments)
    usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    return made.create_engine_config(usage_context=usage)


def _ask(config: Any, question: dict[str, Any], card: Card, found: dict[str, Any]) -> None:
    given = question.get("kv_cache_bytes") or getattr(config.cache_config, "kv_cache_memory_bytes", None)
    parallel, captured = config.parallel_config, budget.graphs(config)
    each = parallel.world_size // parallel.pipeline_parallel_size
    ranks = range(0, parallel.world_size, each)
    if each > 1:
        say(GUESSED, "the ranks of one pipeline stage are alike: the first of each was constructed")
    total = int(question.get("device_bytes") or card.total_bytes)
    importlib.import_module("highwater_worker.plan.platform").pretend_memory(total, question.get("in_use_bytes") or 0)
    configs = [copy.deepcopy(config) for _ in ranks[1:]] + [config]
    wants_peak = question.get("activation", given is None)
    seen = [_construct(mine, rank, wants_peak=wants_peak) for mine, rank in zip(configs, ranks)]
    requested = [one.pop("requested_bytes") for one in seen]
    specs = [spec for one in seen for spec in [one.pop("specs")] * each]
    found |= {"ranks": [{"rank": rank, **one} for rank, one in zip(ranks, seen)], "stage": "the KV cache"}
    remains: list[Figure] = []
    measured = question.get("measured") or {}
    if given is not None:
        remains = [exact(int(given), "given")] * len(ranks)
    elif all(one["activation"] or "activation" in measured for one in seen):
        of_start = functools.partial(budget.parts_of_start, config=config, measured=measured, is_npu=card.is_npu)
        parts = [of_start({**one, "graphs": captured}) for one in seen]
        remains = [left(size, of_rank) for size, of_rank in zip(requested, parts)]
        rows = [{name: part._asdict() for name, part in of_rank.items()} for of_rank in parts]
        found["budget"] = {"total_bytes": total, "requested_bytes": requested[0], "ranks": rows}

    def pool(sizes: list[int]) -> dict[str, Any]:
        values = [versions.less_image_buffers(size, config) for size in sizes for _ in range(each)]
        return budget.kv_pool(config, specs, values or [1 << 50] * len(specs))

    found["kv_cache"] = kv = kv_cache(remains, pool, "exact")
    found["status"] = STATUS[kv["fits"]] if remains else "not_known"
    found["encoder"] = None
    if getattr(config.model_config, "is_multimodal_model", False):
        found["encoder"] = _or_error(versions.encoder_budget, config)
    if images := question.get("images"):
        found["images"] = [{"width": w, "height": h, **_or_error(_image, config, w, h)} for w, h in images]


def _construct(config: Any, rank: int, *, wants_peak: bool) -> dict[str, Any]:
    from highwater_worker.plan import construction

    if wants_peak:
        construction.build_eager(config)
    ledger = construction.Ledger()
    with construction.as_rank(config, rank), construction.OnMeta(), ledger:
        worker = construction.make_worker(config, rank)
        runner, buffers = worker.model_runner, ledger.held_bytes
        runner.load_model()
        models = construction.models_of(runner)
        tensors, allocated = budget.weights_of(models)
        why = "its tensors, and as PyTorch's allocator counts them; kernels that repack may pad"
        figure = Figure(allocated, tensors, allocated + allocated // 32, "estimated", why)
        seen: dict[str, Any] = {"weights": figure, "activation": None, "buffers": buffers}
        seen["requested_bytes"] = versions.requested_bytes(worker)
        if wants_peak:
            try:
                seen["activation"] = budget.activation(construction.activation_peak(runner, models, ledger), config)
            except Exception as error:  # noqa: BLE001 - without a peak the card's bytes are not known; it is said
                say(NOT_COUNTED, f"the activation peak: {_said(error)}")
        versions.update_block_size(config)
        return {**seen, "specs": runner.get_kv_cache_spec()}


def _image(config: Any, width: int, height: int) -> dict[str, int]:
    """Return the tokens of an image in a prompt, and its embeddings; raises ValueError where it is too large to try."""
    if min(width, height) < 1 or width * height > _MAX_PIXELS:
        raise ValueError(f"the image has {width} x {height} pixels; must be 1 to {_MAX_PIXELS}")
    blank = importlib.import_module("PIL.Image").new("RGB", (width, height))
    place = versions.image_place(config, blank)
    is_embed = getattr(place, "is_embed", None)
    return {"prompt_tokens": place.length, "embeddings": place.length if is_embed is None else int(is_embed.sum())}


def _or_error(ask: Any, config: Any, *given: Any) -> dict[str, Any]:
    """Return what a question about images finds; the rest is known without it, where a processor's file is missing."""
    try:
        return dict(ask(config, *given))
    except Exception as error:  # noqa: BLE001 - as above
        return {"error": _said(error), "help": _missing(str(config.model_config.model))}


def _effective(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"use_v2_model_runner": bool(getattr(config, "use_v2_model_runner", False))}
    for part in _CONFIGS:
        values = vars(getattr(config, f"{part}_config", None) or object)
        found[part] = {
            name: str(value).replace("torch.", "") if "dtype" in name else value
            for name, value in values.items()
            if isinstance(value, (str, int, float)) or "dtype" in name
        }
    return found


def _failure(error: Exception, stage: str, model: str) -> dict[str, Any]:
    """Return what is said of an exception: a refusal of vLLM's, or why this vLLM cannot be asked."""
    missing, frames = _missing(model), traceback.extract_tb(error.__traceback__)
    readers = (f"{os.sep}transformers{os.sep}", f"{os.sep}tokenizers{os.sep}", "repo_utils", "huggingface_hub")
    is_read = any(name in frame.filename for frame in frames for name in readers)
    is_file = isinstance(error, OSError) or is_read or "local directory specified" in str(error)
    is_sure = stage != "construction" or "Free memory on device" in str(error)  # there a stand-in may be to blame
    if isinstance(error, ValueError) and is_sure and not (missing and is_file):
        return {"status": "refused", "refusal": {"stage": stage, "message": _said(error)}}
    where = [f"{frame.filename.rpartition('-packages/')[2]}:{frame.lineno} {frame.name}" for frame in frames[-4:]]
    return {"error": _said(error), "at": where, "help": missing if is_file else None}


def _said(error: Exception) -> str:
    """Return an exception's words; of pydantic's report on a configuration, vLLM's own."""
    if not isinstance(error, ValueError):
        return f"{type(error).__name__}: {str(error)[:1000]}"
    found = re.search(r"(?:Value error|Assertion failed), (.+?) \[type=", str(error), re.DOTALL)
    return (found[1] if found else str(error))[:2000].replace(" on device meta", " on device")


def _missing(model: str) -> str | None:
    """Return which files of a model vLLM may want and does not find; None: none."""
    folder = Path(model)
    if folder.is_file():
        return f"{model} is a file; a model is its folder: {folder.parent}"
    if folder.is_dir():
        absent = [name for name in _FILES if not Path(model, name).exists()]
        return f"{model} has no {', '.join(absent)}: copy them there from the model" if absent else None
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return f"{model!r} is no folder here; give the one with the model's config.json"
    cache = "is no folder here, and the files of a model on Hugging Face are looked for in the local cache alone"
    return f"{model!r} {cache}: hf download {model} --include '*.json' puts there what is read"

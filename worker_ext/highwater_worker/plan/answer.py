"""One question and its answer: effective configuration, weights, encoder, activation, KV cache; how each is known."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import os
import re
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from highwater_worker.plan import GUESSED, LOG, NOT_COUNTED, PRETENDED, cards, say, versions

SCHEMA = 1
STATUSES = {"fits": 0, "not_known": 0, "may_not_fit": 1, "does_not_fit": 1, "refused": 1, "invalid": 2}
"""Exit status by an answer's `status`; `not_known`: no bytes to compare with. Any other is 4: it cannot be asked."""
CANNOT_BE_ASKED = 4
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")
_CONFIGS = ("model", "cache", "parallel", "scheduler", "speculative", "lora", "kv_transfer")
_MAX_PIXELS = 1 << 25
_MIB = 1 << 20
_SIZED = ("model_config", "cache_config", "scheduler_config", "parallel_config")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class InvalidError(Exception):
    """The command line is not one that vLLM takes; says so in vLLM's words where they are."""


def answer(question: dict[str, Any], card: cards.Card) -> dict[str, Any]:
    """Answer a question; whatever vLLM raises becomes part of the answer."""
    found: dict[str, Any] = {"schema": SCHEMA, "status": "cannot_be_asked", "stage": "the command line"}
    started, model = time.perf_counter(), ""
    try:
        given = parsed(question["words"])
        model = str(given.model)
        made = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(given)
        usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
        config = made.create_engine_config(usage_context=usage)
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


def _ask(config: Any, question: dict[str, Any], card: cards.Card, found: dict[str, Any]) -> None:
    given = question.get("kv_cache_bytes") or getattr(config.cache_config, "kv_cache_memory_bytes", None)
    parallel, captured = config.parallel_config, graphs(config)
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
    measured, parts = question.get("measured") or {}, []
    if given is None and all(one["activation"] or "activation" in measured for one in seen):
        parts = [parts_of_start({**one, "graphs": captured}, config, measured, is_npu=card.is_npu) for one in seen]

    def pool(sizes: list[int]) -> dict[str, Any]:
        values = [versions.less_image_buffers(size, config) for size in sizes for _ in range(each)]
        return kv_pool(config, specs, values or [1 << 50] * len(specs))

    found |= cards.answered(given, total, requested, parts, pool, of_layers="exact")
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
        tensors, allocated = construction.weights_of(models)
        why = "its tensors, and as PyTorch's allocator counts them; kernels that repack may pad"
        figure = cards.Figure(allocated, tensors, allocated + allocated // 32, "estimated", why)
        seen: dict[str, Any] = {"weights": figure, "activation": None, "buffers": buffers}
        seen["requested_bytes"] = versions.requested_bytes(worker)
        if wants_peak:
            try:
                seen["activation"] = activation(construction.activation_peak(runner, models, ledger), config)
            except Exception as error:  # noqa: BLE001 - without a peak the card's bytes are not known; it is said
                say(NOT_COUNTED, f"the activation peak: {_said(error)}")
        versions.update_block_size(config)
        return {**seen, "specs": runner.get_kv_cache_spec()}


# --- the parts of a start before the KV cache, as this version counts them, and the pool of the rest ---


def activation(peak: int, config: Any) -> cards.Figure:
    """Return the bounds of a peak that `profile_run` had on `meta`; starts of dense models printed 36 MiB more.

    Compiled code holds less at once than operators one by one, or more where it unrolls. The fused experts keep two
    buffers in which each token is once for each of its experts; MXFP4's kernels were seen without them.
    """
    text, buffers = vars(config.model_config.hf_text_config), 0
    if _has_experts(text):
        say(NOT_COUNTED, "the workspace of fused experts was computed, not seen, in the activation peak")
        chosen = text.get("num_experts_per_tok") or text.get("moe_topk") or text.get("top_k_experts") or 1
        inner = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
        inner, width = inner // config.parallel_config.tensor_parallel_size, text.get("hidden_size") or 0
        rows = config.scheduler_config.max_num_batched_tokens * int(chosen) * 2
        buffers = rows * (max(2 * inner, width) + max(inner, width))
    likely = peak + 36 * _MIB + (0 if "mxfp4" in str(config.model_config.quantization) else buffers)
    why = "vLLM's profiling run on meta, operator by operator"
    return cards.Figure(likely, peak - peak // 8, peak + peak // 8 + 128 * _MIB + buffers, "estimated", why)


def graphs(config: Any) -> cards.Figure | None:
    """Estimate the graphs of a configuration as the command line made it; None: this version takes them off nothing."""
    if not versions.takes_off_graphs():
        return None
    is_eager = config.model_config.enforce_eager or config.compilation_config.cudagraph_mode.name == "NONE"
    text = vars(config.model_config.hf_text_config)
    return cards.graphs(
        layers=text.get("num_hidden_layers") or 32,
        has_experts=_has_experts(text),
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        largest_batch=0 if is_eager else max(config.compilation_config.cudagraph_capture_sizes or [512]),
    )


def parts_of_start(
    seen: dict[str, Any], config: Any, measured: dict[str, Any], *, is_npu: bool
) -> dict[str, cards.Figure]:
    """Return every part that this version takes off, by name; `measured` replaces them, in bytes."""
    parallel = config.parallel_config
    is_alone = parallel.world_size * (parallel.data_parallel_size or 1) == 1
    parts = {name: seen[name] for name in ("weights", "activation", "graphs") if seen[name] is not None}
    parts["non_torch"] = cards.outside_torch(is_alone=is_alone, is_npu=is_npu)
    if versions.counts_buffers():
        parts["buffers"] = cards.exact(seen["buffers"], "the runner's tensors beside the weights")
    return parts | cards.measured_parts(measured)


def _has_experts(text: dict[str, Any]) -> bool:
    return any(text.get(name) for name in _EXPERTS)


def kv_pool(config: Any, specs: list[Any], available: list[int]) -> dict[str, Any]:
    """Return the pool's figures; one that vLLM refuses has `refusal`, and what was compared.

    Args:
        config: Stays as it is.
        specs: Each rank's layers.
        available: Each rank's bytes.
    """
    config = copy.copy(config)
    for name in _SIZED:
        setattr(config, name, copy.copy(getattr(config, name)))
    utils, planning = versions.planning()
    log = utils.logger = planning.logger = _Log()
    pools: list[Any] = []
    backends = importlib.import_module("vllm.v1.attention.backends.utils")
    workers = SimpleNamespace(  # what the engine core calls of them, in any version
        get_kv_cache_specs=lambda: specs,
        determine_available_memory=lambda: available,
        get_supported_kv_cache_layouts=lambda: [versions.supported_layouts(config)] * len(specs),
        set_kv_cache_layout=lambda layout, *_: backends.record_kv_cache_layout(config.cache_config, layout),
        initialize_from_config=pools.extend,
        get_simple_cpu_offload_num_blocks=lambda: 0,
        compile_or_warm_up_model=lambda: None,
    )
    core = SimpleNamespace(model_executor=workers, collective_rpc=lambda *_, **__: None)
    refusal = None
    with versions.recorded_checks(planning) as checks:
        try:
            with importlib.import_module("vllm.config").set_current_vllm_config(config):
                importlib.import_module("vllm.v1.engine.core").EngineCore._initialize_kv_caches(core, config)
        except ValueError as error:
            refusal = str(error)
    figures: dict[str, Any] = {"fits": refusal is None, "refusal": refusal, "available_bytes": min(available)}
    if checks:
        figures["needed_bytes"] = max((needed - have, needed) for have, needed, _ in checks)[1]
        figures["max_model_len_that_fits"] = min(longest for _, _, longest in checks)
    if refusal is not None or not pools:
        return figures
    first, sizes = pools[0], [versions.bytes_per_block(config, one) for one in pools]
    groups = [(type(group.kv_cache_spec).__name__, group) for group in first.kv_cache_groups]
    tokens = [
        # The value that stands before the word.
        int(values[text.partition("%s tokens")[0].count("%s")].replace(",", ""))
        for text, values in log.lines
        if "KV cache size" in text
    ]
    return figures | {
        "blocks": first.num_blocks,
        "bytes_per_block": min(zip(available, sizes), key=lambda rank: rank[0] // max(rank[1], 1))[1],
        "block_size": min((group.kv_cache_spec.block_size for _, group in groups), default=None),
        "tokens": min(tokens, default=None),
        "max_concurrency": min((args[-1] for text, args in log.lines if "Maximum concurrency" in text), default=None),
        "max_model_len": config.model_config.max_model_len,
        "groups": [
            {
                "kind": kind,
                "layers": len(group.layer_names),
                "block_size": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
            }
            for kind, group in groups
        ],
    }


class _Log:
    """Replaces the logger of a vLLM module, and keeps each line with its values."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def log(text: object, *values: Any, **_options: Any) -> None:
            self.lines.append((str(text), values))
            if name.startswith(("warning", "error")):
                say(LOG, str(text) % values if values else str(text))

        return log


# --- images, and what is said of a failure ---


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

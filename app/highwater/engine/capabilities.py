"""Detection of what this engine can do, without side effects, and whether its workers may be called.

Never a POST (it would act), never an OPTIONS (vLLM's CORS middleware answers it for every path): the OpenAPI page
lists the paths where there is one, else a GET on a POST-only path gets 405 or 404. A worker call to an engine without
our extension puts its queues out of step, so no other module opens them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, TypeVar

from packaging.version import InvalidVersion, Version

from highwater.engine.client import Engine
from highwater.process.clocks import Clocks
from highwater.process.errors import EngineRefused
from highwater.process.untrusted import part

EXTENSION = "highwater_worker.MemoryExtension"
_PLUGIN = "the package vllm-highwater-worker beside it and HIGHWATER_RECORDER_DIR set"
_Value = TypeVar("_Value")
_NOT_PUBLIC = frozenset({"version", "model", "has_operations", "has_recorders"})  # of the capabilities in `GET /memory`
# vLLM's own resets, and the oldest version that has the route of each.
RESETS_SINCE: Final[Mapping[str, str]] = MappingProxyType(
    {"reset_prefix_cache": "0.11", "reset_mm_cache": "0.11.2", "reset_encoder_cache": "0.16"}
)
# Before, a request that does not pass the sidecar fails where it meets `reset_mm_cache`; every other remedy is safe.
EVERY_RESET_SAFE_SINCE: Final = "0.28"
# An engine without our extension is detected again after so long.
REDETECT_SECONDS = 30.0
# Every vLLM has these; behind a prefix or a key one of them at least is there, or answers other than with 404.
_OF_EVERY_VLLM: Final = ("/version", "/health", "/v1/models")
PROBED_PATHS = ("/collective_rpc", *(f"/{name}" for name in RESETS_SINCE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of one engine; fields named like a route say whether it exists."""

    version: str | None = None
    dev_mode: bool = False  # whether the development routes exist (`VLLM_SERVER_DEV_MODE=1`)
    # Whether the workers may be called: the route exists, and our class is loaded or every worker's recorder says that
    # it has our operations.
    collective_rpc: bool = False
    # Whether every worker's recorder says that it has our operations, also where no route reaches them.
    has_operations: bool = False
    # Whether recorders of this engine have been read, be they silent now.
    has_recorders: bool = False
    extension: str | None = None  # the `worker_extension_cls` that the engine was started with
    reset_prefix_cache: bool = False
    reset_mm_cache: bool = False
    reset_encoder_cache: bool = False
    is_paused: bool = False
    server_info: bool = False  # whether `GET /server_info` returns the configuration: not every version can write it
    model: str | None = None  # the first served model name
    tensor_parallel: int | None = None  # `None` where `/server_info` does not show it, as the other sizes
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    encoder_decoder: bool = False  # whether the model has an encoder that its decoder attends to throughout (Whisper)
    # The configured KV connector, with its role; empty without any, `None` where `/server_info` does not show it.
    kv_connector: str | None = None
    ec_connector: bool = False  # whether an encoder-cache connector is configured (it keeps references to the cache)
    # The prefix below which all routes are served as well (`--root-path`), empty without any, or `None` where there is
    # no OpenAPI page.
    root_path: str | None = None

    def at_least(self, version: str) -> bool:
        release = parse_version(self.version)
        return release is not None and release >= Version(version)

    @property
    def ranks_expected(self) -> int | None:
        sizes = (self.tensor_parallel, self.pipeline_parallel, self.data_parallel)
        if any(size is None for size in sizes):
            return None
        return math.prod(size or 1 for size in sizes)

    def public(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _NOT_PUBLIC}


def parse_version(text: str | None) -> Version | None:
    """Return the release part of a version: 0.32.0 for both ``0.32.0+cpu`` and ``0.32.0rc1``."""
    if text is None:
        return None
    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        return None


async def detect(engine: Engine, *, assume_extension: bool = False) -> Capabilities:
    """Raises EngineError: it did not respond, or is no vLLM. ``assume_extension``: a subclass is loaded, it is said."""
    answer = await engine.get_json("/version")
    version = answer.get("version") if isinstance(answer, dict) else None
    if version is None:
        await _refuse_what_is_no_vllm(engine)
    page = await engine.get_json("/openapi.json")
    if isinstance(page, dict) and isinstance(routes := page.get("paths"), dict):
        paths, root_path = set(routes), _root_path(page)
    else:  # switched off (--disable-fastapi-docs), or never there (Rust front-end)
        paths, root_path = {path for path in PROBED_PATHS if await engine.has_post(path)}, None
        paths |= {"/is_paused"} if await engine.exists("/is_paused") else set()
    # Only the JSON form contains worker_extension_cls. Versions that cannot dump it respond with 422 or 500.
    info = await engine.get_json("/server_info", config_format="json")
    config = part(info, "vllm_config") if isinstance(info, dict) else {}
    extension = _value(config, "parallel_config", "worker_extension_cls", str) or None
    rpc_route = "/collective_rpc" in paths
    # Hugging Face's configuration, which vLLM writes as an object or as that object's own text.
    hf_config = part(config, "model_config").get("hf_config")
    in_text = isinstance(hf_config, str) and '"is_encoder_decoder": true' in hf_config
    is_encoder_decoder = hf_config.get("is_encoder_decoder") is True if isinstance(hf_config, dict) else in_text
    served = part(config, "model_config").get("served_model_name")
    first = served[0] if isinstance(served, list) and served else served
    # Behind an external load balancer the data-parallel size is the world's, and this server has one engine.
    parallel = part(config, "parallel_config")
    local = "data_parallel_size_local" if parallel.get("data_parallel_hybrid_lb") else "data_parallel_size"
    transfer = config.get("kv_transfer_config")
    connector = f"{transfer.get('kv_connector')} ({transfer.get('kv_role')})" if isinstance(transfer, dict) else ""
    return Capabilities(
        version=version if isinstance(version, str) else None,
        dev_mode=rpc_route,
        collective_rpc=rpc_route and (extension == EXTENSION or assume_extension),
        extension=extension,
        **{path.removeprefix("/"): path in paths for path in (*PROBED_PATHS[1:], "/is_paused")},
        server_info=bool(config),
        model=first if first and isinstance(first, str) else _value(config, "model_config", "model", str),
        tensor_parallel=_size(config, "tensor_parallel_size"),
        pipeline_parallel=_size(config, "pipeline_parallel_size"),
        data_parallel=1 if parallel.get("data_parallel_external_lb") else _size(config, local),
        encoder_decoder=is_encoder_decoder,
        kv_connector=connector if config else None,
        ec_connector=bool(config.get("ec_transfer_config")),
        root_path=root_path,
    )


async def _refuse_what_is_no_vllm(engine: Engine) -> None:
    for path in _OF_EVERY_VLLM:
        if (await engine.get(path)).status != HTTPStatus.NOT_FOUND:
            return
    said = f"what answers at {engine.url} is no vLLM (404 for {', '.join(_OF_EVERY_VLLM)}); is engine_url right?"
    raise EngineRefused(said, HTTPStatus.NOT_FOUND)


def _root_path(page: Mapping[str, Any]) -> str | None:
    """Return the first of the page's servers that is a path (fastapi/applications.py, ``setup``).

    Empty where the page names no servers; None where it names only others, which vLLM does not.
    """
    servers = page.get("servers", [])
    urls = [server.get("url") for server in servers if isinstance(server, dict)] if isinstance(servers, list) else [""]
    paths = (url.rstrip("/") for url in urls if isinstance(url, str) and url.startswith("/"))
    return next(paths, None if urls else "")


def _value(config: Mapping[str, Any], section: str, key: str, kind: type[_Value]) -> _Value | None:
    value = part(config, section).get(key)
    return value if isinstance(value, kind) else None


def _size(config: Mapping[str, Any], key: str) -> int | None:
    size = _value(config, "parallel_config", key, int)
    return size if size is not None and size > 0 else None


def no_extension(capabilities: Capabilities) -> str | None:
    if capabilities.collective_rpc:
        return None
    if not capabilities.dev_mode:
        beside = f", and either with --worker-extension-cls {EXTENSION} or with {_PLUGIN}"
        return (
            "workers can be called in vLLM's development mode only: start it with VLLM_SERVER_DEV_MODE=1 in its "
            f"environment{'' if capabilities.has_operations else beside}"
        )
    return f"the worker extension is not loaded; start vLLM with --worker-extension-cls {EXTENSION}, or with {_PLUGIN}"


def setup_hint(capabilities: Capabilities) -> str | None:
    """Return what to add to the engine's environment and command line, so that the workers' memory can be read.

    ``None`` where it can, and where it could: recorders that are silent are there.
    """
    if capabilities.collective_rpc or capabilities.has_recorders:
        return None
    flag = f"--worker-extension-cls {EXTENSION} (with the folder that holds highwater_worker on its PYTHONPATH)"
    if not capabilities.dev_mode:
        return (
            f"start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment and {flag}; to only watch it, run `highwater "
            "extension --copy-to DIR`, start vLLM with DIR on its PYTHONPATH and HIGHWATER_RECORDER_DIR=FOLDER in its "
            "environment, and the sidecar with recorder_dir=FOLDER"
        )
    if capabilities.extension is None and capabilities.server_info:
        return f"start vLLM with {flag}"
    if capabilities.extension is None:
        return (
            f"vLLM does not report its worker extension class (GET /server_info); if it was started with {flag}, "
            "set engine_has_extension=true"
        )
    return (
        f"vLLM was started with --worker-extension-cls {capabilities.extension}; if that class inherits from "
        f"{EXTENSION}, set engine_has_extension=true"
    )


class Detection:
    """The capabilities of one engine, and of the one that takes its place.

    ``assume_extension``: the operator says that our extension is loaded under another name.

    Attributes:
        public_capabilities: The same as ``GET /memory`` shows it.
    """

    def __init__(self, engine: Engine, *, assume_extension: bool, clocks: Clocks) -> None:
        self.capabilities = Capabilities()
        self.public_capabilities: dict[str, Any] = {}
        self._engine = engine
        self._assume_extension = assume_extension
        self._monotonic = clocks.monotonic
        self._detected = Capabilities()
        self._detected_at: float | None = None
        self._has_recorders = False

    @property
    def is_current(self) -> bool:
        return self._detected_at is not None

    @property
    def has_extension(self) -> bool:
        """True if the engine itself shows that our extension is loaded, whatever recorders write."""
        return self._detected.collective_rpc

    def is_due(self, *, is_recorded: bool) -> bool:
        """Return whether the engine is to be detected; ``is_recorded``: its recorders show every rank."""
        if self._detected_at is None:
            return True
        is_settled = self.capabilities.collective_rpc or is_recorded
        return not is_settled and self._monotonic() - self._detected_at >= REDETECT_SECONDS

    async def detect(self) -> None:
        self._detected = await detect(self._engine, assume_extension=self._assume_extension)
        self._detected_at = self._monotonic()
        self._use(self._detected)

    def detect_again(self) -> None:
        """Detect the engine again before its workers are called: it may be another version with other options."""
        self._detected_at = None
        self._engine.forbid_rpc()

    def forget_engine(self) -> None:
        self._engine.forget()
        self._has_recorders = False
        self.detect_again()

    def trust_recorders(self, *, offers_calls: bool, are_read: bool) -> None:
        """Note whether recorders of this engine ``are_read``, which holds for its life, and what they offer.

        Allow worker calls while every worker's recorder writes that it has our operations (``offers_calls``).

        Files may be another engine's: a call that fails ends what they allow, for this life of the engine.
        """
        self._has_recorders = self._has_recorders or are_read
        if self._detected_at is None or self._detected.collective_rpc:
            return
        may_call = self._detected.dev_mode and not self._engine.has_rpc_failed and offers_calls
        known = replace(
            self._detected, collective_rpc=may_call, has_operations=offers_calls, has_recorders=self._has_recorders
        )
        if known != self.capabilities:
            self._use(known)

    def _use(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.public_capabilities = capabilities.public()
        if capabilities.collective_rpc:
            self._engine.allow_rpc()
        else:
            self._engine.forbid_rpc()

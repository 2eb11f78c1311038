"""A model engine: a life between start and end, traffic through it, and vLLM's control face over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from tests.situations.clients import TEXT_SECONDS
from tests.situations.device import Card, DeviceFullError, ModelTorch, Plan
from tests.situations.wire import Answer, Asked, Face, json_answer
from tests.situations.worker import EngineOptions, ModelWorker

if TYPE_CHECKING:
    from tests.situations.judge import Judge

EXTENSION = "highwater_worker.MemoryExtension"
TICK_SECONDS = 0.25
MODEL = "modelled"
SIDE_PIXELS = 28
"""One embedding stands for a square of so many pixels."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The load of the clients."""

    images: float = 0.0  # new images a second
    texts: bool = True  # whether requests without images run as well
    stray: int = 0  # bytes that each image leaves in free segments that no step fits into
    split: int = 0  # bytes that each image leaves in segments of which something is in use
    leak: int = 0  # bytes that each image leaves allocated for nothing
    ranks: tuple[int, ...] | None = None  # which ranks are left with that; None: all


@dataclass
class Quirks:
    """Oddities of the engine; a situation turns them on and off."""

    tamper: Callable[[str, dict[str, Any]], None] | None = None  # changes an operation's answers on their way
    release_seconds: float = 0.4  # how long `release` holds the workers
    mute: bool = False  # `--disable-log-stats`


@dataclass
class EngineModel:
    """The engine."""

    plan: Plan  # what each rank takes
    cards: tuple[Card, ...]  # where the ranks are
    options: EngineOptions  # what it is started with
    version: str  # vLLM's
    clock: Callable[[], float]  # seconds that only grow
    load_seconds: float = 20.0  # from the start of the process until it answers
    restarts: bool = True  # whether somebody starts it again after it died
    tick_seconds: float = TICK_SECONDS  # between two steps
    port: int | None = None  # where it is served; None: only in this process
    traffic: Traffic | None = None
    quirks: Quirks = field(default_factory=Quirks)

    def __post_init__(self) -> None:
        self.torch = ModelTorch(self.options.kind)
        self.face = Face(self._handle, self.port)
        self.workers: list[ModelWorker] = []
        self.watcher: Judge | None = None  # hears the engine's truth
        self.is_ready = False
        self.ready_at = 0.0
        self.lives = 0
        self.stuck_until = 0.0
        self.steps = 0
        self.counts: dict[str, int] = {}
        self._sleep_told = False
        self._images_owed = 0.0
        self._queue: list[tuple[int, asyncio.Future[None]]] = []  # images that came through the sidecar
        # No process of this machine has such a number.
        self._pids = itertools.count(5_000_001)
        self._names = itertools.count()
        self._turn = asyncio.Lock()
        self._start: asyncio.Task[None] | None = None

    # --- life ---

    def begin(self) -> None:
        """Start in the background: connections are refused until the model is loaded."""
        self._start = asyncio.create_task(self._load())

    async def _load(self) -> None:
        await asyncio.sleep(self.load_seconds)
        self.lives += 1
        self.workers = [
            ModelWorker(rank, next(self._pids), card, self.plan, self.options) for rank, card in enumerate(self.cards)
        ]
        self.torch.device_module.ranks = {worker.memory.index: worker.memory for worker in self.workers}
        await self.face.appear()
        self.is_ready, self.ready_at, self._sleep_told = True, self.clock(), False
        if self.watcher is not None:
            self.watcher.began()

    def end(self, *, restart: bool = True) -> None:
        self.is_ready = False
        self._queue.clear()
        self.face.vanish()
        for worker in self.workers:
            worker.memory.end()
        self.workers = []
        if restart and (self._start is None or self._start.done()):
            self._start = asyncio.create_task(self._load())

    async def close(self) -> None:
        if self._start is not None:
            self._start.cancel()
        self.end(restart=False)

    def sleep(self) -> None:
        """`POST /sleep?level=1`."""
        for worker in self.workers:
            worker.worker.sleep(1)
        self._sleep_told = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """`POST /wake_up`; after any, vLLM's metrics say that it is awake (vllm 0.32.0 v1/engine/async_llm.py)."""
        for worker in self.workers:
            worker.worker.wake_up(tags)
        self._sleep_told = False

    @property
    def is_asleep(self) -> bool:
        return any(worker.memory.asleep for worker in self.workers)

    @property
    def is_working(self) -> bool:
        return self.is_ready and self.traffic is not None and not self.is_asleep

    @property
    def is_held(self) -> bool:
        return self._turn.locked()

    # --- steps ---

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await asyncio.sleep(self.tick_seconds)
            if self.watcher is not None:
                self.watcher.looked(self.tick_seconds)
            if not self.is_ready or self._turn.locked() or self.clock() < self.stuck_until:
                continue
            try:
                self._step()
            except DeviceFullError as error:
                if self.watcher is not None:
                    self.watcher.died(error)
                self.end(restart=self.restarts)

    def _step(self) -> None:
        traffic = self.traffic if self.is_working else None
        self._encode_queued()
        if traffic is None:
            self._images_owed = 0.0
            for worker in self.workers:
                worker.finish()
            return
        self.steps += 1
        self._images_owed += traffic.images * self.tick_seconds
        while self._images_owed >= 1:
            self._images_owed -= 1
            name = f"{next(self._names):064x}"
            for worker in self.workers:
                worker.encode(name, self.torch)
                self._leave_behind(worker, traffic)
        if traffic.texts:
            for worker in self.workers:
                worker.decode()

    def _encode_queued(self) -> None:
        """Encode as many as a step may compute: what vLLM's scheduler takes, however much memory there is."""
        step: dict[str, int] = {}
        while self._queue and sum(step.values()) + self._queue[0][0] <= self.plan.encoder_budget_embeds:
            embeds, encoded = self._queue.pop(0)
            if not encoded.cancelled():
                step[f"{next(self._names):064x}"] = embeds
                encoded.set_result(None)
        for worker in self.workers if step else ():
            worker.encode_together(step, self.torch)

    def _leave_behind(self, worker: ModelWorker, traffic: Traffic) -> None:
        memory = worker.memory
        if traffic.ranks is not None and memory.index not in traffic.ranks:
            return
        for name, nbytes in (("stray", traffic.stray), ("split", traffic.split), ("leaked", traffic.leak)):
            if nbytes:
                memory.take(nbytes, "an image's outputs on their way")
                memory.live -= nbytes
                setattr(memory, name, getattr(memory, name) + nbytes)

    # --- the wire ---

    def _handle(self, asked: Asked) -> Answer | Awaitable[Answer]:
        route = self._routes().get(asked.path)
        if route is None:
            return json_answer({"detail": "Not Found"}, 404)
        method, handler = route
        if method != asked.method:
            return json_answer({"detail": "Method Not Allowed"}, 405)
        return handler(asked)

    def _routes(self) -> dict[str, tuple[str, Callable[[Asked], Answer | Awaitable[Answer]]]]:
        has_encoder_reset = Version(self.version) >= Version("0.16")
        routes: dict[str, tuple[str, Callable[[Asked], Answer | Awaitable[Answer]]]] = {
            "/health": ("GET", lambda _: Answer()),
            "/version": ("GET", lambda _: json_answer({"version": self.version})),
            "/metrics": ("GET", self._metrics),
            "/server_info": ("GET", self._server_info),
            "/openapi.json": ("GET", self._openapi),
            "/v1/models": ("GET", lambda _: json_answer({"data": [{"id": MODEL}]})),
            "/v1/chat/completions": ("POST", self._chat),
            "/is_sleeping": ("GET", lambda _: json_answer({"is_sleeping": self.is_asleep})),
            "/is_paused": ("GET", lambda _: json_answer({"is_paused": False})),
            "/collective_rpc": ("POST", self._collective_rpc),
            "/reset_mm_cache": ("POST", self._reset_mm_cache),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
        }
        if has_encoder_reset:
            routes["/reset_encoder_cache"] = ("POST", self._reset_encoder_cache)
        return routes

    def _openapi(self, _: Asked) -> Answer:
        paths = {path: {method.lower(): {}} for path, (method, _) in self._routes().items() if path != "/metrics"}
        return json_answer({"openapi": "3.1.0", "paths": paths})

    def _server_info(self, _: Asked) -> Answer:
        options = self.options
        config = {
            "model_config": {"model": MODEL, "served_model_name": MODEL},
            "parallel_config": {
                "worker_extension_cls": EXTENSION,
                "tensor_parallel_size": options.ranks,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
                "distributed_executor_backend": "mp",
                "_api_process_count": 1,
            },
            "cache_config": {
                "gpu_memory_utilization": options.utilization,
                "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
            },
            "ec_transfer_config": {"ec_connector": "ECExampleConnector"} if options.ec_connector else None,
        }
        return json_answer({"vllm_config": config})

    def _metrics(self, _: Asked) -> Answer:
        if self.quirks.mute:
            return Answer(b"", content_type="text/plain")
        labels = f'engine="0",model_name="{MODEL}"'
        running = 4.0 if self.is_working else 0.0
        awake = not self._sleep_told
        text = (
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{labels}}} {running}\n"
            f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{{labels}}} 0.0\n"
            f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{{labels}}} {running / 20}\n"
            f"# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{{{labels}}} {float(self.steps * 100)}\n"
            "# TYPE vllm:engine_sleep_state gauge\n"
            f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} {float(awake)}\n'
            f'vllm:engine_sleep_state{{{labels},sleep_state="weights_offloaded"}} {float(not awake)}\n'
            f'vllm:engine_sleep_state{{{labels},sleep_state="discard_all"}} 0.0\n'
        )
        return Answer(text.encode(), content_type="text/plain; version=0.0.4")

    async def _chat(self, asked: Asked) -> Answer:
        side = json.loads(asked.body).get("side")
        if side is not None:
            embeds = min((side // SIDE_PIXELS) ** 2, self.plan.encoder_budget_embeds)
            encoded = asyncio.get_running_loop().create_future()
            self._queue.append((embeds, encoded))
            await encoded
        await asyncio.sleep(TEXT_SECONDS)
        return json_answer({"choices": [{"message": {"role": "assistant", "content": "yes"}}]})

    # --- what moves bytes ---

    @asynccontextmanager
    async def _workers_held(self, seconds: float) -> Any:
        """No step runs meanwhile, and no other call."""
        async with self._turn:
            await asyncio.sleep(max(0.0, self.stuck_until - self.clock()) + seconds)
            yield

    def _collective_rpc(self, asked: Asked) -> Answer | Awaitable[Answer]:
        op, payload = json.loads(asked.body)["args"]
        self.counts[op] = self.counts.get(op, 0) + 1
        if op in {"release", "trim"} or self._turn.locked() or self.clock() < self.stuck_until:
            return self._moving(op, payload)
        return self._answers(op, payload)

    async def _moving(self, op: str, payload: str) -> Answer:
        began_at = self.clock()
        seconds = {"release": self.quirks.release_seconds, "trim": 0.1}.get(op, 0.0)
        async with self._workers_held(seconds):
            before = self._component(op)
            answer = self._answers(op, payload)
            self._tell(op, began_at, before)
        return answer

    def _answers(self, op: str, payload: str) -> Answer:
        answers = [worker.ask(op, payload, self.torch) for worker in self.workers if not worker.is_silent]
        if self.quirks.tamper is not None:
            for answer in answers:
                self.quirks.tamper(op, answer)
        return json_answer({"results": [json.dumps(answer) for answer in answers]})

    def _component(self, op: str) -> list[int]:
        """Return each rank's bytes of what an operation gives back, counted so that less is more given."""
        if op == "release":
            return [worker.memory.driver_bytes for worker in self.workers]
        return [worker.encoder_bytes() for worker in self.workers]

    def _tell(self, op: str, began_at: float, before: list[int]) -> None:
        if self.watcher is not None and op in {"release", "trim", "reset_encoder_cache", "reset_mm_cache"}:
            gave = (was - now for was, now in zip(before, self._component(op), strict=True))
            self.watcher.remedy(op, began_at, tuple(gave))

    async def _reset_encoder_cache(self, _: Asked) -> Answer:
        began_at = self.clock()
        async with self._workers_held(0.05):
            before = self._component("reset_encoder_cache")
            for worker in self.workers:
                worker.finish()
                worker.encoder_cache.clear()
            self._tell("reset_encoder_cache", began_at, before)
        return Answer()

    async def _reset_mm_cache(self, _: Asked) -> Answer:
        self._tell("reset_mm_cache", self.clock(), self._component("reset_mm_cache"))
        return Answer()

    async def _reset_prefix_cache(self, _: Asked) -> Answer:
        return json_answer({"success": not self.is_working})

"""What people use, before a real engine: through the sidecar each gets what it gets directly.

One request at a time, and each asked once before it is compared: what an engine answers depends, in the last bits of
its numbers, on what it computes beside it and on what it has cached.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from highwater.terminal.demo.engine import DemoEngine
from highwater.terminal.demo.sidecar import DemoSidecar
from highwater.terminal.demo.traffic import image_url
from tests.patience import LIMIT_SECONDS

from .conftest import sidecar_beside, wait_for
from .test_sidecar import get, post

KEY = "sk-engine"
PATIENCE_SECONDS = 300.0
CLIENT = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_SECONDS}
# What vLLM makes anew for each answer: times, a signature of what was thought, and ids, of which the sidecar's request
# id becomes a part.
MADE_ANEW = {"created", "created_at", "completed_at", "signature"}
MADE_ID = re.compile(r"[a-z-]+[-_][0-9a-f]{16,}")
MESSAGES = [{"role": "user", "content": "Grüße, 世界! Tell me of memory."}]
# Drawn, but with a seed: greedy, the model without training repeats itself.
CHAT = {"messages": MESSAGES, "max_tokens": 24, "seed": 7}
# The grammar makes a model that knows nothing say what the parsers look for.
REASONING = {"structured_outputs": {"regex": "[a-z]{12}</think>[a-z]{8}"}}
TOOL_CALL = {"structured_outputs": {"regex": r'[a-z]{5}</think>\[weather\(city="[A-Z][a-z]{4}"\)\]'}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@dataclass(frozen=True)
class Ways:
    engine: DemoEngine
    sidecar: DemoSidecar

    @property
    def model(self) -> str:
        return self.engine.served_model

    def same(self, ask: Callable[[str], Any]) -> Any:
        """What ``ask`` gets from either; it is told a base URL."""
        ask(self.engine.url)
        direct, through = plain(ask(self.engine.url)), plain(ask(self.sidecar.url))
        assert through == direct
        return direct


@pytest.fixture
def ways(engine: DemoEngine, sidecar: DemoSidecar) -> Ways:
    return Ways(engine, sidecar)


@pytest.fixture(scope="module")
def locked(engine_factory: Callable[..., DemoEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    """An engine that asks for a key, tells reasoning and tool calls from the text, and lacks what Highwater needs."""
    arguments = ("--api-key", KEY, "--reasoning-parser", "qwen3", "--enable-auto-tool-choice")
    arguments += ("--tool-call-parser", "pythonic", "--structured-outputs-config.enable_in_reasoning", "true")
    engine = engine_factory(multimodal=False, dev_mode=False, extension=False, extra_args=arguments)
    with sidecar_beside(engine, tmp_path_factory.mktemp("locked")) as sidecar:
        yield Ways(engine, sidecar)
    engine.stop()


def plain(value: Any) -> Any:
    """Without what differs between any two answers."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if name not in MADE_ANEW}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return "an id" if isinstance(value, str) and MADE_ID.fullmatch(value) else value


def joined(chunks: Iterable[Any]) -> dict[str, Any]:
    """A stream's content; how it was cut into chunks is a matter of the engine's and the reader's pace."""
    text: dict[str, Any] = {"content": "", "reasoning": "", "calls": "", "finish": [], "usage": None, "kinds": set()}
    for chunk in chunks:
        text["kinds"].add((chunk.object, chunk.model))
        text["usage"] = chunk.usage or text["usage"]
        for choice in chunk.choices:
            text["content"] += choice.delta.content or ""
            text["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            text["finish"] += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                text["calls"] += (call.function.name or "") + (call.function.arguments or "")
    return text


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=LIMIT_SECONDS)


# --- openai ---


def pictures() -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": image_url(seed, width=256, height=256)}} for seed in (501, 502)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What differs?"}]}]


EXTRA = {"extra_body": {"top_k": 5, "min_tokens": 24, "return_token_ids": True, "prompt_logprobs": 1}}


@pytest.mark.parametrize(
    "request_",
    [
        CHAT,
        CHAT | {"messages": pictures()},
        CHAT | EXTRA,
        CHAT | {"logprobs": True, "top_logprobs": 3},
        CHAT | {"n": 2},  # without: the two are in one batch or not, as it happens, and the last bits hang on it
    ],
    ids=["text", "images", "extra_body", "logprobs", "two"],
)
def test_a_chat_completion(ways: Ways, request_: dict[str, Any]) -> None:
    def ask(url: str) -> Any:
        with client(url) as ours:
            return ours.chat.completions.create(model=ways.model, **request_)

    answer = ways.same(ask)
    assert answer["usage"]["completion_tokens"] >= 1
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("messages", [MESSAGES, pictures()], ids=["text", "images"])
def test_a_chat_stream(ways: Ways, messages: list[dict[str, Any]]) -> None:
    def ask(url: str) -> Any:
        with client(url) as ours:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            return joined(ours.chat.completions.create(model=ways.model, **(CHAT | options | {"messages": messages})))

    answer = ways.same(ask)
    assert answer["content"]
    assert len(answer["finish"]) == 1
    assert answer["usage"]


def test_the_other_faces(ways: Ways) -> None:
    def ask(url: str) -> Any:
        with client(url) as ours:
            completion = ours.completions.create(model=ways.model, prompt="memory", max_tokens=8, seed=7, logprobs=1)
            response = ours.responses.create(model=ways.model, input="memory", max_output_tokens=8, temperature=0)
            return completion, response, ours.models.list().data

    _, _, models = ways.same(ask)
    assert [model["id"] for model in models] == [ways.model]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"messages": "no list"}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "x" * 10_000}]}, openai.BadRequestError),
        ({"tools": TOOLS}, openai.BadRequestError),
    ],
    ids=["model", "value", "type", "length", "tools"],
)
def test_an_error(ways: Ways, change: dict[str, Any], kind: type[openai.APIStatusError]) -> None:
    def ask(url: str) -> Any:
        with client(url) as ours, pytest.raises(kind) as caught:
            ours.chat.completions.create(**({"model": ways.model} | CHAT | change))
        return caught.value.status_code, caught.value.body, caught.value.message

    ways.same(ask)


# --- openai, with what the engine must be told ---


def test_reasoning(locked: Ways) -> None:
    def ask(url: str) -> Any:
        with client(url, KEY) as ours:
            request = {
                "model": locked.model,
                "messages": MESSAGES,
                "max_tokens": 120,
                "extra_body": REASONING,
                "seed": 7,
            }
            whole = ours.chat.completions.create(**request)
            return whole, joined(ours.chat.completions.create(**request, stream=True))

    whole, streamed = locked.same(ask)
    message = whole["choices"][0]["message"]
    assert re.fullmatch("[a-z]{12}", message["reasoning"])
    assert re.fullmatch("[a-z]{8}", message["content"])
    assert (streamed["reasoning"], streamed["content"]) == (message["reasoning"], message["content"])


def test_tools(locked: Ways) -> None:
    def ask(url: str) -> Any:
        with client(url, KEY) as ours:
            request = {"model": locked.model, "messages": MESSAGES, "max_tokens": 120, "tools": TOOLS, "seed": 7}
            request["extra_body"] = TOOL_CALL
            whole = ours.chat.completions.create(**request)
            return whole, joined(ours.chat.completions.create(**request, stream=True))

    whole, streamed = locked.same(ask)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert re.fullmatch("[A-Z][a-z]{4}", json.loads(call["function"]["arguments"])["city"])
    assert streamed["calls"] == "weather" + call["function"]["arguments"]
    assert streamed["finish"] == [whole["choices"][0]["finish_reason"]] == ["tool_calls"]


def test_an_engine_without_dev_mode_is_served_and_told_what_to_add(locked: Ways) -> None:
    """What cannot be done is refused with the reason; that the engine is served is what this file is about."""
    report = wait_for(locked.sidecar, lambda report: report["engine"]["requests_running"] == 0)
    assert "VLLM_SERVER_DEV_MODE=1" in report["engine"]["hint"]
    refused = post(locked.sidecar, "/memory/reclaim", json={"remedies": ["release"]})
    assert refused.status_code == 409
    assert "VLLM_SERVER_DEV_MODE=1" in refused.json()["results"][0]["reason"]
    assert get(locked.sidecar, "/readyz").status_code == 200


def test_the_engines_key(locked: Ways) -> None:
    def ask(url: str) -> Any:
        with client(url, KEY) as ours, client(url, "wrong") as strangers:
            models = ours.models.list().data
            with pytest.raises(openai.AuthenticationError) as caught:
                strangers.models.list()
        with claude(url, KEY) as ours, claude(url, "wrong") as strangers:
            message = ours.messages.create(model=locked.model, **MESSAGE)
            with pytest.raises(anthropic.AuthenticationError):
                strangers.messages.create(model=locked.model, **MESSAGE)
        return models, caught.value.body, message

    locked.same(ask)
    assert locked.sidecar.call("GET", "/memory")["engine"]["state"] == "ready"


# --- anthropic ---

MESSAGE = {"messages": MESSAGES, "max_tokens": 16, "extra_body": {"temperature": 0}}


def claude(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def test_a_message(ways: Ways) -> None:
    def ask(url: str) -> Any:
        with claude(url) as ours:
            counted = ours.messages.count_tokens(model=ways.model, messages=MESSAGES)
            return counted, ours.messages.create(model=ways.model, **MESSAGE)

    counted, message = ways.same(ask)
    assert message["usage"]["input_tokens"] == counted["input_tokens"]
    assert message["content"][0]["text"]


def test_a_message_stream(ways: Ways) -> None:
    def ask(url: str) -> Any:
        with claude(url) as ours, ours.messages.stream(model=ways.model, **MESSAGE) as stream:
            kinds = [event.type for event in stream]
            once = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
            return [kind for kind in once if kind not in {"content_block_delta", "text"}], stream.get_final_message()

    kinds, message = ways.same(ask)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert message["content"][0]["text"]


def test_an_error_in_a_message(ways: Ways) -> None:
    def ask(url: str) -> Any:
        with claude(url) as ours, pytest.raises(anthropic.NotFoundError) as caught:
            ours.messages.create(**({"model": "nobody"} | MESSAGE))
        return caught.value.body

    assert ways.same(ask)["type"] == "error"


# --- clients that leave ---


async def test_one_that_leaves_takes_no_other_along(ways: Ways) -> None:
    request = {"model": ways.model, "messages": MESSAGES, "max_tokens": 200, "stream": True}
    more = {"extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}

    async def read(ours: openai.AsyncOpenAI, *, leaves: bool) -> Any:
        stream = await ours.chat.completions.create(**request, **more)
        if leaves:
            await anext(aiter(stream))
            await stream.close()
            return None
        return joined([chunk async for chunk in stream])["usage"].completion_tokens

    async with openai.AsyncOpenAI(base_url=f"{ways.sidecar.url}/v1", **CLIENT) as ours:
        tokens = await asyncio.gather(*(read(ours, leaves=number % 2 == 0) for number in range(4)))
    assert tokens == [None, 200, None, 200]

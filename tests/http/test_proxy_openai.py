"""The real client, through the proxy: what an application sees."""

import json

import openai
import pytest

from tests.patience import LIMIT_SECONDS, patiently

COMPLETION = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m"}
MESSAGES = [{"role": "user", "content": "hi"}]


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    body = {**COMPLETION, "object": "chat.completion.chunk", "choices": [choice]}
    return f"data: {json.dumps(body)}\n\n".encode()


@pytest.fixture
async def client(front, upstream):
    @upstream.on("/v1/chat/completions")
    async def chat(call):
        if not json.loads(await call.read()).get("stream"):
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
            body = json.dumps({**COMPLETION, "choices": [choice]}).encode()
            return await call.answer(body, 200, ("content-type", "application/json"))
        await call.begin(("content-type", "text/event-stream"))
        for text in ("hel", "lo"):
            await call.chunk(chunk(text))
        if call.header("x-never-end"):
            return await call.wait_until_gone()
        await call.chunk(b"data: [DONE]\n\n")
        return await call.end()

    async with openai.AsyncOpenAI(
        base_url=f"{front.url}/v1", api_key="theirs", max_retries=0, timeout=LIMIT_SECONDS
    ) as client:
        yield client


async def test_a_stream_given_up(client, upstream):
    stream = await client.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, extra_headers={"x-never-end": "1"}
    )
    await anext(aiter(stream))
    await stream.close()
    await patiently(upstream.calls[0].gone.wait())


async def test_an_engine_that_is_down_reads_as_such(start_proxy, unused_tcp_port):
    async with (
        start_proxy(f"http://127.0.0.1:{unused_tcp_port}") as front,
        openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="k", max_retries=0, timeout=LIMIT_SECONDS) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="does not accept connections") as error:
            await client.models.list()
    assert error.value.status_code == 502

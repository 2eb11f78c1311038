"""``GET /memory/budget`` and ``highwater explain``: from worker answers or recorder files, and never a call for it."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner, Result

from highwater.explain.explanation import explain as explained
from highwater.http import services
from highwater.terminal import explain
from highwater.terminal.cli import main
from tests.fakes.engine import FakeEngine
from tests.fakes.started import story, wire
from tests.http.test_control_plane import both_on_ports, sidecar_before
from tests.unit.explain.test_beside import ANSWER

BUDGET = wire(story(), version="0.12.0")


def told(version: str = "0.12.0", **changes) -> FakeEngine:
    """An engine whose workers report the story's start."""
    fake = FakeEngine()
    fake.budget = wire(story(), version=version, **changes)
    return fake


async def test_the_budget_is_asked_of_workers_once_in_an_engines_life():
    """Reading it calls nobody; another process is asked anew."""
    async with sidecar_before(told()) as running:
        await running.poll()
        for _ in range(3):
            answer = (await running.client.get("/memory/budget")).json()
        assert [rank["counting"] for rank in answer["explanation"]["ranks"]] == ["parts", "parts"]
        assert running.fake.ops().count("budget") == 1
        running.fake.start_again()
        await running.poll()
        assert running.fake.ops().count("budget") == 2


async def test_a_round_is_explained_once_however_often_it_is_asked_for(monkeypatch):
    made: list[object] = []
    monkeypatch.setattr(services, "explain", lambda *args, **options: made.append(args) or explained(*args, **options))
    async with sidecar_before(told()) as running:
        await running.poll()
        for path in ("/memory/budget", "/memory/budget", "/memory/findings"):
            await running.client.get(path)
        assert len(made) == 1
        await running.poll()
        await running.client.get("/memory/budget")
    assert len(made) == 2


async def test_the_pool_of_two_ranks_is_one():
    async with sidecar_before(told()) as running:
        await running.poll()
        (pool,) = (await running.client.get("/memory/budget")).json()["explanation"]["pools"]
    assert (pool["blocks"], pool["tokens"], pool["differences"]) == (5_040, 645_120, [])
    assert [one["requests"] for one in pool["conversations"]] == [629, 78, 9]


async def test_an_older_worker_package_costs_only_the_explanation():
    async with sidecar_before(FakeEngine()) as running:
        await running.poll()
        state = (await running.client.get("/memory")).json()["engine"]["state"]
        answer = (await running.client.get("/memory/budget")).json()
    assert state == "ready"
    assert answer["explanation"]["ranks"] == []
    assert all("nothing reports its start; set" in problem for problem in answer["explanation"]["problems"])


async def test_an_engine_whose_workers_cannot_be_read_is_named_with_what_to_switch_on():
    async with sidecar_before(FakeEngine(dev_mode=False)) as running:
        await running.poll()
        hint = (await running.client.get("/memory")).json()["engine"]["hint"]
        text = (await running.client.get("/memory/budget?format=text")).text
    assert text.startswith("vLLM 0.32.0: ready")
    assert "VLLM_SERVER_DEV_MODE=1" in hint
    assert f"no rank is reported: {hint}" in text


async def test_figures_that_make_no_sense_are_left_out():
    fake = told()
    fake.budget["memory"]["total_bytes"] = -5
    async with sidecar_before(fake) as running:
        await running.poll()
        answer = await running.client.get("/memory/budget")
    assert (answer.status_code, answer.json()["explanation"]["ranks"]) == (200, [])


async def test_it_comes_as_text_for_terminals():
    async with sidecar_before(told()) as running:
        await running.poll()
        text = (await running.client.get("/memory/budget", headers={"accept": "text/plain"})).text
        same = (await running.client.get("/memory/budget?format=text")).text
    assert text == same
    assert "budget 57.91 GiB|\n" in text
    assert "WWWWWWWWWWWAAAAANN" in text
    assert "which this version prints as 645,120 tokens" in text.splitlines()[-1]


async def test_an_unknown_key_of_the_query_is_refused():
    async with sidecar_before(FakeEngine()) as running:
        answer = await running.client.get("/memory/budget?colour=red")
    assert (answer.status_code, "colour" in answer.text) == (422, True)


def ran(*arguments: str, url: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments], env={"HIGHWATER_URL": url, "COLUMNS": "100"})


@pytest.fixture
async def url():
    fake = told()
    async with both_on_ports() as running:
        running.fake.budget = fake.budget
        running.fake.start_again()
        for _ in range(2):
            await running.poll()
        yield f"http://127.0.0.1:{running.port}"


async def test_the_command_prints_what_the_route_returns(url):
    shown = await asyncio.to_thread(ran, url=url)
    assert (shown.exit_code, "requested = total x 0.95" in shown.output) == (0, True)
    parsed = json.loads((await asyncio.to_thread(ran, "--json", url=url)).output)
    assert [rank["rank"] for rank in parsed["explanation"]["ranks"]] == [0, 1]
    paragraph = parsed["explanation"]["paragraph"]
    assert len(paragraph) > 500
    assert paragraph in shown.output


async def test_two_starts_are_compared(url, tmp_path):
    before = json.loads((await asyncio.to_thread(ran, "--json", url=url)).output)
    same = tmp_path / "same.json"
    same.write_text(json.dumps(before))
    assert "nothing moved" in (await asyncio.to_thread(ran, "--against", str(same), url=url)).output
    before["explanation"]["vllm_version"] = "0.11.0"
    before["explanation"]["ranks"][0]["requested_bytes"] -= 1024**3
    other = tmp_path / "other.json"
    other.write_text(json.dumps(before))
    moved = json.loads((await asyncio.to_thread(ran, "--against", str(other), "--json", url=url)).output)["moved"]
    assert [(row["what"], row["by"]) for row in moved] == [("vLLM", ""), ("rank 0: requested", "+1.00 GiB")]


async def test_what_moved_fits_a_terminal(url, tmp_path):
    before = json.loads((await asyncio.to_thread(ran, "--json", url=url)).output)
    before["explanation"]["limits"]["max_num_seqs"] += 1
    before["explanation"]["pools"][0] |= {"tokens": 7, "tokens_meaning": f"blocks times tokens: 7 x 1{'0' * 60}"}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(before))
    text = (await asyncio.to_thread(ran, "--against", str(other), url=url)).output
    table, sentences = text.split("\n\n")
    assert "max_num_seqs" in table
    assert max(map(len, table.splitlines())) < 100
    assert sentences.startswith("what tokens means\n    before: blocks times tokens: 7 x 10")


async def test_a_file_that_is_no_explanation_is_refused_by_name(url, tmp_path):
    odd = tmp_path / "odd.json"
    odd.write_text("{}")
    result = await asyncio.to_thread(ran, "--against", str(odd), url=url)
    assert result.exit_code == 1
    assert "odd.json: no explanation that this version understands" in result.output
    odd.write_text("no JSON")
    assert "holds no JSON" in (await asyncio.to_thread(ran, "--against", str(odd), url=url)).output


async def test_this_engine_is_compared_with_a_command_line_that_vllm_is_asked_about(url, monkeypatch):
    asked = []

    class Road:
        def __init__(self, python, card, _say):
            asked.append((python, card))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def ask(self, line, **question):
            asked.append((str(line), question["device_bytes"]))
            return ANSWER

    monkeypatch.setattr(explain, "VllmRoad", Road)
    line = ("--against", "vllm serve MODEL", "--engine-python", "/opt/vllm/bin/python")
    text = (await asyncio.to_thread(ran, *line, url=url)).output
    assert asked[:2] == [("/opt/vllm/bin/python", "910B"), ("vllm serve MODEL", BUDGET["memory"]["total_bytes"])]
    assert "beside that command line, as vLLM 0.32.0 answers: fits" in text
    assert "-tp 2 -> 1" in text
    parsed = json.loads((await asyncio.to_thread(ran, *line, "--json", url=url)).output)
    assert parsed["beside"][0]["there"] == ANSWER["budget"]["ranks"][0]["weights"]["bytes"]
    assert (parsed["answer"], parsed["command_line"]) == (ANSWER, "vllm serve MODEL")


async def test_without_a_vllm_the_way_to_one_is_named(url, monkeypatch):
    monkeypatch.setattr(explain, "engine_here", lambda: None)
    result = await asyncio.to_thread(ran, "--against", "vllm serve MODEL", url=url)
    why = "no vLLM can be imported here; --engine-python PATH names a Python that has one"
    assert (result.exit_code, result.output) == (1, f"highwater: {why}\n")


async def test_a_vllm_that_cannot_be_asked_says_why_and_what_would_help(url, tmp_path):
    python = tmp_path / "python"
    answer = '{"schema": 1, "status": "cannot_be_asked", "error": "no config.json", "help": "copy it there"}'
    python.write_text(f"#!/bin/sh\nread line; echo '{answer}'\n")
    python.chmod(0o755)
    line = ("--against", "vllm serve MODEL", "--engine-python", str(python))
    result = await asyncio.to_thread(ran, *line, url=url)
    assert result.exit_code == 1
    assert result.output.endswith("highwater: this vLLM cannot be asked: no config.json. copy it there\n")


async def test_without_any_start_the_command_says_why(tmp_path):
    async with both_on_ports() as running:
        await running.poll()
        result = await asyncio.to_thread(ran, url=f"http://127.0.0.1:{running.port}")
    assert result.exit_code == 1
    assert "rank 0: nothing reports its start; set HIGHWATER_RECORDER_DIR" in result.output


@pytest.mark.parametrize("state", ["ready", "paused", "gone"])
async def test_the_budget_says_the_state_that_the_status_says(state):
    async with sidecar_before(told()) as running:
        await running.poll()
        running.fake.paused, running.fake.down = state == "paused", state == "gone"
        for _ in range(2):
            await running.poll()
        states = [
            (await running.client.get("/memory")).json()["engine"]["state"],
            (await running.client.get("/memory/budget")).json()["engine_state"],
        ]
    assert states == [state, state]

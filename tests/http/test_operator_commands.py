"""What runbooks need curl for otherwise: policy, events, snapshot, restore and get, against real ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from click.testing import Result

from highwater.act.rules import PolicySettings
from highwater.terminal.events import follow_events
from tests.fakes.engine import NO_SNAPSHOT
from tests.http.test_control_plane import TOKEN, both_on_ports
from tests.http.test_terminal import Page, page_server, ran
from tests.unit.terminal.reports import as_json, report
from tests.unit.watch.test_snapshots import Writers


@pytest.fixture
async def sidecar(tmp_path):
    async with both_on_ports(admin_token=TOKEN, policy=PolicySettings(), recorder_dir=tmp_path) as running:
        running.fake.snapshot = Writers(size=1_000_000, free=10**9)
        await running.poll()
        yield running


@pytest.fixture
def run(sidecar):
    """`await run("policy", "get")`, with the token in a variable."""

    async def one(*arguments: str, **environ: str) -> Result:
        url = f"http://127.0.0.1:{sidecar.port}"
        return await asyncio.to_thread(ran, *arguments, url=url, **{"HIGHWATER_ADMIN_TOKEN": TOKEN, **environ})

    return one


# --- policy ---


async def test_the_policy_is_shown_without_a_token(run):
    result = await run("policy", "get", HIGHWATER_ADMIN_TOKEN="")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("mode: act, as it was configured\n")
    assert "rule device: " in result.stdout
    assert "runs release" in result.stdout


async def test_the_mode_is_changed(run, sidecar):
    result = await run("policy", "mode", "observe")
    assert result.exit_code == 0, result.output
    assert "mode: observe, changed while it runs; the change ends with the sidecar" in result.stdout
    shown = (await sidecar.client.get("/policy")).json()
    assert (shown["mode"], [rule["name"] for rule in shown["rules"]]) == ("observe", ["device"])


async def test_what_get_printed_can_be_set_again(run, sidecar, tmp_path):
    printed = json.loads((await run("policy", "get", "--json")).stdout)
    printed["rules"][0]["cooldown_seconds"] = 7.0
    result = await run("policy", "set", "-", "--json", text=json.dumps(printed))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rules"][0]["cooldown_seconds"] == 7.0
    (tmp_path / "policy.yaml").write_text("policy:\n  mode: observe\n  rules: []\n")
    result = await run("policy", "set", str(tmp_path / "policy.yaml"))
    assert result.exit_code == 0, result.output
    shown = (await sidecar.client.get("/policy")).json()
    assert (shown["mode"], shown["rules"]) == ("observe", [])


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("rules: [{name: a, signal: magic}]", 1, "is not a signal"),
        ("mod: act", 2, "mod: there is no such key"),
        ("mode: act\nmode: observe", 2, "given twice, on line 1 and on line 2"),
        ("[", 2, "line 1"),
        ("", 2, "must have mode, rules or both"),
    ],
)
async def test_a_policy_that_is_wrong_is_refused_whole(run, sidecar, text, status, words):
    before = (await sidecar.client.get("/policy")).json()
    result = await run("policy", "set", "-", text=text)
    assert (result.exit_code, result.stdout) == (status, "")
    assert words in result.stderr
    after = (await sidecar.client.get("/policy")).json()
    assert (after["mode"], after["rules"]) == (before["mode"], before["rules"])


async def test_the_token_comes_from_a_file_too(run, tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "token").chmod(0o600)
    file = {"HIGHWATER_ADMIN_TOKEN": "", "HIGHWATER_ADMIN_TOKEN_FILE": str(tmp_path / "token")}
    result = await run("policy", "mode", "observe", **file)
    assert result.exit_code == 0, result.output


# --- events ---


async def test_events_are_listed_oldest_first(run):
    await run("mark", "one")
    await run("mark", "two")
    assert len((await run("events", "--last", "2")).stdout.splitlines()) == 2
    # On a slow machine the engine may become ready only now.
    lines = [line for line in (await run("events")).stdout.splitlines() if " mark " in line]
    assert ["one" in lines[0], "two" in lines[1]] == [True, True]
    told = [json.loads(line) for line in (await run("events", "--json")).stdout.splitlines()]
    assert [event["kind"] for event in told].count("mark") == 2
    assert (await run("events", "--last", "0")).stdout == ""


async def test_events_are_followed_as_they_happen(run, sidecar):
    await run("mark", "before")
    command = [sys.executable, "-m", "highwater", "events", "--follow", "--last", "1"]
    env = os.environ | {"HIGHWATER_URL": f"http://127.0.0.1:{sidecar.port}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with await asyncio.to_thread(subprocess.Popen, command, env=env, **pipes) as following:
        assert b"before" in await asyncio.to_thread(following.stdout.readline)
        await run("mark", "after")
        assert b"after" in await asyncio.to_thread(following.stdout.readline)
        following.send_signal(signal.SIGINT)
        _, problems = await asyncio.to_thread(following.communicate)
    assert (following.returncode, problems) == (130, b"")


# --- snapshot and restore ---


async def test_a_snapshot_is_taken_listed_and_fetched(run, tmp_path):
    assert "977 KiB" in (await run("snapshot", "take", "--dry-run")).stdout
    assert "there are no snapshots" in (await run("snapshot", "list")).stdout
    taken = await run("snapshot", "take")
    assert taken.exit_code == 0, taken.output
    path = json.loads((await run("snapshot", "list", "--json")).stdout)["snapshots"][0]["url"]
    assert path in (await run("snapshot", "list")).stdout
    assert (await run("get", path)).stdout_bytes == bytes(1_000_000)


async def test_a_worker_that_takes_no_snapshot_is_one_line(run, sidecar):
    sidecar.fake.snapshot = lambda _: [NO_SNAPSHOT] * 2
    result = await run("snapshot", "take")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)


async def test_restore_says_what_each_rank_brought_back(run, sidecar):
    sidecar.fake.serve_images()
    await sidecar.poll()
    assert (await run("reclaim", "trim_encoder_cache")).exit_code == 0
    result = await run("restore")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].split() == ["rank", "entries", "brought", "back", "bytes"]
    assert not any(worker.spilled for worker in sidecar.fake.workers)


# --- get ---


@pytest.mark.parametrize("path", ["/memory", "memory/incidents", "/policy", "/memory/openapi.json", "/server_info"])
async def test_get_prints_json(run, path):
    result = await run("get", path)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


async def test_get_prints_text(run):
    assert "highwater_engine_up" in (await run("get", "/metrics")).stdout
    assert "policy: " in (await run("get", "/memory?format=text")).stdout


async def test_get_of_what_is_not_there_is_one_line(run):
    result = await run("get", "/memory/nonsense")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert "/memory" in result.stderr


# --- what answers is hostile, or of another version ---


class Odd(Page):
    """Answers /memory as a sidecar does, and all else with what `bodies` says."""

    kind = "application/json"
    bodies: Mapping[str, bytes] = MappingProxyType({})

    @property
    def body(self) -> bytes:
        path = self.path.partition("?")[0]
        return json.dumps(as_json(report())).encode() if path == "/memory" else self.bodies.get(path, b"{}")


def odd(**bodies: bytes) -> contextlib.AbstractContextManager[str]:
    return page_server(type("One", (Odd,), {"bodies": {f"/{name}": body for name, body in bodies.items()}}))


@pytest.mark.parametrize("command", [["policy", "get"], ["policy", "mode", "act"], ["events"]], ids=" ".join)
@pytest.mark.parametrize("answer", [b"{}", b"[]", b"null", b'{"status": 5, "ranks": 7, "events": {}, "snapshots": 1}'])
def test_an_answer_of_another_version_is_one_line(command, answer):
    with odd(**dict.fromkeys(("policy", "memory/events"), answer)) as url:
        result = ran(*command, url=url)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (3, "", 1), result.output


def test_no_escape_reaches_the_terminal():
    event = {"id": 1, "at": 0.0, "kind": "mark", "summary": "\x1b[31mred\x07\x9b2J"}
    with odd(**{"memory/events": json.dumps({"events": [event]}).encode()}) as url:
        shown = ran("events", url=url).stdout
        assert "red" in shown
        assert "\x1b" not in shown + ran("events", "--json", url=url).stdout


def test_what_is_no_json_though_it_says_so_is_one_line():
    with odd(page=b"{") as url:
        result = ran("get", "/page", url=url)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)


class OneLife:
    """A client of a sidecar that has had some events, sends some, and ends the stream."""

    def __init__(self, listed, live):
        self._listed, self._live = listed, live

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def events(self):
        yield "report", {}
        yield from (("event", one) for one in self._live)

    def get(self, *_):
        return {"events": self._listed}


def test_events_go_on_with_a_sidecar_that_came_back():
    first, second, third = ({"id": number, "at": float(number)} for number in (1, 2, 3))
    lives = iter([OneLife([first], [second]), OneLife([third, second, first], [third])])
    lost: list[str] = []
    following = follow_events(lambda: next(lives), lambda _: None, 0, lost.append)
    assert [next(following), next(following)] == [second, third]
    assert lost == ["the sidecar has ended the stream"]

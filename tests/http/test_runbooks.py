"""Every line that a runbook says to type works as printed: in the chart's pod, and on a machine without Kubernetes.

A real sidecar runs in each place, with a token, beside an engine that has died once: in the first with the environment
that the chart gives its container, behind a `kubectl` that does as the API server would. What a line needs besides, and
why, is named here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from highwater.terminal.demo.process import KeptProcess, free_port
from tests.fakes.engine import FakeEngine
from tests.helm.chart import NAMESPACE, objects, pod_templates
from tests.http import stand_in_kubectl
from tests.http.conftest import serving
from tests.patience import LIMIT_SECONDS, patience

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs" / "runbooks").glob("*.md")), ROOT / "docs" / "oncall.md"]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
POD = "demo-highwater-0"
EXEC = "kubectl -n NAMESPACE exec POD -c highwater -- "
SIDECAR_LINE = "SIDECAR=http://127.0.0.1:8001  # in Kubernetes: kubectl -n NAMESPACE port-forward POD 8001:8002"
TOKEN_LINE = (
    "TOKEN=$(highwater token)       # in Kubernetes: $(kubectl -n NAMESPACE exec POD -c highwater -- highwater token)"
)

BLOCKS = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
LINES = {line.strip() for block in BLOCKS for line in block.splitlines() if not line.startswith("#")}
PRINTED = {re.sub(r"  +# .*", "", line) for line in LINES}
# In the text: commands of ours, as the sidecar's own machine has them, and what changes something over HTTP.
INLINE = {" ".join(found.split()) for found in re.findall(r"`((?:highwater|curl -X) [^`]+)`", TEXT)}
COMMANDS = sorted(line for line in PRINTED | INLINE if line and not line.startswith(("SIDECAR=", "TOKEN=")))

# Not run, by a word of the line.
NOT_RUN = {
    "http://PROMETHEUS": "asks Prometheus; tests/observability run one",
    "highwater top": "draws until somebody ends it; its own tests have a terminal",
}
# Run, and right to find nothing or to refuse here.
EMPTY_HERE = {
    "grep -A30 Traceback": "no part of this sidecar has failed",
    "snapshot take": "the stand-in engine's workers write no snapshots, and say so",
}
# `highwater status`, `check` and `reclaim` also say by their exit status that somebody should look.
MAX_EXIT_CODE = 2
# For a sidecar that comes up on a machine that has much else to do.
PATIENCE_SECONDS = 240.0

shares = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Place:
    """Where somebody types.

    Attributes:
        environ: Of the shell.
        in_kubernetes: Whether there is a `kubectl`, and no `highwater` beside it.
        words: What a person puts in for the runbooks' placeholders.
    """

    environ: dict[str, str]
    in_kubernetes: bool
    words: dict[str, str] = field(default_factory=dict)

    def line(self, printed: str) -> str | None:
        """The line as it is typed here; ``None`` for a line that needs Kubernetes, on a machine without it."""
        if self.in_kubernetes and printed.startswith("highwater"):
            printed = EXEC + printed
        if not self.in_kubernetes:
            printed = printed.replace(EXEC, "")
            if printed.startswith("kubectl"):
                return None
        for word, meant in self.words.items():
            printed = re.sub(rf"\b{re.escape(word)}\b", lambda _, meant=meant: meant, printed)
        return printed

    async def typed(self, line: str) -> subprocess.CompletedProcess[str]:
        """One line in a shell, in which `curl` does not go through a proxy of this machine's."""
        script = f"set -o pipefail\ncurl() {{ command curl --noproxy '*' \"$@\"; }}\n{line}\n"
        return await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            check=False,
            env=self.environ,
            cwd=self.environ["HOME"],
        )


def commands(*, in_kubernetes: bool) -> list[str]:
    """Return the printed lines without those that are typed alike in such a place: each is typed there once.

    In the pod one line of each of our verbs is typed: that the others find what they look for, the machine's show.
    """
    place = Place({}, in_kubernetes)
    return [*{_typed(place, command): command for command in COMMANDS}.values()]


def _typed(place: Place, command: str) -> str:
    line = place.line(command) or command
    verb = re.match(rf"{re.escape(EXEC)}(highwater \w+(?: (?:get|mode|take|list))?)", line)
    return verb[1] if verb and place.in_kubernetes else line


def without_ours(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(("HIGHWATER_", "KUBECTL_"))}


def program(folder: Path, name: str, command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (folder / name).chmod(0o755)


@contextlib.asynccontextmanager
async def after_a_death(folder: Path, environ: dict[str, str], log: Path) -> AsyncIterator[None]:
    """A sidecar beside an engine that was killed once while a client asked it, and that is back."""
    fake, port = FakeEngine(), int(environ["HIGHWATER_ENGINE_URL"].rpartition(":")[2])
    control = environ.get("HIGHWATER_CONTROL_PORT", environ["HIGHWATER_PORT"])
    process = KeptProcess("the sidecar", log)
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_SECONDS) as client:

        async def until(path: str, holds: str) -> None:
            async with patience(PATIENCE_SECONDS):
                while not re.search(holds, (await client.get(f"http://127.0.0.1:{control}{path}")).text):  # noqa: ASYNC110 - a process
                    await asyncio.sleep(0.1)

        try:
            async with serving(fake, port=port):
                process.start([sys.executable, "-m", "highwater", "serve"], env=environ, cwd=folder)
                await asyncio.to_thread(process.wait_until_answers, int(control), "/livez", PATIENCE_SECONDS)
                await until("/memory", '"state": ?"ready"')
            await until("/memory/incidents", '"kind"')
            await client.get(f"http://127.0.0.1:{environ['HIGHWATER_PORT']}/v1/models")
            async with serving(fake, port=port):
                await until("/memory", '"state": ?"ready"')
                yield
        finally:
            await asyncio.to_thread(process.stop)


def in_folder(value: str, folder: Path) -> str:
    """A path of the container's as it is on this machine."""
    return f"{folder}{value}" if value.startswith("/") else value


def container_environ(container: dict[str, Any], folder: Path) -> dict[str, str]:
    """The environment that the chart gives, with its folders in ours and its ports free ones."""
    (secret,) = [each for each in objects({}) if each["kind"] == "Secret"]
    environ = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            key = entry["valueFrom"]["secretKeyRef"]
            assert key["name"] == secret["metadata"]["name"]
            environ[entry["name"]] = base64.b64decode(secret["data"][key["key"]]).decode()
        else:
            environ[entry["name"]] = in_folder(str(entry["value"]), folder)
    for mount in container["volumeMounts"]:
        Path(in_folder(mount["mountPath"], folder)).mkdir(parents=True, exist_ok=True)
    return environ


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pod(tmp_path_factory) -> AsyncIterator[Place]:
    """The chart's pod, as it is installed with what must be said."""
    folder = tmp_path_factory.mktemp("pod")
    (template,) = [found for each in objects({}) for found in pod_templates(each) if found["kind"] == "Pod"][:1]
    spec = template["spec"]
    (container,) = [each for each in (*spec["initContainers"], *spec["containers"]) if each["name"] == "highwater"]
    assert (container["command"], container["args"]) == (["highwater"], ["serve"])
    program(folder / "image", "highwater", f"{sys.executable} -m highwater")
    given, ports = container_environ(container, folder), {}
    for name in ("HIGHWATER_PORT", "HIGHWATER_CONTROL_PORT"):
        ports[given[name]] = free_port()
        given[name] = str(ports[given[name]])
    given["HIGHWATER_ENGINE_URL"] = f"http://127.0.0.1:{free_port()}"
    given |= {"PATH": f"{folder / 'image'}:{os.environ['PATH']}", "HIGHWATER_HOST": "127.0.0.1", "HOME": str(folder)}
    log, engine_log = folder / "sidecar.log", folder / "engine.log"
    engine_log.write_text("INFO 11-23 18:00:00 [api_server.py:1] vLLM API server version 0.32.0\n")
    made = [
        {
            "kind": each["kind"],
            "namespace": NAMESPACE,
            "name": each["metadata"]["name"],
            "labels": each["metadata"]["labels"],
        }
        for each in objects({"podMonitor": {"enabled": True}})
    ]
    made.append({"kind": "Pod", "namespace": NAMESPACE, "name": POD, "labels": template["metadata"]["labels"]})
    about = {"namespace": NAMESPACE, "name": POD, "ports": ports, "objects": made}
    about["containers"] = {"highwater": {"env": given, "log": str(log)}, "vllm": {"env": {}, "log": str(engine_log)}}
    (folder / "pod.json").write_text(json.dumps(about))
    program(folder / "bin", "kubectl", f"{sys.executable} {stand_in_kubectl.__file__}")
    local = free_port()
    words = {"NAMESPACE": NAMESPACE, "POD": POD, "8001:8002": f"{local}:8002", "127.0.0.1:8001": f"127.0.0.1:{local}"}
    environ = without_ours(dict(os.environ)) | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "KUBECTL_POD": str(folder / "pod.json"),
        "HOME": str(folder),
    }
    place = Place(environ, in_kubernetes=True, words=words)
    async with after_a_death(folder, given, log):
        forward = place.line(SIDECAR_LINE.partition("# in Kubernetes: ")[2]) or ""
        forwarding = subprocess.Popen(  # noqa: ASYNC220 - once, before anything else runs
            forward.split(), env=environ, stdout=subprocess.PIPE, text=True
        )
        assert await asyncio.to_thread(forwarding.stdout.readline)
        try:
            await ready(place, TOKEN_LINE.partition("# in Kubernetes: ")[2])
            yield place
        finally:
            forwarding.terminate()
            forwarding.communicate()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machine(tmp_path_factory) -> AsyncIterator[Place]:
    """A machine without Kubernetes, where the sidecar made its token by itself."""
    folder = tmp_path_factory.mktemp("machine")
    program(folder / "bin", "highwater", f"{sys.executable} -m highwater")
    port = free_port()
    settings = {
        "HIGHWATER_ENGINE_URL": f"http://127.0.0.1:{free_port()}",
        "HIGHWATER_PORT": str(port),
        "HIGHWATER_RECORDER_DIR": str(folder / "recorder"),
        "HIGHWATER_INCIDENTS__FOLDER": str(folder / "incidents"),
        "HIGHWATER_STATE_FILE": str(folder / "state.json"),
        "HIGHWATER_ADMIN_TOKEN_FILE": str(folder / "token"),
    }
    for name in ("recorder", "incidents"):
        (folder / name).mkdir()
    base = without_ours(dict(os.environ)) | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
    place = Place(base | settings, in_kubernetes=False, words={"127.0.0.1:8001": f"127.0.0.1:{port}"})
    async with after_a_death(folder, base | settings, folder / "sidecar.log"):
        await ready(place, TOKEN_LINE.partition("=")[2].partition("  #")[0])
        yield place


async def ready(place: Place, token: str) -> None:
    """Type what the blocks begin with: the sidecar's address, and the token."""
    sidecar = place.line(SIDECAR_LINE.partition("  #")[0])
    done = await place.typed(f'{sidecar}\nTOKEN={place.line(token)}\necho "$SIDECAR $TOKEN"')
    place.environ["SIDECAR"], _, place.environ["TOKEN"] = done.stdout.strip().partition(" ")
    assert len(place.environ["TOKEN"]) > 20, done
    found = await place.typed(
        f'curl -s "$SIDECAR/memory/incidents" | {sys.executable} -c "import json,sys; '
        "print(json.load(sys.stdin)['incidents'][0]['id'])\""
    )
    place.words["ID"] = found.stdout.strip()
    assert place.words["ID"], found


def reason(table: dict[str, str], command: str) -> str | None:
    return next((why for word, why in table.items() if word in command), None)


async def works(place: Place, command: str) -> None:
    line = place.line(command)
    why = reason(NOT_RUN, command) or (None if line else "Kubernetes' own")
    if line is None or why is not None:
        pytest.skip(why)
    done = await place.typed(line)
    said = done.stdout + done.stderr
    assert "unauthorized" not in said
    assert "Traceback" not in said
    if reason(EMPTY_HERE, command):
        return
    assert done.returncode <= (MAX_EXIT_CODE if "highwater " in line and "curl" not in line else 0), done
    assert done.stdout or ">" in line, done
    assert '"code"' not in done.stdout, done


@pytest.mark.slow("the runbooks' lines again, in the chart's pod")
@shares
@pytest.mark.parametrize("command", commands(in_kubernetes=True))
async def test_a_line_works_in_the_charts_pod(pod: Place, command: str):
    await works(pod, command)


@shares
@pytest.mark.parametrize("command", commands(in_kubernetes=False))
async def test_a_line_works_without_kubernetes(machine: Place, command: str):
    await works(machine, command)


def test_every_kind_of_line_is_there():
    assert {command.split()[0] for command in COMMANDS} == {"kubectl", "highwater", "curl"}
    changes = [command for command in COMMANDS if re.search(r"curl .*-X", command)]
    assert changes
    assert [command for command in changes if "Authorization: Bearer $TOKEN" not in command] == []
    assert [word for word in (*NOT_RUN, *EMPTY_HERE) if not any(word in command for command in COMMANDS)] == []


def test_the_first_lines_are_the_same_everywhere():
    assert {line for line in LINES if line.startswith("SIDECAR=")} == {SIDECAR_LINE}
    assert {line for line in LINES if line.startswith("TOKEN=")} == {TOKEN_LINE}


@pytest.mark.slow("the runbooks' lines again, in the chart's pod")
@shares
async def test_a_change_without_the_token_is_refused_here(pod: Place, machine: Place):
    """So that the lines above show that each of them has it."""
    for place in (pod, machine):
        done = await place.typed('curl -s -X POST "$SIDECAR/memory/reclaim"')
        assert "unauthorized" in done.stdout

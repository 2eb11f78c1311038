"""What the tests of the install guides ask of a page, and of the pods that come out of following it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.helm.chart import Object, container, env, mounts
from tests.support.kubernetes_tools import Tools

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "install"
CHARTS = Path(__file__).resolve().parent / "charts"
CONTROL_PORT = 8002
_COPIED = re.compile(r"\[`([^`]+)`\]\(([\w-]+/\1)\)")


def saved_files(page: str) -> dict[str, str]:
    """The files that a page has its reader copy, by the names that they get: a link to each."""
    text = (GUIDES / f"{page}.md").read_text(encoding="utf-8")
    found = {name: (GUIDES / path).read_text(encoding="utf-8") for name, path in _COPIED.findall(text)}
    assert found
    return found


def save(page: str, folder: Path) -> None:
    for name, content in saved_files(page).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def followed(lines: str, folder: Path, tools: Tools) -> str:
    """Run a page's lines in a shell, in a folder, with real programs; return what they print."""
    environ = dict(tools.environ(folder / "home"))
    done = subprocess.run(
        ["sh", "-euc", lines], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifests(text: str) -> list[Object]:
    return [each for each in yaml.safe_load_all(text) if each]


def the(kind: str, objects: list[Object], **labels: str) -> Object:
    wanted = {key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()}
    (only,) = [
        each
        for each in objects
        if each["kind"] == kind and wanted.items() <= (each["metadata"].get("labels") or {}).items()
    ]
    return only


def pod_of(template: Mapping[str, Any]) -> Object:
    metadata = {"name": "pod", **(template.get("metadata") or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def last_of(flag: str, arguments: list[str]) -> str | None:
    """What vLLM takes for a flag that may be there several times, as `--flag=value` or in two."""
    found = None
    for place, argument in enumerate(arguments):
        if argument == flag:
            found = arguments[place + 1]
        elif argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
    return found


def assert_engine_is_private(engine: Object, port: int) -> None:
    """It listens on loopback, in development mode, and the kubelet asks it there and not through the sidecar."""
    arguments = [*(engine.get("command") or []), *(engine.get("args") or [])]
    assert (last_of("--host", arguments), last_of("--port", arguments)) == ("127.0.0.1", str(port))
    assert env(engine)["VLLM_SERVER_DEV_MODE"] == "1"
    for kind in ("startupProbe", "livenessProbe"):
        probe = engine.get(kind)
        if probe is not None:
            assert "httpGet" not in probe, "a sidecar that is down would have the engine killed"
            assert "tcpSocket" not in probe
            assert str(port) in probe["exec"]["command"][-1]
            assert probe["timeoutSeconds"] >= 5


def assert_in_front(pod: Object, engine: str, *, port: int, engine_port: int) -> None:
    """The sidecar has the port that clients had, and the engine stands behind it on loopback."""
    settings = env(container(pod, "highwater"))
    assert settings["HIGHWATER_PORT"] == str(port)
    assert settings["HIGHWATER_CONTROL_PORT"] == str(CONTROL_PORT)
    assert settings["HIGHWATER_ENGINE_URL"] == f"http://127.0.0.1:{engine_port}"
    assert settings.get("HIGHWATER_PROXY__ENABLED", "true") == "true"
    assert_engine_is_private(container(pod, engine), engine_port)
    ready = container(pod, engine)["readinessProbe"]
    # Routers look at the statuses of ordinary containers, and a native sidecar is none.
    assert ready["httpGet"] == {"path": "/readyz", "port": CONTROL_PORT}
    assert not {"exec", "tcpSocket"} & set(ready)


def assert_recorded(pod: Object, engine: str) -> None:
    """Workers and sidecar share the folder of the recorders, and vLLM finds the worker package."""
    inside, sidecar = container(pod, engine), container(pod, "highwater")
    folder = env(sidecar)["HIGHWATER_RECORDER_DIR"]
    assert env(inside)["HIGHWATER_RECORDER_DIR"] == folder
    assert mounts(inside)[folder] == mounts(sidecar)[folder]
    package = env(inside)["PYTHONPATH"].split(":")[0]
    assert mounts(inside)[package] == mounts(container(pod, "highwater-extension"))[package]
    assert container(pod, "highwater-extension")["command"] == ["highwater", "extension", "--copy-to", package]


def assert_harmless(pod: Object) -> None:
    """A sidecar that cannot start keeps no engine from starting, and nothing that the pod mounts may be missing."""
    native = [each for each in pod["spec"]["initContainers"] if each["name"] == "highwater"]
    sidecar = container(pod, "highwater")
    if native:
        assert sidecar["restartPolicy"] == "Always", "else the engine waits until it ends"
        names = [each["name"] for each in pod["spec"]["initContainers"]]
        assert names.index("highwater-extension") < names.index("highwater")
    assert "startupProbe" not in sidecar, "the engine would wait for it"
    mounted = {*mounts(sidecar).values(), *mounts(container(pod, "highwater-extension")).values()}
    ours = [volume for volume in pod["spec"]["volumes"] if volume["name"].startswith("highwater")]
    assert mounted <= {volume["name"] for volume in ours}
    assert all("emptyDir" in volume for volume in ours)
    for each in (sidecar, container(pod, "highwater-extension")):
        rights = each["securityContext"]
        assert (rights["runAsNonRoot"], rights["allowPrivilegeEscalation"]) == (True, False)
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}, "the restricted standard asks for it"

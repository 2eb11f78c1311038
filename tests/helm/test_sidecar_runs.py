"""The sidecar as the chart starts it, as a process: the token's file, and what a sidecar that cannot start leaves."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from highwater.terminal.demo.process import KeptProcess, free_port
from tests.helm.chart import Object, container, merged, objects, pod, the
from tests.helm.node import Node
from tests.patience import LIMIT_SECONDS

# A start takes three seconds of a core; on a machine that is busy many times that.
PATIENCE_SECONDS = 300.0


def values(*more: Object) -> Object:
    port, control, engine = free_port(), free_port(), free_port()
    config = {"host": "127.0.0.1", "port": port, "control_port": control}
    found: Object = {"config": config, "engine": {"listen": {"port": engine}}}
    for each in more:
        found = merged(found, each)
    return found


@contextmanager
def sidecar(node: Node, given: Object) -> Iterator[str]:
    """The URL of its control plane, once it answers."""
    one = container(pod(given), "highwater")
    node.volume("highwater-state")
    process = KeptProcess("the sidecar", node.folder / "sidecar.log")
    process.start(node.argv(one), env=node.environ(one), cwd=node.folder)
    try:
        control = given["config"]["control_port"]
        process.wait_until_answers(control, one["livenessProbe"]["httpGet"]["path"], PATIENCE_SECONDS)
        yield f"http://127.0.0.1:{control}"
    finally:
        process.stop()


def may_act(url: str, token: str) -> bool:
    headers = {"Authorization": f"Bearer {token}"}
    status = httpx.post(
        f"{url}/memory/marks", json={"name": "m"}, headers=headers, trust_env=False, timeout=LIMIT_SECONDS
    ).status_code
    assert status in (200, 201, 401, 403), status
    return status in (200, 201)


@pytest.mark.slow("`highwater serve` as a process")
def test_a_changed_token_is_in_force_without_a_restart(tmp_path: Path) -> None:
    """The kubelet swaps the files of a Secret; the sidecar goes on, takes the new one, and refuses the old one."""
    given = values()
    node = Node(tmp_path, objects(given))
    node.mount(pod(given))
    old = base64.b64decode(the("Secret", given)["data"]["admin-token"]).decode()
    with sidecar(node, given) as url:
        assert may_act(url, old)
        assert not may_act(url, "nobodys-token"), "another test's sidecar, which trusts this machine, has its port"
        node.swap("highwater-admin", {"token": "another-token-of-theirs"}, mode=0o440)
        patiently = Retrying(
            stop=stop_after_delay(PATIENCE_SECONDS), wait=wait_fixed(0.1), retry=retry_if_result(lambda done: not done)
        )
        assert patiently(may_act, url, "another-token-of-theirs")
        assert not may_act(url, old)


@pytest.mark.slow("`highwater serve` as a process")
def test_without_its_secret_the_sidecar_serves_and_refuses_to_act(tmp_path: Path) -> None:
    """The volume is optional, so that the engine starts; what looks is answered, and what acts is not."""
    given = values({"adminToken": {"existingSecret": {"name": "not-there"}}})
    node = Node(tmp_path, objects(given))
    volume = node.volume("highwater-admin")
    # The kubelet mounts it so that nobody can write.
    volume.rmdir()
    volume.symlink_to("/proc/sys")
    with sidecar(node, given) as url:
        assert httpx.get(f"{url}/livez", trust_env=False, timeout=LIMIT_SECONDS).status_code == 200
        assert not may_act(url, "any-token-at-all")


def test_where_the_sidecar_cannot_start_the_engines_own_answer_lets_it_start(tmp_path: Path) -> None:
    given = values({"config": {"proxy": {"extra_paths": ["/collective_rpc"]}}})
    node = Node(tmp_path, objects(given))
    node.mount(pod(given))
    one, engine = container(pod(given), "highwater"), container(pod(given), "vllm")
    ended = subprocess.run(
        node.argv(one),
        env=node.environ(one),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 2
    assert "startupProbe" not in one
    healthy = KeptProcess("an engine that is healthy", tmp_path / "engine.log")
    (tmp_path / "health").write_text("")
    port = given["engine"]["listen"]["port"]
    healthy.start([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)], env={}, cwd=tmp_path)
    try:
        healthy.wait_until_answers(port, "/health", PATIENCE_SECONDS)
        command = node.argv({**engine, "command": engine["startupProbe"]["exec"]["command"], "args": []})
        assert subprocess.run(command, timeout=PATIENCE_SECONDS, check=False).returncode == 0
    finally:
        healthy.stop()

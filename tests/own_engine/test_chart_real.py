"""What the chart renders for CPU, started as processes: the arguments, the environment and the shared folders work."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from highwater.process.worker_package import SHIM_FOLDER
from highwater.terminal.demo.engine import CACHE_TOKENS, MAX_MODEL_LEN, EngineEnvironment, build_model
from highwater.terminal.demo.process import KeptProcess, free_port
from highwater.terminal.demo.traffic import send_images
from tests.helm.chart import CI_FILES, Object, ci_values, container, merged, objects, pod, pods
from tests.helm.node import Node
from tests.patience import LIMIT_SECONDS, wait_until

START_SECONDS = 1200.0
LOOK_SECONDS = 0.25
MODEL = "/models/tiny-qwen3-vl"


@dataclass(frozen=True)
class Running:
    node: Node
    pod: Object
    engine: KeptProcess
    sidecar: KeptProcess
    port: int
    control_port: int
    token: str

    def start_sidecar(self) -> None:
        each = container(self.pod, "highwater")
        self.sidecar.start(self.node.argv(each), env=self.node.environ(each), cwd=self.node.folder)
        self.sidecar.wait_until_answers(self.control_port, each["livenessProbe"]["httpGet"]["path"], START_SECONDS)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.control_port}{path}", timeout=60, trust_env=False)

    def probe(self, name: str, which: str) -> bool:
        """Whether the kubelet would see it pass."""
        probe = container(self.pod, name)[which]
        if "exec" in probe:
            command = [sys.executable, *probe["exec"]["command"][1:]]
            return subprocess.run(command, capture_output=True, timeout=START_SECONDS, check=False).returncode == 0
        action = probe["httpGet"]
        url = f"http://127.0.0.1:{action['port']}{action['path']}"
        with suppress(httpx.ConnectError):
            return httpx.get(url, timeout=LIMIT_SECONDS, trust_env=False).status_code == 200
        return False

    def passes(self, name: str, which: str) -> None:
        """Wait until the probe passes: it has deadlines of its own, and the kubelet, too, asks a few times."""
        wait_until(lambda: self.probe(name, which), pause_seconds=LOOK_SECONDS)


def values(engine_port: int, port: int, control_port: int, python_path: list[str]) -> Object:
    """Those of ci/cpu-values.yaml, with the demonstration's model and free ports."""
    base = ci_values("cpu-values.yaml")
    arguments = [text for text in base["engine"]["args"] if not text.startswith("--max-model-len")]
    tiny = ["--load-format=dummy", f"--max-model-len={MAX_MODEL_LEN}", "--max-num-seqs=32", "--skip-mm-profiling"]
    tiny += [f"--max-num-batched-tokens={CACHE_TOKENS}", '--limit-mm-per-prompt={"image": 4, "video": 0}']
    engine = {"args": [*arguments, *tiny], "listen": {"port": engine_port}, "pythonPath": python_path}
    return merged(base, {"engine": engine, "config": {"port": port, "control_port": control_port}})


def known_as_vllm(folder: Path, version: str) -> Path:
    """`vllm serve` asks for the version of a distribution that the CPU build on the index does not call itself."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


@pytest.fixture(scope="module")
def running(engine_environment: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("pod")
    shim = [str(SHIM_FOLDER), str(known_as_vllm(folder / "names", f"{engine_environment.version}+cpu"))]
    rendered = values(free_port(), port := free_port(), control_port := free_port(), shim)
    programs = {"vllm": str(engine_environment.root / "bin" / "vllm")}
    node, template = Node(folder, objects(rendered), programs), pod(rendered)
    node.mount(template)
    engine = container(template, "vllm")
    build_model(Path(node.here(engine, MODEL)), multimodal=True)
    with ExitStack() as stack:
        copy, sidecar = template["spec"]["initContainers"]
        # In the image the package is beside Python; here it is in the tree.
        subprocess.run(node.argv(copy), env={"PATH": os.environ["PATH"]}, check=True, timeout=60)
        side = KeptProcess("the sidecar", folder / "sidecar.log")
        stack.callback(side.stop)
        node.volume("highwater-state")
        process = KeptProcess("the engine", folder / "engine.log")
        stack.callback(process.stop)
        token = Path(node.environ(sidecar)["HIGHWATER_ADMIN_TOKEN_FILE"]).read_text()
        pod_up = Running(node, template, process, side, port, control_port, token)
        pod_up.start_sidecar()
        assert not pod_up.probe("vllm", "startupProbe")
        process.start(node.argv(engine), env=node.environ(engine), cwd=Path(node.here(engine, engine["workingDir"])))
        deadline = time.monotonic() + START_SECONDS
        while not pod_up.probe("vllm", "startupProbe"):
            assert time.monotonic() < deadline, "the engine has not started"
            time.sleep(LOOK_SECONDS)
        pod_up.passes("vllm", "readinessProbe")
        yield pod_up


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for arguments in json.load(sys.stdin):
    parsed = parser.parse_args(arguments)
    print(json.dumps([parsed.model_tag, parsed.host, parsed.uds, parsed.worker_extension_cls, parsed.headless]))
"""


def test_vllm_knows_every_argument_that_the_chart_renders(
    engine_environment: EngineEnvironment, tmp_path: Path
) -> None:
    """Of each example, leaders and followers: read by vLLM's own parser, and understood as they are meant."""
    with_args = [container(each, "vllm") for name in CI_FILES for each in pods(ci_values(name))]
    rendered = [each["args"] for each in with_args if each.get("args")]
    # What Kubernetes would fill in.
    numbers = [[re.sub(r"\$\(LWS_(GROUP_SIZE|WORKER_INDEX)\)", "1", text) for text in each] for each in rendered]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SHIM_FOLDER), "HOME": str(tmp_path)}
    said = subprocess.run(
        [str(engine_environment.python), "-c", PARSE],
        input=json.dumps(numbers),
        env=environ,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    parsed = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("[")]
    assert len(parsed) == len(rendered) > 10
    extensions = set()
    for arguments, (model, host, uds, extension, headless) in zip(rendered, parsed, strict=True):
        assert model == arguments[0]
        extensions.add(extension)
        assert headless or host == "127.0.0.1" or uds == "/run/highwater/engine/engine.sock"
    # By the plugin alone on one node; by its name where no recorder can say that the plugin is there.
    assert extensions == {"", "highwater_worker.MemoryExtension"}


def test_every_rank_reports_by_both_ways(running: Running) -> None:
    wait_until(lambda: running.get("/memory").json().get("progress") is not None, pause_seconds=LOOK_SECONDS)
    report = running.get("/memory").json()
    assert report["engine"]["state"] == "ready"
    assert (report["ranks_expected"], report["ranks_reported"], report["ranks_missing"]) == (1, 1, [])
    assert report["progress"]["verdict"] in {"idle", "progressing", "busy"}
    assert list(running.node.volume("highwater-recorder").glob("*.ring"))


def test_the_engines_api_is_on_loopback_alone(running: Running) -> None:
    """Its port listens on 127.0.0.1, and the sidecar's two on every address of the pod."""
    engine_port = int(
        running.node.environ(container(running.pod, "highwater"))["HIGHWATER_ENGINE_URL"].rpartition(":")[2]
    )
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {ip for ip, port in listening if port == engine_port} == {"127.0.0.1"}
    for ours in (running.port, running.control_port):
        assert {ip for ip, port in listening if port == ours} == {"0.0.0.0"}


def test_a_reclaim_with_the_generated_token_gives_memory_back(running: Running) -> None:
    url = f"http://127.0.0.1:{running.control_port}"
    sent = asyncio.run(send_images(f"http://127.0.0.1:{running.port}", "tiny-qwen3-vl", images=range(8)))
    assert sent.failed == 0
    wait_until(lambda: running.get("/memory").json()["encoder_cache"]["entries"] > 0, pause_seconds=LOOK_SECONDS)
    body = {"remedies": ["reset_encoder_cache", "release"]}
    refused = httpx.post(f"{url}/memory/reclaim", json=body, timeout=60, trust_env=False)
    headers = {"Authorization": f"Bearer {running.token}"}
    done = httpx.post(f"{url}/memory/reclaim", json=body, headers=headers, timeout=120, trust_env=False)
    assert refused.status_code == 401
    assert [result["outcome"] for result in done.json()["results"]] == ["done", "done"]
    wait_until(lambda: running.get("/memory").json()["encoder_cache"]["entries"] == 0, pause_seconds=LOOK_SECONDS)


def test_each_port_serves_its_own_plane(running: Running) -> None:
    data = f"http://127.0.0.1:{running.port}"
    theirs = httpx.get(f"{data}/metrics", timeout=60, trust_env=False)
    assert "vllm:num_requests_running" in theirs.text
    assert "highwater_" not in theirs.text
    assert httpx.get(f"{data}/memory", timeout=60, trust_env=False).status_code == 404
    assert "highwater_engine_up" in running.get("/metrics").text
    assert running.get("/v1/models").status_code == 404


def test_the_engine_logs_into_the_folder_that_the_sidecar_reads(running: Running) -> None:
    log = (running.node.volume("highwater-engine-log") / "engine.log").read_text()
    assert "EngineCore" in log
    assert "EngineCore" in (running.node.folder / "engine.log").read_text()


def test_the_hook_before_the_end_returns_when_nothing_is_under_way(running: Running) -> None:
    """It would wait for the time that it is given otherwise."""
    command = container(running.pod, "vllm")["lifecycle"]["preStop"]["exec"]["command"]
    hook = [sys.executable, *command[1:-2], "0", "1200"]
    ended = subprocess.run(hook, capture_output=True, timeout=1000, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_sidecar_that_is_down_has_no_healthy_engine_killed(running: Running) -> None:
    running.sidecar.stop()
    running.passes("vllm", "startupProbe")
    running.passes("vllm", "livenessProbe")
    assert not running.probe("vllm", "readinessProbe")
    running.start_sidecar()
    running.passes("vllm", "readinessProbe")


def test_probes_tell_the_engines_death_from_the_sidecars(running: Running) -> None:
    running.passes("vllm", "livenessProbe")
    running.engine.stop()
    wait_until(lambda: not running.probe("vllm", "livenessProbe"), pause_seconds=LOOK_SECONDS)
    running.passes("highwater", "livenessProbe")
    assert not running.probe("highwater", "readinessProbe")

"""What the engine runs on and with: devices, models, images, and the options of its container and of the pod."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helm.chart import Object, ci_values, container, containers, env, mounts, pod, pods, volume


@pytest.mark.parametrize(
    ("device", "resource"),
    [
        ({"kind": "nvidia", "count": 2}, "nvidia.com/gpu"),
        ({"kind": "ascend", "count": 2}, "huawei.com/Ascend910"),
        ({"kind": "ascend", "count": 2, "resource": "huawei.com/Ascend310P"}, "huawei.com/Ascend310P"),
        ({"kind": "amd", "count": 2}, "amd.com/gpu"),
        ({"kind": "gaudi", "count": 2}, "habana.ai/gaudi"),
    ],
)
def test_devices_are_the_engines_and_tensor_parallel_follows(device: Object, resource: str) -> None:
    image = {"repository": "registry.example.org/vllm"}
    values = {"engine": {"image": image, "device": device, "resources": {"limits": {"memory": "64Gi"}}}}
    engine, sidecar = container(pod(values), "vllm"), container(pod(values), "highwater")
    assert engine["resources"]["limits"] == {"memory": "64Gi", resource: 2}
    assert "--tensor-parallel-size=2" in engine["args"]
    assert resource not in str(sidecar["resources"])


def test_ascends_environment_is_read_before_vllm_starts() -> None:
    engine = container(pod(ci_values("ascend-values.yaml")), "vllm")
    shell, flag, script, name, *command = engine["command"]
    assert (shell, flag, name, command) == ("bash", "-c", "vllm", ["vllm", "serve"])
    assert "\n. '/usr/local/Ascend/ascend-toolkit/set_env.sh' && " in script
    assert script.endswith('&& exec "$@"\n')


def test_what_those_files_set_reaches_the_engine(tmp_path: Path) -> None:
    (tmp_path / "set_env.sh").write_text("export PYTHONPATH=/ascend:$PYTHONPATH\n")
    command = ["sh", "-c", 'echo "$PYTHONPATH"; echo "$2"', "sh"]
    values = {"environmentFiles": [f"{tmp_path}/set_env.sh"], "command": command, "args": ["two words; $(no command)"]}
    engine = container(pod({"engine": values}), "vllm")
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": env(engine)["PYTHONPATH"]}
    said = subprocess.run(
        [*engine["command"], *engine["args"]], env=environ, capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["/ascend:/opt/highwater", "two words; $(no command)"]


def test_a_module_as_the_command_gets_the_model_as_an_option() -> None:
    by_name = container(pod({"engine": {"command": ["python3", "-m", "vllm.entrypoints.openai.api_server"]}}), "vllm")
    assert container(pod({}), "vllm")["args"][0] == "some/model"
    assert by_name["args"][0] == "--model=some/model"


def test_shared_memory_is_sized_and_the_models_folder_is_there() -> None:
    """64 MiB, which a container has otherwise, kill tensor-parallel ranks."""
    each = pod({"engine": {"sharedMemory": "16Gi"}, "models": {"kind": "claim", "mountPath": "/data"}})
    paths = mounts(container(each, "vllm"))
    assert volume(each, paths["/dev/shm"])["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert volume(each, paths["/data"])["persistentVolumeClaim"]["claimName"] == "demo-highwater-models"
    assert env(container(each, "vllm"))["HF_HOME"] == "/data/huggingface"


@pytest.mark.parametrize(
    ("models", "root"),
    [
        ({"kind": "claim"}, "/models/vllm-cache"),
        ({"kind": "existingClaim", "existingClaim": "c"}, "/models/vllm-cache"),
        ({"kind": "existingClaim", "existingClaim": "c", "readOnly": True}, "/home/vllm/.cache/vllm"),
        ({"kind": "emptyDir"}, "/home/vllm/.cache/vllm"),
        ({"kind": "none"}, "/home/vllm/.cache/vllm"),
    ],
)
def test_what_is_compiled_and_downloaded_is_kept_where_models_are(models: Object, root: str) -> None:
    variables = env(container(pod({"models": models}), "vllm"))
    assert variables["VLLM_CACHE_ROOT"] == root
    kept = None if models["kind"] == "none" else "/models/modelscope"
    assert variables.get("MODELSCOPE_CACHE") == kept


def test_a_variable_of_theirs_replaces_the_charts() -> None:
    engine = container(pod({"engine": {"env": [{"name": "VLLM_CACHE_ROOT", "value": "/mine"}]}}), "vllm")
    assert [e["value"] for e in engine["env"] if e["name"] == "VLLM_CACHE_ROOT"] == ["/mine"]


def test_devices_by_claim_ask_for_no_plugins_resource() -> None:
    values = {
        "engine": {"device": {"kind": "nvidia", "count": 4, "claims": ["gpus"]}},
        "pod": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "four-gpus"}]},
    }
    each = pod(values)
    engine = container(each, "vllm")
    assert engine["resources"] == {"claims": [{"name": "gpus"}]}
    assert "--tensor-parallel-size=4" in engine["args"]
    assert each["spec"]["resourceClaims"] == values["pod"]["resourceClaims"]
    assert "claims" not in container(each, "highwater")["resources"]


@pytest.mark.parametrize(
    ("repository", "pulled"),
    [
        ("vllm/vllm-openai", "mirror.example.org:5000/vllm/vllm-openai"),
        ("quay.io/ascend/vllm-ascend", "mirror.example.org:5000/ascend/vllm-ascend"),
        ("localhost/vllm", "mirror.example.org:5000/vllm"),
        ("vllm", "mirror.example.org:5000/vllm"),
    ],
)
def test_all_images_come_from_the_mirror(repository: str, pulled: str) -> None:
    image = {"repository": repository, "tag": "v9"}
    values = {"global": {"imageRegistry": "mirror.example.org:5000", "theirs": 1}, "engine": {"image": image}}
    assert container(pod(values), "vllm")["image"] == f"{pulled}:v9"
    everywhere = [one["image"] for each in pods(values) for one in containers(each)]
    assert {image.partition("/")[0] for image in everywhere} == {"mirror.example.org:5000"}


def test_options_of_the_pod_reach_it() -> None:
    given: Object = {
        "hostIPC": True,
        "shareProcessNamespace": True,
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.0.0.10"]},
        "hostAliases": [{"ip": "10.1.1.1", "hostnames": ["hub.example.org"]}],
    }
    spec = pod({"pod": given})["spec"]
    assert {key: spec[key] for key in given} == given
    assert not any(key in pod({})["spec"] for key in given)


def test_the_timing_of_a_probe_is_the_users_and_what_it_asks_the_charts() -> None:
    overrides = {"startup": {"timeoutSeconds": 30}, "readiness": {"successThreshold": 2}}
    usual, changed = (
        container(pod({"engine": {"probes": {"overrides": each}}, "sidecar": {}}), "vllm") for each in ({}, overrides)
    )
    assert changed["startupProbe"] == usual["startupProbe"] | {"timeoutSeconds": 30}
    assert changed["readinessProbe"] == usual["readinessProbe"] | {"successThreshold": 2}
    assert changed["livenessProbe"] == usual["livenessProbe"]


def test_a_hook_after_the_start_leaves_the_drain_alone() -> None:
    hook = {"exec": {"command": ["sh", "-c", "echo up"]}}
    lifecycle = container(pod({"engine": {"lifecycle": {"postStart": hook}}}), "vllm")["lifecycle"]
    assert lifecycle["postStart"] == hook
    assert lifecycle["preStop"] == container(pod({}), "vllm")["lifecycle"]["preStop"]

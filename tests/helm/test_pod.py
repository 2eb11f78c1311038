"""The pod: who reaches what, in which order it starts and ends, what its containers share, and what they may do."""

from __future__ import annotations

import pytest

from tests.helm.chart import (
    CI_FILES,
    chart,
    ci_values,
    container,
    containers,
    env,
    merged,
    mounts,
    objects,
    pod,
    pods,
    the,
    volume,
)

WITH_PODS = [name for name in CI_FILES if name != "attach-values.yaml"]
SOCKET = {"engine": {"listen": {"kind": "socket"}}}
LWS = {"workload": {"kind": "LeaderWorkerSet"}, "engine": {"device": {"kind": "nvidia", "count": 2}}}
RAY = merged(LWS, {"multiNode": {"executor": "ray"}})


# --- who reaches the engine ---


@pytest.mark.parametrize("name", CI_FILES)
def test_services_lead_to_the_sidecars_ports_only(name: str) -> None:
    config = merged(chart().values, ci_values(name))["config"]
    data, control = config["port"], config["control_port"]
    for each in objects(ci_values(name)):
        if each["kind"] == "Service":
            targets = [port["targetPort"] for port in each["spec"]["ports"]]
            suffix = each["metadata"]["name"].removeprefix("demo-highwater").removeprefix("highwater")
            assert targets == {"": [data], "-control": [control], "-pods": [data, control]}[suffix]


def test_on_the_nodes_network_the_engine_has_a_socket() -> None:
    each = pod(merged(SOCKET, {"pod": {"hostNetwork": True}}))
    engine, sidecar = container(each, "vllm"), container(each, "highwater")
    assert not [text for text in engine["args"] if text.startswith(("--host", "--port"))]
    assert env(sidecar)["HIGHWATER_ENGINE_URL"] == "unix:/run/highwater/engine/engine.sock"
    assert mounts(engine)["/run/highwater/engine"] == mounts(sidecar)["/run/highwater/engine"]


def test_development_mode_and_the_extension_are_set_for_the_user() -> None:
    """Where Python finds the plugin, and the mode that lets the sidecar ask; vLLM loads it without a class."""
    engine = container(pod({"engine": {"pythonPath": ["/opt/mine"]}}), "vllm")
    assert env(engine)["VLLM_SERVER_DEV_MODE"] == "1"
    assert env(engine)["PYTHONPATH"] == "/opt/highwater:/opt/mine"
    assert not [word for word in engine["args"] if word.startswith("--worker-extension-cls")]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"config": {"recorder_dir": None}}, "highwater_worker.MemoryExtension"),
        ({"engine": {"workerExtension": "highwater_worker.MemoryExtension"}}, "highwater_worker.MemoryExtension"),
        ({"engine": {"workerExtension": "mine.Both"}}, "mine.Both"),
    ],
    ids=["no recorders", "ours", "a subclass"],
)
def test_a_class_is_named_where_the_plugin_does_not_suffice(values: dict[str, object], named: str) -> None:
    """The recorders tell the sidecar that workers can be called; without them it knows them by the class."""
    each = pod(values)
    assert container(each, "vllm")["args"][-1] == f"--worker-extension-cls={named}"
    told = env(container(each, "highwater")).get("HIGHWATER_ENGINE_HAS_EXTENSION")
    assert told == ("true" if named == "mine.Both" else None)


# --- how the extension gets there ---


def test_the_extension_is_copied_before_the_engine_starts() -> None:
    """From the sidecar's own image, so that both are of one version, into a folder that the engine may only read."""
    each = pod({"extension": {"from": "copy"}})
    first = each["spec"]["initContainers"][0]
    assert first["image"] == container(each, "highwater")["image"]
    assert first["command"] == ["highwater", "extension", "--copy-to", "/opt/highwater"]
    assert "emptyDir" in volume(each, mounts(first)["/opt/highwater"])
    (mount,) = [m for m in container(each, "vllm")["volumeMounts"] if m["mountPath"] == "/opt/highwater"]
    assert (mount["name"], mount["readOnly"]) == (mounts(first)["/opt/highwater"], True)


def test_an_image_volume_brings_the_extension_without_a_container() -> None:
    image = {"repository": "registry.example.org/ext", "digest": "sha256:" + "a" * 64}
    each = pod({"extension": {"from": "image", "image": image}})
    assert [c["name"] for c in each["spec"]["initContainers"]] == ["highwater"]
    reference = volume(each, "highwater-extension")["image"]["reference"]
    assert reference == f"registry.example.org/ext@{image['digest']}"


def test_without_an_image_for_the_extension_it_is_copied() -> None:
    assert container(pod({}), "highwater-extension")


# --- order ---


@pytest.mark.parametrize("name", WITH_PODS)
def test_the_sidecars_start_and_life_do_not_depend_on_the_engine_nor_the_engines_start_on_it(name: str) -> None:
    """As a native sidecar it starts first, is restarted alone, and ends after the engine. The kubelet starts what
    follows once it runs and its startup probe has passed, of which it has none (invariants.py).
    """
    sidecar = pod(ci_values(name))["spec"]["initContainers"][-1]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("highwater", "Always")
    assert "postStart" not in sidecar.get("lifecycle", {})
    assert sidecar["livenessProbe"]["initialDelaySeconds"] == 60
    paths = {probe: sidecar[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
    assert paths == {"livenessProbe": "/livez", "readinessProbe": "/readyz"}


def test_the_engines_probes_ask_the_sidecar_and_give_a_model_time_to_load() -> None:
    engine = container(pod({"engine": {"probes": {"startupSeconds": 1200, "unhealthySeconds": 60}}}), "vllm")
    startup, liveness = engine["startupProbe"], engine["livenessProbe"]
    for probe in (startup, liveness):
        assert probe["exec"]["command"][-2:] == ["http://127.0.0.1:8002", "http://127.0.0.1:8000"]
        assert probe["timeoutSeconds"] > 6, "for the sidecar, and then for the engine"
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1200
    assert liveness["periodSeconds"] * liveness["failureThreshold"] == 60


def test_the_engine_is_as_ready_as_the_sidecar() -> None:
    """Some look at the one container, some at the other; both see whether a request would be served."""
    each = pod({"sidecar": {"probes": {"readinessPeriodSeconds": 7}}})
    probe = container(each, "vllm")["readinessProbe"]
    assert probe == container(each, "highwater")["readinessProbe"]
    assert (probe["httpGet"]["path"], probe["httpGet"]["port"], probe["periodSeconds"]) == ("/readyz", 8002, 7)


def test_probes_follow_the_sidecar_to_another_port_and_to_tls() -> None:
    each = pod({"config": {"control_port": 9443}, "sidecar": {"tls": {"existingSecret": "pair"}}})
    probes = [c[p]["httpGet"] for c in containers(each) for p in c if p.endswith("Probe") and "httpGet" in c[p]]
    assert len(probes) == 3
    for kind in ("startupProbe", "livenessProbe"):
        assert "https://127.0.0.1:9443" in container(each, "vllm")[kind]["exec"]["command"]
    assert {(probe["port"], probe["scheme"]) for probe in probes} == {(9443, "HTTPS")}
    assert "https://127.0.0.1:9443" in container(each, "vllm")["lifecycle"]["preStop"]["exec"]["command"]
    assert env(container(each, "highwater"))["HIGHWATER_TLS__CERT_FILE"] == "/etc/highwater/tls/tls.crt"


def test_recreating_leaves_the_rolling_defaults_out() -> None:
    """Kubernetes refuses both together."""
    spec = the("Deployment", {"workload": {"strategy": {"type": "Recreate"}}})["spec"]
    assert spec["strategy"] == {"type": "Recreate"}


def test_a_long_load_is_no_failed_rollout() -> None:
    spec = the("Deployment", {"engine": {"probes": {"startupSeconds": 7200}}})["spec"]
    assert spec["progressDeadlineSeconds"] > 7200


def test_the_grace_holds_the_drain_and_the_sidecars_last_streams() -> None:
    """preStop counts against it: 5 s until nobody sends, 100 s for requests, 40 s for the sidecar, and some."""
    values = {"engine": {"drain": {"firstSeconds": 5, "seconds": 100}}, "config": {"shutdown_seconds": 40}}
    each = pod(values)
    assert each["spec"]["terminationGracePeriodSeconds"] >= 145
    assert container(each, "vllm")["lifecycle"]["preStop"]["exec"]["command"][-2:] == ["5", "100"]


def test_an_engine_that_hangs_is_not_given_the_whole_grace() -> None:
    each = pod({})
    assert container(each, "vllm")["livenessProbe"]["terminationGracePeriodSeconds"] == 30
    assert each["spec"]["terminationGracePeriodSeconds"] > 100


# --- shared folders ---


@pytest.mark.parametrize("name", [name for name in WITH_PODS if "minimal" not in name])
def test_both_containers_have_the_recorder_at_the_same_path(name: str) -> None:
    """And it is memory: a disk that stalls must not stall a worker."""
    each = pod(ci_values(name))
    engine, sidecar = container(each, "vllm"), container(each, "highwater")
    path = env(sidecar)["HIGHWATER_RECORDER_DIR"]
    assert env(engine)["HIGHWATER_RECORDER_DIR"] == path, "each worker starts its recorder by itself"
    assert mounts(engine)[path] == mounts(sidecar)[path]
    assert volume(each, mounts(engine)[path])["emptyDir"]["medium"] == "Memory"


def test_what_the_sidecar_keeps_is_not_in_its_container() -> None:
    each = pod({})
    variables, paths = env(container(each, "highwater")), mounts(container(each, "highwater"))
    assert "emptyDir" in volume(each, paths["/var/lib/highwater"])
    assert variables["HIGHWATER_STATE_FILE"].startswith("/var/lib/highwater/")
    assert variables["HIGHWATER_INCIDENTS__FOLDER"] == "/var/lib/highwater"
    kept = the("StatefulSet", {"workload": {"kind": "StatefulSet"}, "sidecar": {"state": {"persistent": True}}})
    assert [claim["metadata"]["name"] for claim in kept["spec"]["volumeClaimTemplates"]] == ["highwater-state"]


def test_the_engine_logs_to_a_file_that_the_sidecar_may_only_read() -> None:
    """And vLLM is told by its own logging configuration, which each of its processes reads."""
    each = pod({})
    sidecar, engine = container(each, "highwater"), container(each, "vllm")
    (mount,) = [m for m in sidecar["volumeMounts"] if m["mountPath"] == "/var/log/vllm"]
    assert (mount["name"], mount["readOnly"]) == (mounts(engine)["/var/log/vllm"], True)
    assert '"filename": "/var/log/vllm/engine.log"' in the("ConfigMap", {}, ending="-logging")["data"]["logging.json"]
    assert env(engine)["VLLM_LOGGING_CONFIG_PATH"] == "/etc/highwater/logging/logging.json"


def test_what_is_null_is_off_in_both_containers() -> None:
    each = pod(ci_values("minimal-features-values.yaml"))
    assert {v["name"] for v in each["spec"]["volumes"] if v["name"].startswith("highwater")} == {
        "highwater-admin",
        "highwater-extension",
        "highwater-tmp",
    }
    assert sorted(env(container(each, "highwater"))) == [
        *("HIGHWATER_ADMIN_TOKEN_FILE", "HIGHWATER_CONTROL_PORT", "HIGHWATER_ENGINE_URL", "HIGHWATER_HOST"),
        "HIGHWATER_PORT",
    ]


# --- several nodes ---


def test_of_several_nodes_the_leader_alone_has_the_sidecar() -> None:
    leader, follower = [each for each in pods(LWS) if container(each, "vllm")]
    assert container(leader, "highwater")
    assert not container(follower, "highwater")
    assert mounts(container(follower, "vllm"))["/run/highwater/recorder"] == "highwater-recorder"
    assert container(follower, "vllm")["args"][-2:] == [
        "--headless",
        "--worker-extension-cls=highwater_worker.MemoryExtension",
    ]
    assert "highwater-state" not in {v["name"] for v in follower["spec"]["volumes"]}


def test_the_nodes_find_each_other_by_what_the_controller_says() -> None:
    """vLLM's own executor by flags, Ray's by its head."""
    leader, follower = [container(each, "vllm") for each in pods(LWS) if container(each, "vllm")]
    for each in (leader, follower):
        assert {"--nnodes=$(LWS_GROUP_SIZE)", "--node-rank=$(LWS_WORKER_INDEX)"} <= set(each["args"])
        assert {"--tensor-parallel-size=2", "--pipeline-parallel-size=2"} <= set(each["args"])
    head, joined = [container(each, "vllm") for each in pods(RAY) if container(each, "vllm")]
    assert "ray start --head" in head["command"][6]
    assert joined["command"][4:7] == ["ray", "start", "--address=$(LWS_LEADER_ADDRESS):29501"]


def test_a_service_finds_leaders_only() -> None:
    leader, follower = [each["metadata"]["labels"] for each in pods(LWS) if container(each, "vllm")]
    for ending in ("highwater", "-control"):
        selector = the("Service", LWS, ending=ending)["spec"]["selector"]
        assert selector.items() <= leader.items()
        assert not selector.items() <= follower.items()


# --- what it may do ---


def test_engine_and_sidecar_are_one_user() -> None:
    each = pod({})
    users = {(each["spec"]["securityContext"] | c["securityContext"])["runAsUser"] for c in containers(each)}
    assert users == {each["spec"]["securityContext"]["fsGroup"]} == {65532}


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "b" * 64
    each = pod({"sidecar": {"image": {"tag": "1.2.3", "digest": digest}}, "engine": {"image": {"digest": digest}}})
    assert container(each, "highwater")["image"] == f"registry.example.org/hw@{digest}"
    assert container(each, "vllm")["image"] == f"vllm/vllm-openai@{digest}"

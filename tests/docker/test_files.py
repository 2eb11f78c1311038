"""What stands in docker/, held to the rules of the tools that read it: hadolint, Docker Compose, promtool."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docker.image import DOCKER, ROOT, ignore_lines, instructions

DOCKERFILES = sorted(DOCKER.glob("*Dockerfile"))
TOOLS = Path(sys.executable).parent
SECRETS = {"HIGHWATER_ADMIN_TOKEN": "secret-admin-token", "GRAFANA_ADMIN_PASSWORD": "secret", "MODELS": "/models"}
DEVICES = ("cpu", "nvidia", "ascend")


def said(path: Path, name: str) -> list[str]:
    return [value for instruction, value in instructions(path) if instruction == name]


# --- Dockerfiles ---


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path):
    told = subprocess.run([TOOLS / "hadolint", "--no-color", path], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")
    assert "hadolint ignore" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_base_is_an_argument(path):
    """So that a release names it by its digest."""
    bases = [value.split()[0] for value in said(path, "FROM")]
    arguments = {value.partition("=")[0] for value in said(path, "ARG")}
    assert all(base == "scratch" or base.strip("${}") in arguments for base in bases)


@pytest.mark.parametrize("name", ["Dockerfile", "extension.Dockerfile"])
def test_users_are_numbers(name):
    """Kubernetes cannot tell from a name whether it is root's. In vLLM's image the user is its own."""
    assert {user.split(":")[0].isdigit() and user != "0:0" for user in said(DOCKER / name, "USER")} == {True}


def test_vllm_listens_for_its_neighbour_alone():
    path = DOCKER / "vllm.Dockerfile"
    (entrypoint,), (environ,) = said(path, "ENTRYPOINT"), said(path, "ENV")
    words = json.loads(entrypoint)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "--worker-extension-cls" not in words
    assert "PYTHONPATH=/opt/highwater${PYTHONPATH:+:${PYTHONPATH}}" in environ
    assert "VLLM_SERVER_DEV_MODE=1" in environ


def test_the_extensions_image_holds_files_alone():
    """The image is built from scratch: an image volume mounts it, and it cannot be started."""
    steps = instructions(DOCKER / "extension.Dockerfile")
    last = steps[max(at for at, (name, _) in enumerate(steps) if name == "FROM") :]
    assert last[0] == ("FROM", "scratch")
    assert [value for name, value in last if name == "COPY"] == [
        "LICENSE /licenses/LICENSE",
        "--from=build /opt/extension/ /",
    ]
    assert not {"ENTRYPOINT", "CMD", "RUN"} & {name for name, _ in last}


def test_what_is_copied_is_let_in():
    let_in = [line.removeprefix("!") for line in ignore_lines() if line.startswith("!")]
    sources = {
        source
        for path in DOCKERFILES
        for value in said(path, "COPY")
        if not value.startswith("--from")
        for source in value.split()[:-1]
    }
    assert ignore_lines()[0] == "*"
    assert {
        source
        for source in sources
        if not any(place.match(pattern) for pattern in let_in for place in (Path(source), *Path(source).parents))
    } == set()
    assert {name for name in let_in if name.startswith((".git", ".env", "tests"))} == set()


# --- requirements ---


def pins(name: str) -> dict[str, Requirement]:
    text = (DOCKER / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition(" --hash")[0] for line in text.splitlines() if re.match(r"[a-z0-9]", line)]
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)}


@pytest.mark.parametrize("name", ["requirements.txt", "build-requirements.txt"])
def test_every_file_that_is_installed_is_known_by_its_hash(name):
    text = (DOCKER / name).read_text(encoding="utf-8")
    entries = [entry for entry in re.split(r"\n(?=[a-z0-9])", text) if re.match(r"[a-z0-9]", entry)]
    assert all(re.match(r"[\w.-]+==[\w.]+ ", entry) and "--hash=sha256:" in entry for entry in entries)
    assert "://" not in text


def test_the_pins_are_what_the_package_needs():
    pinned = pins("requirements.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    # Less what is built beside it: the worker extension, which has no dependencies.
    needed = [Requirement(line) for line in project["project"]["dependencies"] if "vllm-highwater-worker" not in line]
    seen: set[str] = set()
    while needed:
        one = needed.pop()
        name = canonicalize_name(one.name)
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        assert name in pinned, f"{one} is not in docker/requirements.txt: make requirements"
        (version,) = pinned[name].specifier
        assert one.specifier.contains(version.version, prereleases=True), f"{one}: make requirements"
        if name not in seen:
            seen.add(name)
            needed += map(Requirement, importlib.metadata.requires(name) or [])


def test_the_wheel_is_compiled_by_the_mypy_that_checks_its_types():
    build, run = pins("build-requirements.txt"), pins("requirements.txt")
    assert str(build["mypy"].specifier) == f"=={importlib.metadata.version('mypy')}"
    assert {name: build[name].specifier for name in build.keys() & run.keys()} == {
        name: run[name].specifier for name in build.keys() & run.keys()
    }


# --- compose ---


def compose(device: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    files = [DOCKER / "compose.yaml"] + ([] if device == "cpu" else [DOCKER / f"compose.{device}.yaml"])
    command = [TOOLS / "docker-compose", *(word for path in files for word in ("-f", path)), "config"]
    given = {"PATH": "/usr/bin:/bin", **(SECRETS if environ is None else environ)}
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", params=DEVICES)
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    """As Docker Compose itself understands the files."""
    told = compose(request.param)
    assert told.returncode == 0, told.stderr
    return yaml.safe_load(told.stdout)["services"]


def test_every_service_is_restricted(services):
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].split(":")[0] not in {"", "0", "root"}, name
        assert not service.get("privileged"), name


def test_the_engine_is_reached_through_the_sidecar_alone(services):
    assert services["engine"]["network_mode"] == services["sidecar"]["network_mode"] == "service:pod"
    assert not services["engine"].get("ports")
    published = [(port["target"], port["host_ip"]) for port in services["pod"]["ports"]]
    assert published == [(8001, "127.0.0.1"), (8002, "127.0.0.1")]
    assert services["sidecar"]["environment"]["HIGHWATER_ENGINE_URL"] == "http://127.0.0.1:8000"
    assert not any("--host" in str(word) for word in services["engine"]["command"])


def test_the_control_plane_is_for_this_machine_whatever_is_published():
    told = compose("cpu", SECRETS | {"HIGHWATER_LISTEN": "0.0.0.0"})
    services = yaml.safe_load(told.stdout)["services"]
    published = {port["target"]: port["host_ip"] for port in services["pod"]["ports"]}
    assert published == {8001: "0.0.0.0", 8002: "127.0.0.1"}
    assert services["sidecar"]["environment"]["HIGHWATER_CONTROL_PORT"] == "8002"


def test_prometheus_reaches_nothing_beyond(services):
    assert set(services["prometheus"]["networks"]) == {"watch"}
    assert not services["prometheus"].get("ports")
    assert [port["host_ip"] for port in services["grafana"]["ports"]] == ["127.0.0.1"]
    assert yaml.safe_load(compose("cpu").stdout)["networks"]["watch"]["internal"] is True


@pytest.mark.parametrize("missing", SECRETS)
def test_no_secret_has_a_default(missing):
    told = compose("cpu", {name: value for name, value in SECRETS.items() if name != missing})
    assert (told.returncode != 0, missing in told.stderr) == (True, True)


def test_a_device_decides_the_engines_base():
    engines = {name: yaml.safe_load(compose(name).stdout)["services"]["engine"] for name in DEVICES}
    bases = {name: engine["build"]["args"]["VLLM_IMAGE"] for name, engine in engines.items()}
    assert len(set(bases.values())) == len(DEVICES)
    assert engines["nvidia"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert "/dev/davinci_manager" in {device["source"] for device in engines["ascend"]["devices"]}


def test_workers_and_sidecar_share_their_folder(services):
    engine, sidecar = services["engine"], services["sidecar"]
    place = sidecar["environment"]["HIGHWATER_RECORDER_DIR"]
    assert engine["environment"]["HIGHWATER_RECORDER_DIR"] == place
    mounted = [{m["target"]: m["source"] for m in service["volumes"]} for service in (engine, sidecar)]
    assert mounted[0][place] == mounted[1][place] == "recorder"
    assert engine["user"] == sidecar["user"]


def test_what_is_mounted_is_there(services):
    for service in services.values():
        for mount in service.get("volumes", ()):
            if mount["type"] == "bind" and Path(mount["source"]).is_relative_to(ROOT):
                assert Path(mount["source"]).exists()
                assert mount["read_only"] is True


# --- Prometheus and Grafana ---


def test_promtool_accepts_the_scrape(services, tmp_path):
    rules = tmp_path / "rules"
    rules.symlink_to(ROOT / "helm" / "alerts")
    text = (DOCKER / "prometheus.yml").read_text(encoding="utf-8").replace("/etc/prometheus/rules", str(rules))
    (tmp_path / "prometheus.yml").write_text(text, encoding="utf-8")
    told = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "rules found" in told.stdout
    assert "rules" in {mount["target"].rpartition("/")[2] for mount in services["prometheus"]["volumes"]}


def test_grafana_finds_dashboards_and_prometheus(services):
    folder = DOCKER / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards/highwater.yaml").read_text(encoding="utf-8"))["providers"]
    (source,) = yaml.safe_load((folder / "datasources/highwater.yaml").read_text(encoding="utf-8"))["datasources"]
    assert provider["options"]["path"] in {mount["target"] for mount in services["grafana"]["volumes"]}
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)

"""docs/tested.toml is the one place that says what was run: chart, compose, pages and tests agree with it."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from highwater.terminal.demo.engine import DEFAULT_VERSION
from kvplan.generations import NEWEST_TESTED, text_of
from tests.helm.chart import CI_FILES, HELM, LEAST, ci_values, container, merged, pod, pods
from tests.tested import records, rows

ROOT = HELM.parent
TESTED = tomllib.loads((ROOT / "docs" / "tested.toml").read_text(encoding="utf-8"))
DEVICES = TESTED["device"]
IMAGES = {row["image"] for row in DEVICES.values() if row["image"]}
# Named as they are published, by a version.
NAMED = re.compile(r"(?:\w[\w.-]*/)*vllm(?:-openai(?:-\w+)?|-ascend|-cpu-release-repo):v?\d[\w.]*")


def pages() -> Iterator[Path]:
    for folder, pattern in (("docs", "*.md"), ("docker", "*"), ("helm", "*.md"), (".", "*.md")):
        yield from (path for path in (ROOT / folder).glob(pattern) if path.is_file() and path.name != "CHANGELOG.md")


@pytest.mark.parametrize("path", sorted(pages()), ids=lambda path: path.name)
def test_every_image_of_vllm_is_one_of_the_matrix(path: Path) -> None:
    assert set(NAMED.findall(path.read_text(encoding="utf-8"))) <= IMAGES


@pytest.mark.parametrize(
    ("kind", "file"), [("nvidia", "compose.nvidia"), ("ascend", "compose.ascend"), ("cpu", "compose")]
)
def test_compose_starts_what_the_matrix_has(kind: str, file: str) -> None:
    text = (ROOT / "docker" / f"{file}.yaml").read_text(encoding="utf-8")
    image = yaml.safe_load(text)["services"]["engine"]["build"]["args"]["VLLM_IMAGE"]
    assert image == f"${{VLLM_IMAGE:-{DEVICES[kind]['image']}}}"


def test_the_charts_default_is_the_matrixs() -> None:
    assert container(pod({}), "vllm")["image"] == DEVICES["nvidia"]["image"]
    for name in CI_FILES:
        kind = merged(LEAST, ci_values(name))["engine"]["device"]["kind"]
        found = {container(each, "vllm").get("image", "") for each in pods(ci_values(name))} - {""}
        assert {image.removeprefix("mirror.example.org:5000/") for image in found} <= {DEVICES[kind]["image"]}, name


@pytest.mark.parametrize("kind", [kind for kind in DEVICES if kind != "cpu"])
def test_the_chart_asks_for_the_resource_of_the_matrix(kind: str) -> None:
    values = {"engine": {"device": {"kind": kind}, "image": {"repository": "registry.example.org/vllm"}}}
    assert container(pod(values), "vllm")["resources"]["limits"] == {DEVICES[kind]["resource"]: 1}


def test_the_schema_knows_the_same_devices() -> None:
    schema = json.loads((HELM / "values.schema.json").read_text(encoding="utf-8"))
    known = schema["properties"]["engine"]["properties"]["device"]["properties"]["kind"]["enum"]
    assert set(known) == {"", *DEVICES}


def test_every_engine_has_the_record_of_a_test_that_ran_it() -> None:
    found = records()
    assert {one.engine for one in found} == set(rows())
    assert len(rows()) == len(set(rows()))
    for by in {one.by for one in found}:
        assert "confirm(Ran." in (ROOT / by).read_text(encoding="utf-8"), by


def test_the_versions_are_those_that_tests_start() -> None:
    first, *others = dict.fromkeys(version for version, _, device, _ in rows() if device == "cpu")
    assert first == DEFAULT_VERSION
    assert first == text_of(NEWEST_TESTED) == max([first, *others], key=Version)
    started = re.search(
        r"^VERSIONS = (.+)$", (ROOT / "tests/compat/conftest.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert started is not None
    assert set(others) == set(ast.literal_eval(started[1]))
    compared = json.loads((ROOT / "docs" / "compat.json").read_text(encoding="utf-8"))
    assert {record["version"] for record in compared} == set(others)


def test_what_never_ran_is_not_said_to_have_run() -> None:
    """docs/devices.md has the results of each device; vLLM itself ran on a CPU and on a simulated device alone."""
    text = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    for kind, name in (("nvidia", "NVIDIA"), ("ascend", "Ascend")):
        for said, ran in (("no step has run", "nothing"), ("not run on a device", "nothing on a device")):
            assert (f"**{name}: {said}.**" in text) is (DEVICES[kind]["ran"].partition(";")[0] == ran)
    assert {kind for kind, row in DEVICES.items() if not row["ran"].startswith("nothing")} == {"cpu", "nvidia"}
    assert text.count("Not run: engine.") == 1

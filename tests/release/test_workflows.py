"""The workflows of a CI that has not run here: linted, pinned, and with no more permissions than they use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from release.version import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
BIN = Path(sys.executable).parent
PUBLISHES = {"publish-image", "publish-chart", "publish-python"}


def jobs(path: Path) -> dict[str, dict]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def steps(path: Path) -> list[dict]:
    return [step for job in jobs(path).values() for step in job["steps"]]


@pytest.mark.parametrize(
    "judge",
    [["zizmor", "--offline", "--no-progress"], ["check-jsonschema", "--builtin-schema", "vendor.github-workflows"]],
    ids=["zizmor", "GitHub's schema"],
)
def test_who_judges_workflows_finds_nothing(judge):
    command = [str(BIN / judge[0]), *judge[1:], *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_script_is_one_that_bash_reads(path):
    for step in steps(path):
        script = re.sub(r"\$\{\{.*?\}\}", "x", step.get("run", "true"))
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (script, done.stderr)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_no_job_has_more_permissions_than_it_asks_for(path):
    assert yaml.safe_load(path.read_text())["permissions"] == {}
    for name, job in jobs(path).items():
        assert "permissions" in job, name
        assert job["permissions"].get("contents", "none") in {"none", "read"}, name


def test_only_jobs_that_a_maintainer_approves_publish():
    release = jobs(ROOT / ".github/workflows/release.yaml")
    waits = {name for name, job in release.items() if job.get("environment")}
    assert waits == PUBLISHES
    for name in PUBLISHES:
        assert "build" in release[name]["needs"], name
    publishing = ("gh-action-pypi-publish", "helm push", "imagetools create")
    found = {
        name for name, job in release.items() for step in job["steps"] if any(word in str(step) for word in publishing)
    }
    assert found == PUBLISHES


def test_the_image_is_made_for_both_architectures():
    """arm64 natively: Kunpeng and Grace."""
    matrix = jobs(ROOT / ".github/workflows/release.yaml")["image"]["strategy"]["matrix"]["include"]
    assert {row["arch"] for row in matrix} == {"amd64", "arm64"}
    assert all(row["runner"].endswith("-arm") == (row["arch"] == "arm64") for row in matrix)


def test_every_make_target_that_is_run_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS:
        text = path.read_text()
        assert set(re.findall(r"make ([a-z-]+)", text)) <= targets
        for job in jobs(path).values():
            assert set(job.get("strategy", {}).get("matrix", {}).get("task", ())) <= targets
        assert all((ROOT / "release" / f"{name}.py").is_file() for name in re.findall(r"-m release\.(\w+)", text))

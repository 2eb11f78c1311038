"""Long tests, by what they are about: which files make each topic's worth their minutes, and which are asked for.

A test marked `long("relief")` runs where its topic is asked for. `.ci/run` asks for a topic when one of its files
differs from what its long tests last passed with on this machine; `TEST_LONG` names topics by hand.

A topic's files are what it is about, the tests that carry its mark, and whatever these import at any depth. A test has
no import of a sidecar or an engine that it starts as a process: its topic names the part of them that it is about, and
what that part imports follows. What imports that part (a route, the wiring) is held by the HTTP tests and by
tests/engine/test_journey.py, which run in every check, and by the topic `beside`, which is about the whole sidecar.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.imports import imported_by

ROOT = Path(__file__).parents[1]
ASKED_FOR = "TEST_LONG"
"""Names topics, with commas between; `none`, or `all`, as where it is not set."""
_NOT_SOURCES = {".pyc", ".so"}
# They choose tests and decide nothing about one that runs.
_CHOOSING = {ROOT / "tests" / name for name in ("topics.py", "imports.py")}
_MARK = r"long\(\"(\w+)\"\)"


@dataclass(frozen=True)
class Topic:
    """Long tests that belong together."""

    what: str
    """In a few words, for the check's log."""
    about: tuple[str, ...]
    """Folders and files, from the root: a change there, or in what they import, may show in these tests only."""
    alone: tuple[str, ...] = ()
    """The same, where what they import is another topic's, or no matter of these tests."""


TOPICS: Mapping[str, Topic] = {
    "beside": Topic(
        "the sidecar, its terminal and its figures beside a real engine",
        ("app/highwater/main.py", "app/highwater/commands", "worker_ext/highwater_worker"),
    ),
    "worker": Topic(
        "the extension in torch's and vLLM's own classes, and two ranks in step",
        ("worker_ext/highwater_worker", "app/highwater/relief"),
    ),
    "recorder": Topic(
        "recorders of real engines: what is fresh, what hangs, what died, in a pod too",
        ("worker_ext/highwater_worker", "app/highwater/recorder", "app/highwater/memory", "app/highwater/host"),
        alone=("app/highwater/diagnose", "tests/pod"),
    ),
    "relief": Topic(
        "storms of 12 s beside each remedy, engines killed in each operation, two engines' recorders",
        ("worker_ext/highwater_worker", "app/highwater/relief", "app/highwater/policy", "app/gated_proxy"),
    ),
    "growth": Topic(
        "verdicts on the faults that a plugin puts into real engines",
        ("app/highwater/growth", "app/highwater/host"),
        alone=("app/highwater/memory", "app/highwater/recorder", "worker_ext/highwater_worker"),
    ),
    "watch": Topic(
        "engines of two workers and of two replicas that record themselves, engines that fail, two in one folder",
        (
            "worker_ext/highwater_worker/plugin.py",
            "app/highwater/files/worker_package.py",
            "app/highwater/engine/capabilities.py",
            "app/highwater/memory",
            "app/highwater/recorder",
        ),
    ),
    "clients": Topic(
        "the clients and scrapers that people use, before a real engine",
        ("app/gated_proxy",),
        alone=("app/highwater/api/metrics.py",),
    ),
    "shown": Topic(
        "the dashboard, every query of dashboards and alerts, and `highwater measure`, beside a real engine",
        ("app/highwater/dashboard", "app/highwater/measure", "helm/alerts", "helm/dashboards"),
        alone=("app/highwater/api", "app/highwater/commands/measure.py"),
    ),
    "vendor": Topic(
        "what we rely on in the source of vLLM, vllm-ascend and torch_npu, read in their packages",
        ("worker_ext/highwater_worker", "tests/vendor_claims.toml"),
        alone=("app/gated_proxy/allowlist.py", "tests/fakes/vllm_routes.json"),
    ),
    "proxy": Topic(
        "a minute of hostile clients beside ordinary ones",
        ("app/gated_proxy",),
        alone=("tests/security/soak",),
    ),
    "controls": Topic(
        "what the data plane is held to, tried directly, and on nginx and vllm-router",
        ("tests/faithful",),
    ),
    "policy": Topic(
        "every situation of docs/policy-situations.md",
        ("app/highwater/policy", "app/highwater/relief", "tests/situations"),
    ),
    "plan": Topic(
        "what `highwater plan` says, held to vLLM's own functions and to real starts",
        ("app/kvplan", "app/highwater/plan", "worker_ext/highwater_worker/plan"),
        alone=(
            *(f"app/highwater/commands/plan{part}.py" for part in ("", "_measured", "_text")),
            "app/highwater/api/budget.py",
        ),
    ),
    "device": Topic(
        "the kit for devices, each step on a CPU with real tensors, and on a simulated NPU under the real torch_npu",
        (
            *("worker_ext/highwater_worker", "bench/device", "bench/sidecar.py", "tests/fakes/cann"),
            *("tests/own_engine/test_device_kit.py", "tests/own_engine/test_simulated_npu.py"),
            *("tests/support/on_simulated_npu.py", "tests/own_engine/test_vllm_ascend.py"),
            *("tests/support/on_vllm_ascend.py", "tests/own_engine/test_vllm_ascend_server.py"),
            *("tests/own_engine/test_vllm_ascend_ranks.py", "tests/support/more_of_ascend"),
            *("tests/own_engine/test_vllm_ascend_older.py", "tests/support/older_ascend"),
        ),
    ),
    "chart": Topic(
        "a pod of the chart, as processes beside a real engine",
        ("helm/templates", "helm/files", "helm/ci", "helm/values.yaml"),
    ),
    "coverage": Topic(
        "`highwater serve` and its commands as processes; unit and HTTP tests traced, for the floor of branch coverage",
        about=(),
        alone=("app", "worker_ext", "tests/unit", "tests/http", "tests/fakes", "pyproject.toml"),
    ),
    "image": Topic(
        "the steps of the images, carried out and started",
        about=(),
        alone=(
            "docker",
            "tests/docker",
            "pyproject.toml",
            "worker_ext/pyproject.toml",
            "app/highwater/commands/server.py",
            "app/highwater/commands/healthcheck.py",
            ".dockerignore",
        ),
    ),
}


def asked_for() -> frozenset[str]:
    """Return the topics whose long tests run.

    Raises:
        ValueError: `TEST_LONG` names one that there is not.
    """
    named = os.environ.get(ASKED_FOR, "all")
    if named in ("all", "none"):
        return frozenset(TOPICS if named == "all" else ())
    topics = frozenset(named.split(","))
    if unknown := topics - set(TOPICS):
        raise ValueError(
            f"{ASKED_FOR}={named}: there is no topic {', '.join(sorted(unknown))}; "
            f"there are {', '.join(TOPICS)}, and all and none"
        )
    return topics


def digests(topic: str, root: Path = ROOT) -> dict[str, str]:
    """Return the topic's files with what is in them, as digests."""
    about = [path for name in TOPICS[topic].about for path in _files(root / name)]
    alone = [path for name in TOPICS[topic].alone for path in _files(root / name)]
    files = {*about, *alone, *imported_by([*about, *marked(topic, root)], root)} - _CHOOSING
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(files)}


def marked(topic: str, root: Path = ROOT) -> list[Path]:
    """Return the test files of a topic: those that name it in a mark."""
    files = (root / "tests").rglob("*.py")
    return [path for path in files if topic in re.findall(_MARK, path.read_text())]


def _files(place: Path) -> Iterator[Path]:
    found = sorted(place.rglob("*")) if place.is_dir() else [place]
    return (path for path in found if path.is_file() and path.suffix not in _NOT_SOURCES)

"""Long tests, by what they are about: which files make each topic's worth their minutes, and which are asked for.

A test marked `long("relief")` runs where its topic is asked for. `.ci/run` asks for a topic when one of its files
differs from what its long tests last passed with on this machine; `TEST_LONG` names topics by hand.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASKED_FOR = "TEST_LONG"
"""Names topics, with commas between; `none`, or `all`, as where it is not set."""
_NOT_SOURCES = {".pyc", ".so"}


@dataclass(frozen=True)
class Topic:
    """Long tests that belong together."""

    what: str
    """In a few words, for the check's log."""
    files: tuple[str, ...]
    """Folders and files, from the root: a change in one of them may show in these tests only."""


TOPICS: Mapping[str, Topic] = {
    "relief": Topic(
        "storms of 12 s beside each remedy, engines killed in each operation, two engines' recorders",
        (
            "worker_ext/highwater_worker",
            "app/highwater/relief",
            "app/highwater/memory/sources",
            "app/highwater/policy",
            "app/highwater/proxy",
            "app/highwater/recorder/recorders.py",
            "app/highwater/recorder/progress.py",
            "app/highwater/engine/client.py",
            "app/highwater/demo",
            "tests/engine",
        ),
    ),
    "proxy": Topic(
        "a minute of hostile clients beside ordinary ones",
        (
            "app/highwater/proxy",
            "bench/soak",
            "tests/security/test_soak.py",
        ),
    ),
    "watch": Topic(
        "engines of two workers and of two replicas that record themselves, engines that fail, two in one folder",
        (
            "worker_ext/highwater_worker/plugin.py",
            "worker_ext/highwater_worker/memory/start_phases.py",
            "worker_ext/highwater_worker/identity.py",
            "worker_ext/highwater_worker/recorder",
            "app/highwater/files/worker_package.py",
            "app/highwater/engine/capabilities.py",
            "app/highwater/memory",
            "app/highwater/recorder",
            "tests/engine/test_watch_topologies.py",
        ),
    ),
    "controls": Topic("what the data plane is held to, tried on nginx and vllm-router", ("tests/faithful",)),
    "policy": Topic(
        "every situation of docs/policy-situations.md",
        (
            "app/highwater/policy",
            "app/highwater/relief",
            "bench/situations",
            "tests/situations",
        ),
    ),
    "device": Topic(
        "the kit for devices, each step on a CPU with real tensors",
        ("worker_ext/highwater_worker", "bench/device", "bench/sidecar.py", "tests/engine/test_device_kit.py"),
    ),
    "chart": Topic(
        "a pod of the chart, as processes beside a real engine",
        ("helm/templates", "helm/files", "helm/ci", "helm/values.yaml", "tests/engine/test_chart_real.py"),
    ),
    "coverage": Topic(
        "no tests, but unit and HTTP tests traced: twice their work, for the floor of branch coverage",
        ("app", "worker_ext", "tests/unit", "tests/http", "tests/fakes", "pyproject.toml"),
    ),
    "image": Topic(
        "the steps of the images, carried out and started",
        (
            "docker",
            "pyproject.toml",
            "worker_ext/pyproject.toml",
            "tests/docker",
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


def digests(topic: Topic, root: Path = ROOT) -> dict[str, str]:
    """Return the topic's files with what is in them, as digests."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for name in topic.files
        for path in _files(root / name)
    }


def _files(place: Path) -> Iterator[Path]:
    found = sorted(place.rglob("*")) if place.is_dir() else [place]
    return (path for path in found if path.is_file() and path.suffix not in _NOT_SOURCES)

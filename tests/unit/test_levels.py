"""Imports go one way, down the levels drawn in docs/architecture.md, and each library has one door."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom. A unit (a module, or a folder with all that is in it) imports from rows below its own, or within its
# own folder. The comments are the levels of the drawing; a level has two rows where one of its units uses another.
ROWS: tuple[tuple[str, ...], ...] = (
    # L0: the words
    (
        "app",
        "app.allocator",
        "app.components",
        "app.descriptors",
        "app.errors",
        "app.files",
        "app.internal_errors",
        "app.limited_log",
        "app.plain",
        "app.printable",
        "app.private_file",
        "app.readings",
        "app.units",
    ),
    ("app.admin_token", "app.tls"),  # L1: pure cores; the words said to vLLM
    ("app.allowlist", "app.attribution", "app.capabilities", "app.engine", "app.sidecar_client"),
    ("app.freed", "app.movement", "app.outlook", "app.points"),
    ("app.policy", "app.sidecar_answers", "app.table", "app.traffic", "app.verdict"),
    ("app.policy_settings", "app.sources", "app.state_file"),  # L2: many of one kind, and settings
    ("app.access_log", "app.findings"),
    ("app.incidents", "app.policy_store", "app.remedies", "app.settings"),
    # L3: loops, data plane
    (
        "app.exporter",
        "app.flight",
        "app.hints",
        "app.gate",
        "app.history",
        "app.life",
        "app.ranks",
        "app.settings_sources",
    ),
    ("app.oom_kills", "app.shared_devices"),
    ("app.incident_watcher", "app.poller", "app.proxy"),
    ("app.relief", "app.snapshots"),
    ("app.governor",),
    ("app.routes",),  # L4: the HTTP face
    ("app.main",),  # L5: wires
    ("app.demo", "app.sidecar_options"),  # L6: what people start
    ("app.experiment", "app.healthcheck", "app.incidents_command", "app.terminal"),
    ("app.server",),
    ("app.cli",),
)
LEVEL = {unit: level for level, row in enumerate(ROWS) for unit in row}
FOLDERS = (
    "app.policy",
    "app.findings",
    "app.incidents",
    "app.proxy",
    "app.relief",
    "app.remedies",
    "app.sources",
    "app.routes",
    "app.demo",
    "app.terminal",
    "app.experiment",
)

# Who may import a library. More doors need a reason here.
DOORS = {
    # The last two: the demonstration is an operator, and clients.
    "httpx": {"app.engine", "app.main", "app.demo.sidecar", "app.demo.traffic", "app.sidecar_client"},
    "httpx_sse": {"app.sidecar_client"},
    "httptools": {"app.proxy"},
    "prometheus_client": {"app.exporter", "app.traffic", "app.sources.engine_metrics"},  # write, write, reads
    "fastapi": {"app.main", "app.routes"},
    "yaml": {"app.settings_sources"},
    "click": {
        *("app.cli", "app.demo", "app.experiment", "app.healthcheck", "app.incidents_command", "app.sidecar_options"),
        "app.terminal",
    },
    "markdown_it": {"app.findings.markdown", "app.routes.runbooks"},
    "uvicorn": {"app.server", "app.proxy.sidecar", "app.proxy.client"},
    "packaging": {"app.capabilities", "app.demo"},
    "tabulate": {"app.table", "app.findings.markdown"},
    "tenacity": {"app.engine", "app.relief", "app.remedies"},
}


@cache
def modules(package: str) -> dict[str, Path]:
    paths = sorted((ROOT / package).rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imports(module: str, *, top_level_only: bool = False) -> Iterator[str]:
    """Every module that it imports, wherever the import stands, TYPE_CHECKING blocks included."""
    known = modules(module.partition(".")[0])
    tree = ast.parse(known[module].read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the direction"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)


def unit(module: str) -> str:
    return next((folder for folder in FOLDERS if module == folder or module.startswith(f"{folder}.")), module)


@pytest.mark.parametrize("module", modules("app"))
def test_every_module_has_a_level(module):
    """A new module is placed in ROWS by whoever adds it, and nowhere twice."""
    placed = [u for row in ROWS for u in row if u == unit(module)]
    assert placed == [unit(module)]


def test_no_level_names_what_is_gone():
    """ROWS and DOORS name only what there is."""
    assert set(LEVEL) == {unit(module) for module in modules("app")}
    there = set(modules("app"))
    assert {door for doors in DOORS.values() for door in doors} <= there


@pytest.mark.parametrize("module", modules("app"))
def test_imports_go_down_only(module):
    """A module imports from lower rows, or within its own folder."""
    for imported in imports(module):
        if imported.partition(".")[0] != "app":
            continue
        same_folder = unit(imported) == unit(module) and unit(module) in FOLDERS
        assert same_folder or LEVEL[unit(imported)] < LEVEL[unit(module)], f"{module} imports {imported}"


def test_no_import_cycle():
    """Also within a folder, every module can be imported first."""
    graph = {name: {other for other in imports(name) if other in modules("app")} for name in modules("app")}
    assert set(TopologicalSorter(graph).static_order()) == set(modules("app"))


@pytest.mark.parametrize("library", DOORS)
def test_each_library_has_its_doors(library):
    """A foreign library is met where it is named here, and nowhere else."""
    users = {m for m in modules("app") if any(name.partition(".")[0] == library for name in imports(m))}
    assert users, f"nobody imports {library} any more"
    assert {m for m in users if m not in DOORS[library] and unit(m) not in DOORS[library]} == set()


def test_only_the_wiring_knows_settings():
    """Everyone else is handed the values that they need."""
    users = {m for m in modules("app") if "app.settings" in imports(m)}
    assert users == {"app.cli", "app.main", "app.settings_sources"}


def test_only_main_knows_everybody():
    """Nobody but those who start it imports the wiring."""
    assert {m for m in modules("app") if "app.main" in imports(m)} == {"app.cli", "app.server"}


@pytest.mark.parametrize(
    "module",
    ["app.policy", "app.attribution", "app.readings", "app.allowlist", "app.freed", "app.movement", "app.verdict"],
)
def test_the_pure_core_has_no_clock_and_no_io(module):
    """Readings and a time go in, a decision comes out."""
    impure = {"time", "asyncio", "logging", "os", "socket", "pathlib", "datetime", "random"}
    assert impure.isdisjoint(imports(module))


def test_sidecar_and_workers_share_no_code():
    """They share a wire contract only."""
    crossing = [m for m in modules("app") if any(name.partition(".")[0] == "worker_ext" for name in imports(m))]
    crossing += [m for m in modules("worker_ext") if any(name.partition(".")[0] == "app" for name in imports(m))]
    assert crossing == []


@pytest.mark.parametrize("module", modules("worker_ext"))
def test_the_worker_extension_needs_only_what_the_engine_has(module):
    """The standard library at import; torch and vllm not before a call."""
    allowed = sys.stdlib_module_names | {"worker_ext"}
    assert {name.partition(".")[0] for name in imports(module, top_level_only=True)} <= allowed
    assert {name.partition(".")[0] for name in imports(module)} <= allowed | {"torch", "torch_npu", "vllm"}

"""docs/architecture.md draws the tree that there is: each module lies in a drawn place, each step names a function."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE_ROOTS = ("app", "worker_ext")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


JOURNEYS = ("One poll", "One relief", "One proxied request", "One incident")
# A file, and then what is defined in it.
STEPS = [
    (file, name) for title in JOURNEYS for file, name in re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", section(title))
]
LAYERS = [row for row in section("Layers").splitlines() if row.startswith("|")]
DRAWN = [path for row in LAYERS for path in re.findall(r"`([\w/]+(?:\.py|/))`", row.split("|")[2])]
MODULES = [
    str(path.relative_to(ROOT))
    for root in SOURCE_ROOTS
    for path in sorted((ROOT / root).rglob("*.py"))
    if path.name != "__init__.py"
]


@cache
def defined(file: str) -> frozenset[str]:
    """Return what a module defines at its top, and the methods of its classes as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return frozenset(names)


@pytest.mark.parametrize(("file", "name"), sorted(set(STEPS)))
def test_a_step_names_a_function_that_there_is(file: str, name: str):
    assert name in defined(file)


@pytest.mark.parametrize("title", JOURNEYS)
def test_every_step_of_a_journey_says_where_it_happens(title: str):
    """Numbered from 1, without a gap, each with a file and a function."""
    steps = re.split(r"^(\d+)\. ", section(title), flags=re.MULTILINE)[1:]
    assert [int(number) for number in steps[::2]] == list(range(1, len(steps) // 2 + 1))
    assert len(steps) // 2 >= 6
    assert [text for text in steps[1::2] if not re.search(r"`[\w/]+\.py`\s+`[\w.]+`", text)] == []


def test_the_drawing_names_only_what_there_is():
    assert [path for path in DRAWN if not (ROOT / path).exists()] == []


def test_the_rows_have_the_order_that_imports_have():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers: list[str] = next(one["layers"] for one in contracts if one.get("containers") == ["highwater"])
    level = {name.strip(" ()"): place for place, layer in enumerate(layers) for name in layer.split("|")}
    rows = [re.findall(r"`app/highwater/(\w+)", row.split("|")[2]) for row in LAYERS]
    places = [[level[name] for name in names if name in level] for names in rows]
    drawn = [place for row in places if row for place in (min(row), max(row))]
    assert drawn == sorted(drawn)
    assert sorted({place for row in places for place in row}) == list(range(len(layers)))


def test_every_module_is_drawn_once():
    def places(module: str) -> int:
        return sum(module == path or (path.endswith("/") and module.startswith(path)) for path in DRAWN)

    assert {module: count for module in MODULES if (count := places(module)) != 1} == {}


def test_every_module_of_a_plan_has_its_place_in_the_table():
    folders = (ROOT / "app" / "kvplan", ROOT / "app" / "highwater" / "explain")
    cells = [row.split("|")[2] for row in section("Planning").splitlines() if row.startswith("| ")]
    listed = [path for cell in cells for path in re.findall(r"`([\w/]+\.py)`", cell)]
    files = (path for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py")
    there = [path.name if path.parent.name != "builtin" else f"builtin/{path.name}" for path in files]
    assert sorted(listed) == sorted(there)


def test_no_file_is_named_that_is_not_there():
    named = re.findall(r"`((?:app|highwater_worker|tests|bench)/[\w/]+(?:\.py)?/?)`", PAGE)
    assert [path for path in named if not (ROOT / path).exists()] == []

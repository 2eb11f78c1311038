"""The routes of vLLM's API server: read from its source, and as recorded from the versions that were published.

`python -m tests.fakes.vllm_routes VERSION=FOLDER ...` records them anew, each folder holding one version's `vllm`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

_RECORD = Path(__file__).with_suffix(".json")
_METHODS = frozenset({"get", "post", "put", "delete", "patch", "head", "options", "websocket"})
_ADDED = frozenset({"add_api_route", "api_route"})


def recorded() -> dict[str, str]:
    """`METHOD /path` of each route, with the first and the last recorded version that has it."""
    return dict(json.loads(_RECORD.read_text(encoding="utf-8"))["routes"])


def routes_in(package: Path) -> set[str]:
    """`METHOD /path` of every route that a `vllm` package's source declares; `MOUNT` where it mounts an application."""
    found: set[str] = set()
    for file in sorted((package / "entrypoints").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found.update(route for node in ast.walk(tree) if isinstance(node, ast.Call) for route in _declared(node))
    return found


def _declared(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    path = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if not isinstance(path, str) or not path.startswith("/"):
        return
    if name in ("mount", "Mount"):
        yield f"MOUNT {path}"
    elif name in _METHODS:
        yield f"{name.upper()} {path}"
    elif name in _ADDED:
        (methods,) = (keyword.value for keyword in call.keywords if keyword.arg == "methods")
        yield from (f"{method} {path}" for method in ast.literal_eval(methods))


def _record(versions: dict[str, Path]) -> None:
    seen: dict[str, list[str]] = {}
    for version, package in versions.items():
        for route in routes_in(package):
            seen.setdefault(route, [version, version])[1] = version
    routes = {route: " to ".join(between) for route, between in sorted(seen.items())}
    _RECORD.write_text(json.dumps({"versions": list(versions), "routes": routes}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _record({version: Path(folder) for version, _, folder in (word.partition("=") for word in sys.argv[1:])})

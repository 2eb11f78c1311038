"""Every exit code has one name and a row in the documentation, and commands end by these names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from highwater import exit_codes
from highwater.exit_codes import MEANINGS

APP = Path(__file__).resolve().parents[2] / "app" / "highwater"
COMMANDS = [
    APP / "cli.py",
    *(path for folder in ("client", "commands") for path in sorted((APP / folder).rglob("*.py"))),
]
ENDINGS = {"exit", "Exit", "SystemExit"}


def numbers(value: ast.expr) -> Iterator[int]:
    """Yield the numbers that a value may be, or is computed from."""
    match value:
        case ast.Constant(value=int() as number):
            yield number
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
            yield from (*numbers(one), *numbers(other))


def bare_codes(source: str) -> Iterator[str]:
    """Yield the calls that end a command with a number instead of a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if name in ENDINGS and any(list(numbers(arg)) for arg in node.args):
                yield ast.unparse(node)


def test_the_documentation_has_every_code():
    named = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    listed = [code for codes, _ in MEANINGS for code in codes]
    assert listed == sorted(named)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.relative_to(APP).as_posix())
def test_a_command_ends_by_name(path: Path):
    assert list(bare_codes(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "call",
    [
        "sys.exit(1)",
        "SystemExit(2)",
        "click.exceptions.Exit(1)",
        "sys.exit(128 + number)",
        "sys.exit(0 if fits else FAILED)",
    ],
)
def test_a_bare_number_is_found(call: str):
    assert list(bare_codes(call)) == [call]

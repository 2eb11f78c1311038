"""The code blocks of a page, in the order in which a reader meets them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"(?:^Save as `([^`]+)`[^\n]*:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^## (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: What stands behind the fence; `sh` is to be run.
        text: Its lines.
        section: The page's second-level title above it; empty before the first.
        file: The file that it is, by the line above it, "Save as `NAME`:"; None for what is no file.
    """

    language: str
    text: str
    section: str
    file: str | None


def blocks(page: str, section: str | None = None) -> list[Block]:
    """Return the blocks of a page under docs/, or of one of its sections."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    titles = [(found.start(), found[1]) for found in _TITLE.finditer(text)]
    found = []
    for fenced in _FENCED.finditer(text):
        above = [title for start, title in titles if start < fenced.start()]
        found.append(Block(fenced[2], fenced[3], above[-1] if above else "", fenced[1]))
    wanted = [block for block in found if section in (None, block.section)]
    if not wanted:
        raise LookupError(f"docs/{page} has no code in its section {section!r}")
    return wanted


def commands(page: str, section: str | None = None, *, having: str = "") -> list[str]:
    """Return the blocks of commands that have this in them."""
    return [block.text for block in blocks(page, section) if block.language == "sh" and having in block.text]


def write_files(found: list[Block], folder: Path) -> None:
    """Write what a reader writes: each block that names a file."""
    for block in found:
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")

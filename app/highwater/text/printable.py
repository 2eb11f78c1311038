"""Foreign text as a terminal may show it: nothing in it that the terminal would obey."""

from __future__ import annotations


def printable(text: str, *, instead: str = "", keep: str = "") -> str:
    """The text without control characters and halves of characters.

    Args:
        text: Whoever wrote it.
        instead: What stands in the place of each.
        keep: Characters that stay though they are none to print, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else instead for letter in text)


def one_line(text: str) -> str:
    """The same on one line."""
    return printable(" ".join(text.split()))

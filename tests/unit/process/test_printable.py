"""Foreign text at a terminal."""

from __future__ import annotations

from highwater.process.untrusted import cleaned, plain, printable

HOSTILE = "a\x1b[2Jb\nc\ud800d\u202ee"


def test_nothing_that_a_terminal_obeys_is_left():
    assert printable(HOSTILE) == "a[2Jbcde"
    assert printable(HOSTILE, instead="?") == "a?[2Jb?c?d?e"
    assert printable(HOSTILE, keep="\n") == "a[2Jb\ncde"


def test_a_line_is_one_line():
    assert plain("a\r\nb\t\x1b[31mc") == "a  b c"
    assert plain("abcdef", 4) == "abc…"


def test_the_texts_of_a_value_are_cut_to_the_length_that_was_asked_for():
    """At every depth: a paragraph to paste is longer than a line of a table."""
    long = {"explanation": {"paragraph": "word " * 400, "lines": ["word " * 400]}}
    assert cleaned(long, most=5000) == {
        "explanation": {"paragraph": ("word " * 400).strip(), "lines": (("word " * 400).strip(),)}
    }
    assert len(cleaned(long)["explanation"]["paragraph"]) == 500

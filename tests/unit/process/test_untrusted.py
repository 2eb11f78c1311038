"""What comes from outside: shown as plain text, taken as JSON, refused without a secret."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from highwater.process.untrusted import cleaned, masked, parse_json, plain, printable, sentences

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


# --- JSON as the standard has it, and nothing else raises anything but a ValueError ---


def test_json_is_parsed():
    assert parse_json(' {"a": [1, 2.5, null]} ') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": -Infinity}', "[" * 100_000])
def test_what_is_not_json_is_refused(text: str):
    with pytest.raises(ValueError, match=r"JSON|nested|Expecting"):
        parse_json(text)


# --- an error shows enough of a refused value to find it, and no credentials ---


MIB = 1024 * 1024


class Limits(BaseModel):
    """A model with a key that is a number."""

    limit: int


def refusal(value: object) -> str:
    """The sentence about a value that is no number."""
    with pytest.raises(ValidationError) as caught:
        Limits.model_validate({"limit": value})
    return "\n".join(sentences(caught.value.errors()))


@pytest.mark.parametrize(
    "text",
    [
        "http://user:s3cret@host",
        "user:s3cret@host:80",
        "user%3As3cret%40host",
        "http%3A%2F%2Fuser%3As3cret%2540host",
        "user%253As3cret%252540host",
        "user\uff1as3cret\uff20host",
        "user:s3cret\ufe6bhost",
        "https://host/path?token=s3cret",
        "https://host/#s3cret",
        "http://host/?next=http://user:s3cret@other",
        "http://host/?password=p@s3cret",
        "http://user:s3cret?word@host",
    ],
)
def test_credentials_are_not_shown_however_they_are_written(text):
    assert "s3cret" not in masked(text)
    for value in (text, [text], {"url": text}, {text: 1}):
        assert "s3cret" not in refusal(value)
        assert refusal(value).startswith("limit: ")


@pytest.mark.parametrize("text", ["12:30", "::1", "[fd00::1]:8000", "a@b.c", "git@github.com:org", "/a/b?c", "80%", ""])
def test_what_holds_none_is_shown_as_it_is(text):
    assert masked(text) == text


def test_a_value_that_is_no_text_is_shown_as_python_writes_it():
    assert "limit: [1, 2] " in refusal([1, 2])
    assert refusal(["x://u:p@h"]) == "limit: must be a whole number"


class Own(BaseModel):
    """A key of each kind."""

    model_config = {"extra": "forbid"}
    count: int = Field(1, ge=1, le=10)
    mode: Literal["act", "observe"] = "act"
    name: str = Field("a", min_length=1, pattern="^a")
    rules: tuple[int, ...] = ()
    is_on: bool = True
    ratio: float = 0.5
    section: dict[str, int] = {}
    folder: Path = Path()

    @field_validator("ratio")
    @classmethod
    def _share(cls, value: float) -> float:
        if value > 1:
            raise ValueError("must be a share, such as 0.5")
        return value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": 99}, "count: 99 must be less than or equal to 10"),
        ({"count": "x"}, "count: 'x' must be a whole number"),
        ({"mode": "off"}, "mode: 'off' must be 'act' or 'observe'"),
        ({"name": ""}, "name: '' must have at least 1 character"),
        ({"name": "b"}, "name: 'b' must match pattern '^a'"),
        ({"rules": 1}, "rules: 1 must be a JSON list"),
        ({"is_on": "maybe"}, "is_on: 'maybe' must be true or false"),
        ({"ratio": "half"}, "ratio: 'half' must be a number"),
        ({"ratio": 2.5}, "ratio: 2.5 must be a share, such as 0.5"),
        ({"section": 1}, "section: 1 must be a JSON object"),
        ({"folder": 1}, "folder: 1 must be a path"),
        ({"colour": "red"}, "colour: there is no such key"),
    ],
)
def test_each_is_said_in_our_own_words(given, said):
    with pytest.raises(ValidationError) as caught:
        Own.model_validate(given)
    assert list(sentences(caught.value.errors())) == [said]


@pytest.mark.parametrize(
    "text",
    [":" * MIB, ":%4" * MIB, "%25" * MIB, "@" * MIB, "://?" * MIB],
    ids=["colons", "broken escapes", "escaped percents", "ats", "queries"],
)
def test_a_long_value_costs_no_more_than_its_length(text):
    """Anybody may send one, and streams pass on the same loop: a quadratic search would take hours."""
    before = time.process_time()
    masked(text)
    refusal(text)
    assert time.process_time() - before < 5  # by the clock: of this process's own time; the search takes 0.1 s


def test_a_deeply_nested_value_is_refused_as_any_other():
    nested: object = "x"
    for _ in range(900):
        nested = [nested]
    assert refusal(nested) == "limit: must be a whole number"

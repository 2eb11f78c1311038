"""A settings file is read with bounds, and never with a doubt about what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from highwater.process.errors import SettingsError
from highwater.process.settings_file import MAX_BYTES, parse_yaml, read_settings_file

TOKEN = "hunter2hunter2"


def problem(path) -> str:
    with pytest.raises(SettingsError) as caught:
        read_settings_file(str(path))
    (said,) = caught.value.problems
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nhost: a\nport: 2\n", "port: is given twice, on line 1 and on line 3"),
        ("policy:\n  mode: act\n  mode: observe\n", "mode: is given twice, on line 2 and on line 3"),
        ('{"port": 1, "port": 2}', "port: is given twice, on line 1 and on line 1"),
    ],
)
def test_a_yaml_key_that_is_given_twice_is_refused_with_both_lines(tmp_path, text, words):
    """The parser itself would let the last one win without a word."""
    (tmp_path / "a.yaml").write_text(text)
    assert words in problem(tmp_path / "a.yaml")


@pytest.mark.parametrize(("text", "key"), [("1: x\n", "1"), ("null: x\n", "null"), ("2026-01-01: x\n", "2026-01-01")])
def test_a_yaml_key_that_is_no_text_is_refused_by_its_name(tmp_path, text, key):
    """Nothing else could take it: a setting has a name."""
    (tmp_path / "a.yaml").write_text(text)
    assert f"a.yaml: {key}: there is no such key" in problem(tmp_path / "a.yaml")


def test_a_toml_key_that_is_given_twice_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text("port = 1\nport = 2\n")
    assert "line 2" in problem(tmp_path / "a.toml")


def test_what_is_merged_in_may_be_given_again():
    assert parse_yaml("a: &x {port: 1}\nb: {<<: *x, port: 2}\n") == {"a": {"port": 1}, "b": {"port": 2}}


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a pipe or a device"),  # to open it would wait for a writer
        (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
        (Path.mkdir, "a folder"),
    ],
)
def test_what_is_no_file_is_refused_by_its_kind(tmp_path, make, kind):
    path = tmp_path / "a.yaml"
    make(path)
    assert problem(path) == f"config: {path}: must be a regular file, and is {kind}"


def test_a_huge_file_is_refused(tmp_path):
    with (tmp_path / "a.yaml").open("wb") as file:
        file.truncate(50 * MAX_BYTES)
    assert f"has over {MAX_BYTES:,} bytes" in problem(tmp_path / "a.yaml")


def test_a_link_to_a_file_is_followed(tmp_path):
    (tmp_path / "real").write_text("port: 9001\n")
    (tmp_path / "a.yaml").symlink_to(tmp_path / "real")
    assert read_settings_file(str(tmp_path / "a.yaml")) == {"port": 9001}


@pytest.mark.parametrize(
    "text",
    [
        f"admin_token: '{TOKEN}",
        f"admin_token: {TOKEN}: x",
        f"a: !!python/object {TOKEN}",
        "a: " + "[" * 5000,
        "a: 2001-99-99",
    ],
)
def test_what_is_no_yaml_is_one_line_without_what_stands_there(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    assert TOKEN not in problem(tmp_path / "a.yaml")


def test_what_is_no_yaml_is_told_with_what_the_parser_expected(tmp_path):
    (tmp_path / "a.yaml").write_text(f"proxy: [a, b\nport: {TOKEN}\n")
    assert problem(tmp_path / "a.yaml").endswith("a.yaml: expected ',' or ']', but got ':' (line 2, column 5)")


def test_an_empty_file_sets_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert read_settings_file(str(tmp_path / "a.yaml")) == {}

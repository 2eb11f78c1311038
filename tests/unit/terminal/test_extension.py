"""``highwater extension`` copies the worker package, and says how an engine is watched with it."""

from __future__ import annotations

from click.testing import CliRunner, Result

from highwater import __version__
from highwater.terminal import cli


def copy_to(folder: object) -> Result:
    return CliRunner().invoke(cli.main, ["extension", "--copy-to", str(folder)])


def test_it_says_what_to_start_an_engine_with(tmp_path):
    result = copy_to(tmp_path / "copy")
    assert result.exit_code == 0, result.output
    assert f"vllm-highwater-worker {__version__} is in {tmp_path}/copy" in result.output
    assert f"PYTHONPATH={tmp_path}/copy HIGHWATER_RECORDER_DIR=/dev/shm/highwater vllm serve" in result.output
    assert "--recorder-dir /dev/shm/highwater" in result.output


def test_again_is_as_good(tmp_path):
    """An init container may run twice."""
    copy_to(tmp_path)
    result = copy_to(tmp_path)
    assert (result.exit_code, "is already in" in result.output) == (0, True)


def test_what_is_refused_fails_in_one_sentence(tmp_path):
    (tmp_path / "theirs").mkdir()
    result = copy_to(tmp_path)
    assert result.exit_code == 1
    said = f"highwater: {tmp_path} holds theirs, which `highwater extension` did not write; name"
    assert result.stderr.startswith(said)


def test_the_folder_must_be_named():
    result = CliRunner().invoke(cli.main, ["extension"])
    assert (result.exit_code, "--copy-to" in result.stderr) == (2, True)

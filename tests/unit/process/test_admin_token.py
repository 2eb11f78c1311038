"""The admin token: where it comes from, when it changes, and who finds it."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from highwater.process import admin_token
from highwater.process.admin_token import (
    LOOK_SECONDS,
    AdminToken,
    TokenUnusable,
    default_token_file,
    find_token,
    is_strong_enough,
    read_token,
)
from tests.fakes.clock import FakeClock
from tests.fakes.raising import raising

TOKEN, OTHER = "correct-horse-battery", "staple-battery-horse"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "highwater" / "8001.token"


def written(path: Path, token: str = TOKEN, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{token}\n")
    path.chmod(mode)
    return path


# --- in the sidecar ---


def test_a_token_that_was_set_is_the_token():
    token = AdminToken(TOKEN, None)
    token.start()
    assert (token.current(), token.current(), token.problem) == (TOKEN, TOKEN, None)


def test_a_missing_file_is_made_for_its_owner_alone(path, clock, caplog):
    caplog.set_level(logging.INFO)
    token = AdminToken(None, path, clock=clock)
    token.start()
    made = token.current()
    assert made is not None
    assert (len(made) >= 43, is_strong_enough(made), read_token(path)) == (True, True, made)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]
    assert (str(path) in caplog.text, made in caplog.text) == (True, False)
    path.unlink()
    other = AdminToken(None, path, clock=clock)
    other.start()
    assert other.current() != made


def test_an_existing_file_is_the_token(path, clock):
    written(path, mode=0o400)
    token = AdminToken(None, path, clock=clock)
    token.start()
    assert (token.current(), path.read_text()) == (TOKEN, f"{TOKEN}\n")


def test_a_file_that_changed_is_read_again(path, clock):
    token = AdminToken(None, written(path), clock=clock)
    token.start()
    (path.parent / "next").write_text(OTHER)
    (path.parent / "next").chmod(0o600)
    (path.parent / "next").replace(path)
    assert token.current() == TOKEN
    clock.now += LOOK_SECONDS
    assert (token.current(), token.current()) == (OTHER, OTHER)


def test_callers_do_not_decide_how_often_the_file_is_looked_at(path, clock, monkeypatch):
    token = AdminToken(None, written(path), clock=clock)
    token.start()
    looks: list[Path] = []
    look = Path.stat

    def counted(self: Path, **options: bool) -> object:
        looks.append(self)
        return look(self, **options)

    monkeypatch.setattr(Path, "stat", counted)
    for _ in range(100):
        token.current()
    assert looks == []
    clock.now += LOOK_SECONDS
    for _ in range(100):
        token.current()
    assert looks == [path]


def test_a_file_that_was_removed_is_made_anew(path, clock):
    token = AdminToken(None, path, clock=clock)
    token.start()
    first = token.current()
    path.unlink()
    clock.now += LOOK_SECONDS
    assert token.current() not in (first, None)
    assert read_token(path) == token.current()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ((TOKEN, 0o644), "can be read by other users (mode 0644)"),
        (("short", 0o600), "holds no token: at least 8"),
        (("", 0o600), "holds no token"),
        (("two words here", 0o600), "holds no token"),
        (("x" * 5000, 0o600), "more than 4096 bytes"),
    ],
)
def test_an_unusable_file_closes_control_and_one_line_says_so(path, clock, caplog, file, said):
    content, mode = file
    token = AdminToken(None, written(path, content, mode), clock=clock)
    token.start()
    for _ in range(3):
        clock.now += LOOK_SECONDS
        assert token.current() is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(word in line for word in (said, str(path), "admin_token_file", "control calls are refused"))
    assert not content or content not in line.replace(str(path), "")
    assert said in (token.problem or "")
    written(path)
    clock.now += LOOK_SECONDS
    assert (token.current(), token.problem) == (TOKEN, None)


def test_on_a_volume_that_can_only_be_read_the_secret_is_what_is_missing(path, clock, caplog, monkeypatch):
    monkeypatch.setattr(admin_token, "replace_private", raising(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    token = AdminToken(None, path, clock=clock)
    token.start()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "cannot be made: read-only file system. In Kubernetes" in line
    assert "`helm upgrade` makes the chart's own again" in line
    assert "Set admin_token_file" not in line


def test_a_rotation_to_an_unusable_file_closes_control(path, clock):
    token = AdminToken(None, written(path), clock=clock)
    token.start()
    path.chmod(0o644)
    clock.now += LOOK_SECONDS
    assert (token.current(), token.current()) == (None, None)
    path.chmod(0o600)
    clock.now += LOOK_SECONDS
    assert token.current() == TOKEN


def test_a_folder_that_cannot_be_written_closes_control_and_one_line_says_so(tmp_path, clock, caplog):
    """A file stands where the folder would be made, which stops root too."""
    (tmp_path / "state").write_text("")
    token = AdminToken(None, tmp_path / "state" / "highwater" / "8001.token", clock=clock)
    token.start()
    for _ in range(3):
        clock.now += LOOK_SECONDS
        assert token.current() is None
    (record,) = caplog.records
    assert "control calls are refused" in record.getMessage()
    assert "not a directory" in record.getMessage()


def test_without_a_home_folder_control_is_closed(clock, caplog):
    token = AdminToken(None, None, clock=clock)
    token.start()
    assert (token.current(), len(caplog.records)) == (None, 1)
    assert "no home folder" in caplog.text


def test_a_token_made_for_one_run_goes_with_it(path, clock):
    """A process that takes the port afterwards is sent nothing that the next sidecar would take."""
    token = AdminToken(None, path, is_temporary=True, clock=clock)
    token.start()
    token.close()
    assert not path.exists()


@pytest.mark.parametrize("whose", ["found", "named", "replaced"])
def test_a_token_that_was_not_made_for_this_run_stays(path, clock, whose):
    if whose == "found":
        written(path)
    token = AdminToken(None, path, is_temporary=whose != "named", clock=clock)
    token.start()
    if whose == "replaced":
        written(path, OTHER)
    token.close()
    assert path.exists()


def test_the_token_is_in_no_repr(path, clock):
    written(path)
    assert TOKEN not in repr(AdminToken(TOKEN, None)) + repr(
        find_token("http://127.0.0.1", {"HIGHWATER_ADMIN_TOKEN": TOKEN})
    )


# --- where commands look ---


def found(url: str = "http://127.0.0.1:8001", **environ: str) -> tuple[str | None, str]:
    token = find_token(
        url, {f"HIGHWATER_{name}" if name != "XDG_STATE_HOME" else name: v for name, v in environ.items()}
    )
    return token.value, token.source


def test_the_variable_wins_over_the_files(tmp_path):
    named = written(tmp_path / "named", OTHER)
    assert found("http://h:1", ADMIN_TOKEN=TOKEN, ADMIN_TOKEN_FILE=str(named)) == (TOKEN, "HIGHWATER_ADMIN_TOKEN")


def test_the_named_file_wins_over_the_sidecars_own(tmp_path, path):
    named = written(tmp_path / "named", OTHER)
    written(path)
    state = str(path.parents[1])
    assert found(ADMIN_TOKEN_FILE=str(named), XDG_STATE_HOME=state) == (OTHER, str(named))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8001", "localhost:8001", "https://localhost:8001/x", "http://[::1]:8001"]
)
def test_the_file_of_a_sidecar_on_this_machine_is_found(path, url):
    written(path)
    assert found(url, XDG_STATE_HOME=str(path.parents[1])) == (TOKEN, str(path))
    assert found("http://localhost:8002", XDG_STATE_HOME=str(path.parents[1]))[0] is None


@pytest.mark.parametrize(
    "url", ["http://gpu-7:8001", "http://10.0.0.7:8001", "http://localhost.evil:8001", "http://[::1:8001", ""]
)
def test_the_file_of_this_machine_goes_to_no_other(path, url):
    written(path)
    value, said = found(url, XDG_STATE_HOME=str(path.parents[1]))
    assert (value, "HIGHWATER_ADMIN_TOKEN is not set" in said) == (None, True)


def test_what_is_wrong_with_a_file_is_said(path):
    state = str(path.parents[1])
    assert "may run as another user" in found(XDG_STATE_HOME=state)[1]
    written(path, mode=0o644)
    assert "can be read by other users" in found(XDG_STATE_HOME=state)[1]
    with pytest.raises(TokenUnusable, match="chmod 600"):
        read_token(path)


def test_the_state_folder_is_the_xdg_one(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    own = tmp_path / ".local/state/highwater/8001.token"
    assert default_token_file(8001, {}) == default_token_file(8001, {"XDG_STATE_HOME": "relative"}) == own
    assert default_token_file(9000, {"XDG_STATE_HOME": "/state"}) == Path("/state/highwater/9000.token")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert default_token_file(8001, {}) is None
    assert "no home folder" in found()[1]

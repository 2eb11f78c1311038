"""Settings: where they come from, in which order, and how wrong ones are reported."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from highwater.act.rules import PolicyChange, Rule
from highwater.process import resources
from highwater.process.errors import SettingsError
from highwater.process.untrusted import MayHoldSecret, sentences
from highwater.server.settings import PREFIX, Settings, is_list, keys, load, variable
from highwater.watch import snapshots, sources
from highwater.watch.recorder.ring import MAX_FILE_BYTES
from highwater_worker import recorder
from highwater_worker.operations import encoder_cache, memory

KEYS = dict(keys())
TOKEN = "hunter2hunter2"
GOOD_RULE = {"name": "fill", "signal": "device_used_ratio", "high_water": 0.9, "low_water": 0.5}


def problems(flags=None, *, config=None, environ=None) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(flags, config=config, environ=environ or {})
    return caught.value.problems


@pytest.fixture
def write(tmp_path):
    """`write("a.toml", text)` returns the file's name."""

    def written(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return written


# --- each key ---


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_type_a_default_and_a_sentence(key):
    info = KEYS[key]
    assert info.annotation is not None
    assert info.default is not PydanticUndefined
    assert info.description
    assert len(info.description) > 10


@pytest.mark.parametrize("key", KEYS)
def test_a_key_has_one_name_everywhere(key):
    assert variable(key) == PREFIX + key.upper().replace(".", "__")
    bad = "{" if is_list(KEYS[key]) else "\x00"
    by_flag, by_variable = problems_or_value({key: bad}, {}), problems_or_value({}, {variable(key): bad})
    assert by_flag == by_variable


def problems_or_value(flags, environ):
    try:
        return load(flags, environ=environ)
    except SettingsError as exc:
        return exc.problems


def test_the_defaults_are_fixed():
    settings = load(environ={})
    assert (settings.engine_url, settings.host, settings.port) == ("http://127.0.0.1:8000", "127.0.0.1", 8001)
    assert (settings.admin_token, settings.poll_seconds, settings.policy.mode) == (None, 1.0, "act")
    assert [rule.signal for rule in settings.policy.rules] == ["device_free_bytes"]


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        load(environ={}).port = 1


# --- where from ---


def test_the_order_is_flag_file_variable_file_default(write):
    variable_file = write("variable.toml", "port = 1004\nhost = '1.0.0.4'\npoll_seconds = 4\nlog_level = 'error'\n")
    flag_file = write("flag.yaml", "port: 1002\nhost: 1.0.0.2\n")
    environ = {
        "HIGHWATER_CONFIG": variable_file,
        "HIGHWATER_PORT": "1003",
        "HIGHWATER_HOST": "1.0.0.3",
        "HIGHWATER_POLL_SECONDS": "3",
    }
    settings = load({"port": "1001"}, config=flag_file, environ=environ)
    assert (settings.port, settings.host, settings.poll_seconds, settings.log_level) == (1001, "1.0.0.2", 3.0, "error")
    assert settings.history_seconds == 3600.0


def test_a_section_is_merged_key_by_key(write):
    name = write(
        "a.toml", f"[policy]\nmode = 'observe'\nrules = [{as_toml(GOOD_RULE)}]\n[proxy]\nmax_body_bytes = 4096\n"
    )
    settings = load({"policy.mode": "act"}, config=name, environ={"HIGHWATER_PROXY__CONNECT_SECONDS": "2"})
    assert (settings.policy.mode, [rule.name for rule in settings.policy.rules]) == ("act", ["fill"])
    assert (settings.proxy.max_body_bytes, settings.proxy.connect_seconds) == (4096, 2.0)


def as_toml(rule) -> str:
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in rule.items()) + "}"


@pytest.mark.parametrize("where", ["flag", "variable"])
def test_lists_are_given_as_json(where):
    texts = {"policy.rules": json.dumps([GOOD_RULE]), "proxy.extra_paths": '["/invocations"]'}
    environ = {variable(key): text for key, text in texts.items()}
    settings = load(texts, environ={}) if where == "flag" else load(environ=environ)
    assert settings.policy.rules[0].ordered_remedies == ("release", "trim_encoder_cache", "reset_encoder_cache")
    assert settings.proxy.extra_paths == ("/invocations",)


# --- what is wrong ---


def test_all_problems_are_reported_at_once(write):
    name = write("a.toml", "poll_second = 1\nlog_level = 'loud'\n")
    environ = {"HIGHWATER_PROT": "1", "HIGHWATER_PROXY__EXTRA_PATHS": "[", "HIGHWATER_HISTORY_SECONDS": "1"}
    told = problems({"port": "eighty", "engine_url": "ftp://engine"}, config=name, environ=environ)
    for key, value in {
        "HIGHWATER_PROT": "is not a setting",
        "proxy.extra_paths": "'['",
        "poll_second": "there is no such key",
        "log_level": "'loud'",
        "history_seconds": "'1'",
        "port": "'eighty'",
        "engine_url": "'ftp://engine'",
    }.items():
        assert any(problem.startswith(f"{key}: ") and value in problem for problem in told), (key, told)
    assert len(told) == 7


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("trust_loopback", "perhaps", "trust_loopback: 'perhaps' must be true or false"),
        ("proxy.extra_paths", "/v1/x", "proxy.extra_paths: '/v1/x' must be a JSON list, such as [\"/v1/x\"]"),
        ("admin_token_file", "here", "admin_token_file: 'here' must be the absolute path of a file"),
        ("control_port", "8001", "control_port: '8001' must differ from port (8001); unset: port serves both planes"),
        ("control_port", "70000", "control_port: '70000' must be less than or equal to 65535"),
        ("proxy.enabled", "perhaps", "proxy.enabled: 'perhaps' must be true or false"),
        ("admin_token", "short", "admin_token: must be at least 8 printable ASCII characters without spaces"),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(key, value, told):
    assert problems({key: value}) == (told,)


@pytest.mark.parametrize(
    "url",
    [
        "engine:8000",
        "http://",
        "http://engine:port",
        "http://engine:99999",
        "http://engine:0",
        "http://engine/v1",
        "http://engine?x=1",
        "http://user:secret@engine",
        "http://:secret@engine",
        "unix:run/vllm.sock",
        "unix:",
        "http://[::1",
        "",
    ],
)
def test_a_url_that_cannot_work_is_fatal(url):
    (problem,) = problems({"engine_url": url})
    assert problem.startswith("engine_url: ")


@pytest.mark.parametrize("url", ["http://ann:pa55w@rd@engine:8000", "ann:pa55w@engine:8000", "http://pa55w@[::1"])
def test_a_password_in_a_url_is_never_shown(url):
    (problem,) = problems({"engine_url": url})
    assert problem.startswith("engine_url: '***@")
    assert "pa55w" not in problem
    assert "ann" not in problem


CREDENTIALS = (
    "http://u:hunter2@h",
    "u:hunter2@h:80/x",
    "http://h/?k=hunter2",
    "http://u:hunter2%40h",
    '["http://u:hunter2@h"]',
    '[{"name": "http://u:hunter2@h", "http://u:hunter2@h": "unix://u:hunter2@h"}]',
)


@pytest.mark.parametrize("key", KEYS)
def test_a_url_in_a_field_that_is_for_none_is_shown_without_its_credentials(key):
    for given in CREDENTIALS:
        assert "hunter2" not in str(problems_or_value({key: given}, {})) or key == "host"


def test_a_url_in_the_place_of_a_section_or_a_key_is_shown_without_its_credentials(write):
    url = "http://u:hunter2@h"
    texts = [f"{section}: {url}\n" for section in ("tls", "policy", "gate")]
    texts += [f"'{url}': 1\n", f"'{url}': 1\n'{url}': 2\n", f"port: {{'{url}': '{url}'}}\n"]
    for text in texts:
        with pytest.raises(SettingsError, match=r"\*\*\*@h|^port: must be a whole number") as refused:
            load({}, config=write("some.yaml", text), environ={})
        assert "hunter2" not in str(refused.value)
    with pytest.raises(SettingsError) as refused:
        load({}, config=f"{url}/some.yaml", environ={f"HIGHWATER_{url}": "1"})
    assert "hunter2" not in str(refused.value)


def test_a_field_says_itself_that_its_value_may_hold_a_secret():
    class Model(BaseModel):
        door: Annotated[int, MayHoldSecret()]
        max_tokens: int

    with pytest.raises(ValidationError) as caught:
        Model(door="pa55w", max_tokens="many")  # type: ignore[arg-type]
    hidden, shown = sentences(caught.value.errors(), fields=Model.model_fields)
    assert hidden.startswith("door: must be")
    assert shown.startswith("max_tokens: 'many' must be")


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://engine:8000/", "http://engine:8000"),
        ("https://[::1]:8000", "https://[::1]:8000"),
        ("unix:/run/vllm.sock", "unix:/run/vllm.sock"),
    ],
)
def test_a_url_that_can_is_kept(url, kept):
    assert load({"engine_url": url}, environ={}).engine_url == kept


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"port": "0"}, "greater than or equal to 1"),
        ({"port": "65536"}, "less than or equal to 65535"),
        ({"poll_seconds": "nan"}, "finite"),
        ({"policy.mode": "watch"}, "'act' or 'observe'"),
        ({"policy.rules": "5"}, "policy.rules"),
        ({"policy.rules": '[{"name": "x"}]'}, "policy.rules.0.signal"),
        ({"proxy.extra_paths": '["invocations"]'}, "must start with '/'"),
        ({"proxy.extra_paths": '["/collective_rpc/"]'}, "never proxied"),
        ({"proxy.extra_paths": '["/a//b"]'}, "empty segment"),
        ({"proxy.extra_paths": '["/v1/collective_rpc"]'}, "never proxied"),
        ({"engine_root_path": "/llm/"}, "must not end in '/'"),
        ({"engine_root_path": "llm"}, "must be a plain path"),
        ({"proxy.max_connections": "2000000000"}, "ulimit -Hn"),
        ({"proxy.max_connections": "0"}, "greater than or equal to 1"),
        ({"proxy.forwarded": "trust"}, "'pass', 'replace' or 'append'"),
        ({"proxy.first_byte_seconds": "-1"}, "greater than or equal to 0"),
        ({"proxy.keepalive_seconds": "0"}, "greater than 0"),
        ({"admin_token": "short"}, "at least 8"),
        ({"admin_token": "with a space in it"}, "spaces"),
    ],
)
def test_a_wrong_value_is_never_ignored(flags, word):
    assert any(word in problem for problem in problems(flags)), problems(flags)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.toml", "port = ", "a.toml"),
        ("a.yaml", "{", "a.yaml"),
        ("a.yaml", "- 1", "must be a table"),
        ("a.json", "{}", ".toml, .yaml or .yml"),
        ("a.toml", "policy = 5\nport = 0", "policy: 5"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(write, name, text, word):
    assert any(word in problem for problem in problems(config=write(name, text)))


def test_a_file_that_is_not_there_is_named(tmp_path):
    (problem,) = problems(environ={"HIGHWATER_CONFIG": str(tmp_path / "gone.toml")})
    assert "gone.toml" in problem


# --- what was probably meant ---


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HIGHWATER_POLICY_MODE", "HIGHWATER_POLICY__MODE"),
        ("HIGHWATER_ENGIN_URL", "HIGHWATER_ENGINE_URL"),
        ("HIGHWATER_PROT", "HIGHWATER_PORT"),
        ("HIGHWATER_INCIDENTS_FOLDER", "HIGHWATER_INCIDENTS__FOLDER"),
    ],
)
def test_a_variable_that_is_nearly_one_is_answered_with_it(name, meant):
    (problem,) = problems(environ={name: "1"})
    assert problem == f"{name}: is not a setting; did you mean {meant}?"


def test_a_variable_that_is_like_no_other_gets_no_guess():
    (problem,) = problems(environ={"HIGHWATER_QUUX": "1"})
    assert problem == "HIGHWATER_QUUX: is not a setting; see highwater serve --help"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pol_seconds: 1", "pol_seconds: there is no such key; did you mean poll_seconds?"),
        ("polcy: {mode: act}", "polcy: there is no such key; did you mean policy?"),
        ("policy: {mod: act}", "policy.mod: there is no such key; did you mean policy.mode?"),
        ("drain_seconds: 3", "drain_seconds: there is no such key; did you mean gate.drain_seconds?"),
        ("quux: 3", "quux: there is no such key"),
        (
            "policy: {rules: [{name: a, signal: device_free_bytes, remedys: []}]}",
            "policy.rules.0.remedys: there is no such key; did you mean policy.rules.0.remedies?",
        ),
    ],
)
def test_a_key_that_is_nearly_one_is_answered_with_it(write, text, said):
    (problem,) = problems(config=(file := write("a.yaml", text)))
    assert problem == f"{said} (in {file})"


def test_a_wrong_key_names_the_file_that_it_stands_in_and_no_other(write):
    near, far = write("near.yaml", "gate: {max_held: -1}\npolcy: 1\n"), write("far.yaml", "gate: {hold_seconds: 0}\n")
    told = problems({"port": "0"}, config=near, environ={"HIGHWATER_CONFIG": far, "HIGHWATER_GATE__DRAIN_SECONDS": "0"})
    named = {problem.partition(": ")[0]: problem.partition(" (in ")[2].rstrip(")") for problem in told}
    of_files = {"gate.max_held": near, "polcy": near, "gate.hold_seconds": far}
    assert named == {**of_files, "gate.drain_seconds": "", "port": ""}


def test_a_path_where_a_list_belongs_is_shown_as_a_list():
    (problem,) = problems({"proxy.extra_paths": "/foo"})
    assert problem.endswith('must be a JSON list, such as ["/foo"]')


# --- Kubernetes ---


def test_service_links_are_not_settings():
    links = {
        "HIGHWATER_SERVICE_HOST": "10.0.0.1",
        "HIGHWATER_SERVICE_PORT": "8001",
        "HIGHWATER_SERVICE_PORT_HTTP": "8001",
        "HIGHWATER_PORT_8001_TCP": "tcp://10.0.0.1:8001",
        "HIGHWATER_PORT_8001_TCP_ADDR": "10.0.0.1",
        "HIGHWATER_METRICS_SERVICE_HOST": "10.0.0.2",
        "HIGHWATER_CACHE_DIR": "/var/cache",
    }
    assert load(environ=links) == load(environ={})


def test_the_link_that_is_a_setting_by_name_is_explained():
    (problem,) = problems(environ={"HIGHWATER_PORT": "tcp://10.0.0.1:8001"})
    assert "a Service called highwater; set enableServiceLinks: false" in problem
    (problem,) = problems(environ={"HIGHWATER_CONTROL_PORT": "tcp://10.0.0.1:8002"})
    assert "a Service called highwater-control; set enableServiceLinks: false" in problem


# --- ports and planes ---


def test_the_control_plane_is_on_port_unless_it_has_one_of_its_own():
    assert load(environ={}).control_plane_port == 8001
    assert load({"control_port": "8002"}, environ={}).control_plane_port == 8002


@pytest.mark.parametrize(
    ("flags", "has_data_plane"),
    [
        ({}, True),
        ({"recorder_dir": "/dev/shm/hw"}, False),
        ({"recorder_dir": "/dev/shm/hw", "port": "9001", "policy.mode": "observe"}, False),
        ({"recorder_dir": "/dev/shm/hw", "engine_url": "http://127.0.0.1:8000"}, True),
        ({"recorder_dir": "/dev/shm/hw", "control_port": "8002"}, True),
        ({"recorder_dir": "/dev/shm/hw", "gate.max_held": "8"}, True),
        ({"recorder_dir": "/dev/shm/hw", "proxy.max_header_bytes": "8192"}, True),
        ({"recorder_dir": "/dev/shm/hw", "proxy.enabled": "true"}, True),
        ({"engine_url": "http://127.0.0.1:8000", "proxy.enabled": "false"}, False),
    ],
)
def test_who_only_names_a_recorder_folder_wants_to_watch(flags, has_data_plane):
    assert load(flags, environ={}).has_data_plane is has_data_plane


def test_connections_leave_files_to_the_control_port(monkeypatch):
    monkeypatch.setattr(resources.resource, "getrlimit", lambda _: (1024, 1024))
    assert load({"proxy.max_connections": "460"}, environ={}).proxy.max_connections == 460
    (problem,) = problems({"proxy.max_connections": "460", "control_port": "8002"})
    assert "max_connections (460) must be at most 400" in problem
    assert "with a control_port" in problem


# --- the token ---


@pytest.mark.parametrize("token", ["tiny123", "with spaces " + TOKEN, "ümlaut" + TOKEN])
def test_a_token_is_in_no_message(token):
    told = " ".join(problems({"admin_token": token}))
    assert "admin_token" in told
    assert token not in told
    assert TOKEN not in told


def test_a_token_of_another_type_is_in_no_message(write):
    told = " ".join(problems(config=write("a.yaml", "admin_token: 1234567890123\n")))
    assert "admin_token" in told
    assert "1234567890123" not in told


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", f'admin_token: "{TOKEN}\nport: 8001\n'),
        ("a.yaml", f"admin_token: @{TOKEN}\n"),
        ("a.yaml", f"admin_token: *{TOKEN}\n"),
        ("a.yaml", f"admin_token: !{TOKEN} x\n"),
        ("a.yaml", f"admin_token: {TOKEN}\n port: 1\n"),
        ("a.yaml", f"admin_token: {TOKEN}\a\n"),
        ("a.toml", f"admin_token = {TOKEN}\n"),
        ("a.toml", f'admin_token = "{TOKEN}\n'),
        ("a.toml", f'admin_token = "{TOKEN}\\x"\n'),
    ],
)
def test_a_file_with_a_slip_in_the_tokens_line_is_not_quoted(write, name, text):
    (problem,) = problems(config=write(name, text))
    assert name in problem
    assert TOKEN not in problem


def test_a_token_is_masked_wherever_settings_are_shown(caplog):
    settings = load(environ={"HIGHWATER_ADMIN_TOKEN": TOKEN})
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").info("%r %s", settings, settings)
    shown = f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()} {caplog.text}"
    assert TOKEN not in shown
    assert settings.admin_token.get_secret_value() == TOKEN


# --- rules ---


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"signal": "gpu"}, "is not a signal; allowed: device_free_bytes, device_used_ratio"),
        ({"signal": "host_used_ratio"}, "remedies must be named for host_used_ratio"),
        ({"high_water": None}, "must be given both, or neither"),
        ({"high_water": None, "low_water": None}, "are required for device_used_ratio"),
        ({"low_water": 0.9}, "low_water must be under high_water"),
        ({"high_water": 1.5}, "ratios from 0 to 1"),
        ({"signal": "device_free_bytes"}, "less is worse there"),
        ({"remedies": ["empty"]}, "'empty' is not a remedy; allowed: release, trim_encoder_cache"),
        ({"sustain_seconds": -1}, "greater than or equal to 0"),
        ({"high_water": float("inf")}, "finite"),
        ({"cooldown": 5}, "there is no such key|Extra inputs"),
        ({"name": ""}, "at least 1 character"),
        ({"min_gain_bytes": -1}, "greater than or equal to 0"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(change, word):
    with pytest.raises(ValidationError, match=word.replace("(", r"\(")):
        Rule(**{**GOOD_RULE, **change})


def test_a_rule_without_remedies_owns_all_that_can_help():
    assert Rule(name="d", signal="device_free_bytes", high_water=1, low_water=2).ordered_remedies == (
        "release",
        "trim_encoder_cache",
        "reset_encoder_cache",
    )


def test_rule_names_are_unique():
    with pytest.raises(ValidationError, match="more than once: fill"):
        PolicyChange(rules=[GOOD_RULE, GOOD_RULE])


# --- folders and files of others ---


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("recorder_dir", "recorder", "absolute path of a folder"),
        ("recorder_dir", "FILE", "absolute path of a folder"),
        ("engine_log", "engine.log", "absolute path of a file"),
        ("engine_log", "FOLDER", "absolute path of a file"),
        ("access_log", "access.log", "absolute path of a file"),
        ("access_log", "FOLDER", "absolute path of a file"),
        ("access_log", "FOLDER/none/access.log", "folder that exists"),
        ("incidents.folder", "incidents", "folder that exists"),
        ("incidents.folder", "FOLDER/none", "folder that exists"),
        ("incidents.folder", "FILE", "folder that exists"),
        ("recorder_rate", "0.5", "greater than or equal to 1"),
        ("recorder_rate", "nan", "greater than or equal to 1|finite"),
        ("recorder_seconds", "5", "greater than or equal to 10"),
        ("recorder_seconds", "2910", "must be at most 2909 at 10 samples a second"),
        ("max_step_seconds", "0", "greater than 0"),
        ("incidents.keep", "0", "greater than or equal to 1"),
        ("incidents.max_bytes", "1024", "greater than or equal to 262144"),
    ],
)
def test_what_recorders_and_incidents_cannot_work_with_is_refused(tmp_path, write, key, value, word):
    file = write("file", "")
    value = value.replace("FILE", file).replace("FOLDER", str(tmp_path))
    (problem,) = problems({key: value})
    assert problem.startswith(f"{key}: ")
    assert any(part in problem for part in word.split("|")), problem


@pytest.mark.parametrize(
    "key", ["state_file", "engine_log", "admin_token_file", "access_log", "recorder_dir", "incidents.folder"]
)
def test_a_path_below_a_folder_that_cannot_be_searched_is_refused(key, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    assert problems({key: "/secret/there"}) == (f"{key}: '/secret/there' cannot be looked at: permission denied",)


def test_an_access_log_is_a_file_or_standard_output(tmp_path):
    file = str(tmp_path / "access.log")
    assert [load({"access_log": where}, environ={}).access_log for where in ("-", file)] == ["-", file]
    assert load(environ={}).access_log is None


def test_recorders_and_incidents_have_their_folders(tmp_path):
    settings = load(
        {
            "recorder_dir": str(tmp_path / "recorder"),
            "engine_log": str(tmp_path / "engine.log"),
            "incidents.folder": str(tmp_path),
        },
        environ={},
    )
    assert (settings.recorder_dir, settings.incidents.folder) == (tmp_path / "recorder", tmp_path)
    assert (settings.recorder_rate, settings.recorder_seconds, settings.max_step_seconds) == (10.0, 120.0, 120.0)
    nothing = load(environ={})
    assert (nothing.recorder_dir, nothing.engine_log, nothing.incidents.folder) == (None, None, None)


@pytest.mark.parametrize(("rate", "seconds"), [("100", "300"), ("10", "2900"), ("1", "3600")])
def test_a_recorders_file_fits_its_readers(rate, seconds):
    """A file of more than 64 MiB is read by nobody."""
    settings = load({"recorder_rate": rate, "recorder_seconds": seconds}, environ={})
    assert (settings.recorder_rate + 1) * settings.recorder_seconds * 2048 + 4096 <= MAX_FILE_BYTES


@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        ("recorder_rate", (recorder.RATE, recorder.MIN_RATE, recorder.MAX_RATE)),
        ("recorder_seconds", (recorder.SECONDS, recorder.MIN_SECONDS, recorder.MAX_SECONDS)),
    ],
)
def test_the_workers_take_what_the_settings_allow_of_a_recorder(key, bounds):
    field = Settings.model_fields[key]
    least, most = (getattr(one, name) for name in ("ge", "le") for one in field.metadata if hasattr(one, name))
    assert (field.default, least, most) == bounds


def test_sidecar_and_workers_have_the_same_limits():
    assert (snapshots.ROOM, sources.MAX_ENTRIES) == (memory._ROOM, encoder_cache.MAX_ENTRIES)


@pytest.mark.parametrize(
    ("poll", "idle", "stale"), [(1.0, 1.0, 10.0), (1.0, 5.0, 11.0), (60.0, 5.0, 180.0), (1.0, 60.0, 121.0)]
)
def test_a_report_is_stale_when_polls_were_missed(poll, idle, stale):
    assert Settings(poll_seconds=poll, idle_poll_seconds=idle).stale_seconds == stale

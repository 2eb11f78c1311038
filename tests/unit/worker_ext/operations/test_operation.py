"""A payload is right, or it is refused with what is wrong and what would be right."""

from __future__ import annotations

import json

import pytest

from highwater_worker.errors import BadPayloadError
from highwater_worker.operations import choice, integer, number, parse_payload
from tests.unit.worker_ext.fakes import fake_worker

FIELDS = {
    "limit": integer(0, 10_000, default=100),
    "sort": choice("bytes", "age"),
}
OPTIONAL = {"bytes": integer(0).or_null(), "seconds": number(0).or_null()}


def test_absent_keys_have_their_defaults():
    assert parse_payload("{}", FIELDS) == {"limit": 100, "sort": "bytes"}


def test_given_keys_win():
    assert parse_payload('{"limit": 10000, "sort": "age"}', FIELDS) == {"limit": 10_000, "sort": "age"}
    assert parse_payload('{"limit": 0}', FIELDS)["limit"] == 0


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ('{"limit": -1}', "payload key 'limit' is -1; it must be an integer from 0 to 10000"),
        ('{"limit": 10001}', "payload key 'limit' is 10001; it must be an integer from 0 to 10000"),
        ('{"limit": true}', "payload key 'limit' is True; it must be an integer from 0 to 10000"),
        ('{"limit": 1.0}', "payload key 'limit' is 1.0; it must be an integer from 0 to 10000"),
        ('{"limit": NaN}', "payload key 'limit' is nan; it must be an integer from 0 to 10000"),
        ('{"sort": "size"}', """payload key 'sort' is 'size'; it must be one of "bytes", "age\""""),
        ('{"sort": []}', """payload key 'sort' is []; it must be one of "bytes", "age\""""),
        ('{"order": 1}', "payload key 'order' is unknown; known keys: limit, sort, bytes, seconds"),
        ("[]", "payload is []; it must be one JSON object"),
        (None, "payload is of type NoneType; it must be the text of one JSON object"),
        ({"limit": 1}, "payload is of type dict; it must be the text of one JSON object"),
        ('{"bytes": -1}', "payload key 'bytes' is -1; it must be an integer from 0 on, or null"),
        ('{"bytes": 1.0}', "payload key 'bytes' is 1.0; it must be an integer from 0 on, or null"),
        ('{"bytes": false}', "payload key 'bytes' is False; it must be an integer from 0 on, or null"),
        ('{"seconds": -0.1}', "payload key 'seconds' is -0.1; it must be a number from 0 on, or null"),
        ('{"seconds": NaN}', "payload key 'seconds' is nan; it must be a number from 0 on, or null"),
        ('{"seconds": Infinity}', "payload key 'seconds' is inf; it must be a number from 0 on, or null"),
        ('{"seconds": "9"}', "payload key 'seconds' is '9'; it must be a number from 0 on, or null"),
        ('{"seconds": true}', "payload key 'seconds' is True; it must be a number from 0 on, or null"),
    ],
)
def test_a_wrong_payload_is_named_with_what_would_be_right(payload, message):
    with pytest.raises(BadPayloadError) as caught:
        parse_payload(payload, FIELDS | OPTIONAL)
    assert str(caught.value) == message


# Of the operations themselves: what each of their keys accepts, in words.
_DIRECTORY, _SEVERAL = "it must be an absolute path", "it must be 1 to 64 letters, digits and underscores, or null"
_INSTANCE = "it must be 16 hexadecimal digits, in small letters"
_RATE, _TIME = "it must be a number from 1 to 100", "it must be a number from 0 to 60"


@pytest.mark.parametrize(
    ("op", "payload", "message"),
    [
        ("budget", {"limit": 1}, "'limit' is unknown; known keys: none"),
        ("recorder_start", {}, f"'directory' is missing; {_DIRECTORY}"),
        ("recorder_start", {"directory": "/a"}, f"'instance' is missing; {_INSTANCE}"),
        ("recorder_start", {"directory": "a"}, f"'directory' is 'a'; {_DIRECTORY}"),
        ("recorder_start", {"directory": "/a\0"}, rf"'directory' is '/a\x00'; {_DIRECTORY}"),
        ("recorder_start", {"directory": None}, f"'directory' is None; {_DIRECTORY}"),
        ("recorder_start", {"instance": "../../../etc/cron"}, f"'instance' is '../../../etc/cron'; {_INSTANCE}"),
        ("recorder_start", {"rate": 0.5}, f"'rate' is 0.5; {_RATE}"),
        ("recorder_start", {"rate": True}, f"'rate' is True; {_RATE}"),
        ("recorder_start", {"rate": float("nan")}, f"'rate' is nan; {_RATE}"),
        ("recorder_start", {"seconds": 3601}, "'seconds' is 3601; it must be a number from 10 to 3600"),
        ("snapshot", {}, "'directory' is missing; only with dry_run it may be"),
        ("snapshot", {"directory": "/a"}, "'name' is missing; only with dry_run it may be"),
        ("snapshot", {"directory": "a"}, f"'directory' is 'a'; {_DIRECTORY}, or null"),
        ("snapshot", {"name": "../x"}, f"'name' is '../x'; {_SEVERAL}"),
        ("snapshot", {"name": ""}, f"'name' is ''; {_SEVERAL}"),
        ("snapshot", {"dry_run": 1}, "'dry_run' is 1; it must be true or false"),
        ("snapshot", {"dry_run": None}, "'dry_run' is None; it must be true or false"),
        ("record_stacks", {"minutes": 61}, f"'minutes' is 61; {_TIME}"),
        ("record_stacks", {"minutes": -1}, f"'minutes' is -1; {_TIME}"),
        ("record_stacks", {"entries": 0}, "'entries' is 0; it must be an integer from 1 to 200000"),
        ("record_stacks", {"entries": 10**9}, "'entries' is 1000000000; it must be an integer from 1 to 200000"),
        *[
            (op, {"max_seconds": wrong}, f"'max_seconds' is {wrong!r}; {_TIME}")
            for op in ("trim", "restore")
            for wrong in (-1, 61, True, "1", None)
        ],
    ],
)
def test_an_operation_names_a_wrong_key(op, payload, message):
    answer = json.loads(fake_worker().highwater_rpc(op, json.dumps(payload)))
    assert answer["error"] == {"code": "bad_payload", "message": f"payload key {message}"}


@pytest.mark.parametrize(
    ("payload", "values"),
    [
        ("{}", (None, None)),
        ('{"bytes": null, "seconds": null}', (None, None)),
        ('{"bytes": 0, "seconds": 0}', (0, 0)),
        ('{"bytes": 123456789012345678901, "seconds": 0.5}', (123456789012345678901, 0.5)),
        pytest.param('{"seconds": 1' + "0" * 400 + "}", (None, 10**400), id="more than a float holds"),
    ],
)
def test_null_is_as_good_as_absent(payload, values):
    """Callers may send every key."""
    assert tuple(parse_payload(payload, OPTIONAL).values()) == values


@pytest.mark.parametrize("payload", ["", "{", "[" * 100_000, '{"limit": ' + "1" * 5000 + "}"])
def test_what_is_no_json_is_refused(payload):
    with pytest.raises(BadPayloadError):
        parse_payload(payload, FIELDS)

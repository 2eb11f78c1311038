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
        ('{"order": 1}', "payload key 'order' is unknown; known keys: limit, sort"),
        ("[]", "payload is []; it must be one JSON object"),
        (None, "payload is of type NoneType; it must be the text of one JSON object"),
        ({"limit": 1}, "payload is of type dict; it must be the text of one JSON object"),
    ],
)
def test_a_wrong_payload_is_named(payload, message):
    """Key, value, and what would be right."""
    with pytest.raises(BadPayloadError) as caught:
        parse_payload(payload, FIELDS)
    assert str(caught.value) == message


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


@pytest.mark.parametrize(
    ("payload", "message"),
    [
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
def test_a_wrong_optional_value_is_named(payload, message):
    with pytest.raises(BadPayloadError) as caught:
        parse_payload(payload, OPTIONAL)
    assert str(caught.value) == message


@pytest.mark.parametrize("payload", ["", "{", "[" * 100_000, '{"limit": ' + "1" * 5000 + "}"])
def test_what_is_no_json_is_refused(payload):
    with pytest.raises(BadPayloadError):
        parse_payload(payload, FIELDS)


def test_an_operation_without_arguments_takes_none():
    answer = json.loads(fake_worker().highwater_rpc("budget", '{"limit": 1}'))
    assert answer["error"] == {
        "code": "bad_payload",
        "message": "payload key 'limit' is unknown; known keys: none",
    }

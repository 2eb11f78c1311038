"""The roles of the data plane: what a class that plays one has to do."""

from __future__ import annotations

import inspect

import pytest

from highwater.proxy.client import ClientConnection
from highwater.proxy.exchange import EngineExchange
from highwater.proxy.roles import Client, Exchange, Requester
from highwater.proxy.sidecar import SidecarExchange

PLAYED = [
    (ClientConnection, Client),
    (EngineExchange, Exchange),
    (EngineExchange, Requester),
    (SidecarExchange, Exchange),
]
ANSWERED_BY_THE_ROLE = {"drop"}


def methods(role):
    return {name: member for name, member in vars(role).items() if callable(member) and not name.startswith("_")}


@pytest.mark.parametrize(("player", "role"), PLAYED, ids=lambda one: one.__name__)
def test_a_class_that_plays_a_role_does_all_of_it(player, role):
    missing = {name for name, member in methods(role).items() if getattr(player, name) is member}
    assert missing <= ANSWERED_BY_THE_ROLE


@pytest.mark.parametrize("role", [Client, Exchange, Requester], ids=lambda one: one.__name__)
def test_what_is_not_done_of_a_role_is_an_error_and_not_passed_over(role):
    """A response that nobody ends would wait for ever."""
    for name, member in methods(role).items():
        if name not in ANSWERED_BY_THE_ROLE:
            arguments = inspect.signature(member).parameters.values()
            named = {one.name: None for one in arguments if one.kind is one.KEYWORD_ONLY}
            given = [None for one in arguments if one.kind is not one.KEYWORD_ONLY]
            with pytest.raises(NotImplementedError):
                member(*given, **named)

"""The ports of servers that tests and the demonstration start side by side."""

from __future__ import annotations

import socket

import pytest

from highwater.demo.process import free_port


def test_any_free_port_is_one_that_the_system_gives_to_nobody():
    """Between the choice and the server's start another process would get it otherwise."""
    assert {20_000 <= free_port() < 32_000 for _ in range(20)} == {True}


def test_a_port_that_is_wanted_is_taken_or_refused():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        free_port(server.getsockname()[1])

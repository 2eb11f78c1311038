"""One test, four fronts: what the sidecar must do is what the engine itself does, and the controls show it.

`through` is the front that a test's clients connect to, `engine` the fake engine behind it. A test about proxies leaves
out `direct` with `@fronted_by(...)`.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.faithful.engine import BACKLOG, Engine
from tests.faithful.fronts import EVERYONE, PATIENT, Front, Fronts, Missing, Profile
from tests.faithful.oracle import Oracle
from tests.faithful.unfaithful import AT_TIMES, UNFAITHFUL

HERE = Path(__file__).parent
TEST_SECONDS = 600
CONTROLS = {"direct", "nginx", "vllm-router"}
"""What they do shows what the tests are worth, and nothing of the sidecar."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        if item.get_closest_marker("timeout") is None:
            # The fixtures' time is not the test's: a front may have to be installed and started.
            item.add_marker(pytest.mark.timeout(TEST_SECONDS, func_only=True))
        if front_of(item) in CONTROLS:
            item.add_marker(pytest.mark.compat)
        for name in names_of(item):
            if reason := UNFAITHFUL.get(name):
                item.add_marker(
                    pytest.mark.xfail(strict=not reason.startswith(AT_TIMES), reason=f"{name[0]}: {reason}")
                )


def front_of(item: pytest.Item) -> str | None:
    """The front that a test runs before, where it runs before several."""
    return item.callspec.params.get("through") if hasattr(item, "callspec") else None


def names_of(item: pytest.Item) -> list[tuple[str, str]]:
    """The keys under which the table may know a test."""
    control = front_of(item)
    if not control:
        return []
    test, case = item.originalname, item.name.removeprefix(item.originalname)[1:-1]
    case = case.removeprefix(f"{control}-").removesuffix(f"-{control}")
    return [(control, test), (control, f"{test}[{case}]")]


@pytest.fixture(scope="session")
def engine_port() -> Iterator[socket.socket]:
    """The port of every test's engine. It stays open between them: who connects then waits for the next."""
    # With the protocol's number asyncio recognizes a TCP socket, and turns Nagle's delay off.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        listener.setblocking(False)  # the kernel keeps this for all who share the port, and asyncio would hang
        yield listener


@pytest.fixture(scope="session")
def fronts(engine_port: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    running = Fronts(tmp_path_factory.mktemp("fronts"), engine_port)
    yield running
    running.close()


@pytest.fixture
def profile() -> Profile:
    """The settings of a module's fronts; it may have its own."""
    return PATIENT


@pytest.fixture(autouse=True)
def _no_patience_with_known_failures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for what a control is known not to do: its test must fail."""
    if request.node.get_closest_marker("xfail"):
        monkeypatch.setattr("tests.patience.LIMIT_SECONDS", 2.0)


@pytest.fixture(params=EVERYONE)
async def through(request: pytest.FixtureRequest, fronts: Fronts, profile: Profile) -> AsyncIterator[Front]:
    try:
        front = fronts.get(request.param, profile)
    except Missing as missing:
        pytest.skip(str(missing))
    yield front
    await front.leave()


@pytest.fixture
async def engine(engine_port: socket.socket) -> AsyncIterator[Engine]:
    async with Engine(engine_port) as running:
        yield running


@pytest.fixture
async def oracle(engine_port: socket.socket) -> AsyncIterator[Oracle]:
    async with Oracle(engine_port) as running:
        yield running

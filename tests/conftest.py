"""Hooks and fixtures of every test: which are left out unless asked for by name, and which share a process of xdist."""

import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings

COUNTED = ("tests/unit/", "tests/http/")
"""What these tests run counts for the floor of branch coverage; the others go to the same places in other ways."""
TRACED_OF_EACH = 20
"""How many of a test's parameter sets count there: the others go the same ways with other values, and hundreds of a
parser's take half a minute to trace."""
BY_NAME = ("compat", "soak", "device", "compiled")
"""Marks whose tests run only where `-m` names them."""
# Of these files each begins before all others, in this order: what takes minutes in one process must not be the last to
# begin. Behind a group of one test xdist sends its process the next group in the order: a short one.
LONG = (
    *("growth/", "own_engine/test_vllm_ascend_server", "engine/", "own_engine/test_routes", "own_engine/test_pod_"),
    *("own_engine/", "browser/", "observability/", "situations/", "http/", "faithful/"),
)
SHARDS = {"browser/test_dashboard.py": 3}
"""In how many groups a file's tests are that share nothing."""

# A machine that is busy with something else makes an example slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.register_profile("fast", settings.get_profile("patient"), max_examples=25)  # with --hypothesis-profile=fast
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _state_home() -> Iterator[None]:
    """Sidecars keep their tokens in a folder of the test run, not in the user's home."""
    with tempfile.TemporaryDirectory(prefix="highwater-tests-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        yield


@pytest.fixture(scope="session", autouse=True)
def _slow_starts() -> Iterator[None]:
    """A sidecar that a test starts may take as long as a busy machine needs, which is many times three seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("highwater.terminal.demo.sidecar.START_SECONDS", 600.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _schemas_generated_once() -> Iterator[None]:
    """Generate a schema once for the same routes: it is most of what a sidecar's start costs a test."""
    applications: Any = sys.modules.get("fastapi.applications")
    if applications is None:  # no test of this run starts a sidecar in this process
        yield
        return
    generate, known = applications.get_openapi, dict[object, bytes]()

    def get_openapi(*, routes: Iterable[Any], **options: Any) -> Any:
        key = (*_paths(routes), str(options))
        if key not in known:
            known[key] = pickle.dumps(generate(routes=routes, **options))
        return pickle.loads(known[key])  # noqa: S301 - a copy, faster than `deepcopy`

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applications, "get_openapi", get_openapi)
        yield


def _paths(routes: Iterable[Any]) -> Iterator[str]:
    for route in routes:
        if included := getattr(route, "original_router", None):
            yield from _paths(included.routes)
        else:
            yield route.path


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups; the folders' own hooks are tryfirst too, and earlier
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if not _is_asked_for(item, config.option.markexpr)]
    if left:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)
    items.sort(key=_turn)  # stable
    of_each: Counter[str] = Counter()
    for number, item in enumerate(items):
        test = item.nodeid.partition("[")[0]
        of_each[test] += 1
        if of_each[test] > TRACED_OF_EACH:
            item.add_marker(pytest.mark.untraced)
        # The tests of a file share its fixtures; those of one engine have its name in a mark of their own.
        if item.get_closest_marker("xdist_group") is None:
            name = _file(item)
            shard = f" {number % SHARDS[name]}" if name in SHARDS else ""
            item.add_marker(pytest.mark.xdist_group(name + shard))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """Refuse a run whose groups were not read: each process would start every engine, and nothing would tell."""
    if node.config.option.dist == "loadgroup" and any("@" not in each for each in ids):
        raise pytest.UsageError("this pytest-xdist marks no test of this pytest with its group")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0].removeprefix("tests/")  # a path's parents take seconds for thousands of tests


def _turn(item: pytest.Item) -> int:
    name = _file(item)
    return next((turn for turn, begins in enumerate(LONG) if name.startswith(begins)), len(LONG))


def _is_asked_for(item: pytest.Item, expression: str) -> bool:
    names = [name for name in BY_NAME if item.get_closest_marker(name)]
    return not names or any(name in expression for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Take coverage's tracer off what does not count, and off what goes through the same lines thousands of times."""
    tracer = sys.gettrace()
    is_repeated = any(map(item.get_closest_marker, ("untraced", "hypothesis")))
    counts = item.nodeid.startswith(COUNTED) and not is_repeated
    if counts or tracer is None:
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)

"""Our OpenAPI page, held to the running sidecar: whatever fits the schema, and much that does not, is answered well."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from highwater.act.rules import PolicySettings
from highwater.server.main import create_app
from highwater.server.settings import Settings
from tests.fakes.engine import FakeEngine
from tests.patience import LIMIT_SECONDS

# Of each operation, whole and broken: 12, and 3 in `make fast`.
EXAMPLES = settings.default.max_examples // 8
TOKEN = "correct-horse-battery"


@contextlib.contextmanager
def in_a_thread(app) -> Iterator[str]:
    """A server with the app's lifespan, beside a test that is not async."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http="httptools", log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="sidecar")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def page():
    """Each operation by its label."""
    fake = FakeEngine()
    fake.serve_images(3)
    app = create_app(
        Settings(poll_seconds=60.0, policy=PolicySettings(rules=()), log_level="error", admin_token=TOKEN),
        transport=fake.transport(),
    )
    with in_a_thread(app) as url:
        # The listener takes connections before the server runs: the first request waits for it.
        page = httpx.get(f"{url}/memory/openapi.json", timeout=LIMIT_SECONDS).json()
        # Every call is made with the token: what is made without it is the affair of tests/security/test_callers.py.
        for methods in page["paths"].values():
            for operation in methods.values():
                operation.pop("security", None)
        schema = schemathesis.openapi.from_dict(page)
        schema.config.base_url = url
        operations = [result.ok() for result in schema.get_all_operations()]
        yield {operation.label: operation for operation in operations}


# Not schemathesis' own pytest plugin: it breaks on pytest 9.2.
OPERATIONS = [
    *(
        f"GET /memory{below}"
        for below in ("", "/budget", "/encoder-cache", "/growth", "/history", "/events", "/incidents", "/requests")
    ),
    *("GET /memory/findings", "GET /memory/host", "GET /memory/incidents/{incident_id}"),
    *(f"POST /{path}" for path in ("memory/marks", "memory/plan", "memory/reclaim", "memory/encoder-cache/restore")),
    *(f"POST /reset_{cache}_cache" for cache in ("mm", "prefix", "encoder")),
    *(f"GET /{path}" for path in ("policy", "metrics", "livez", "readyz", "health/deep")),
    "GET /server_info",
    "PUT /policy",
    *("POST /memory/snapshot", "POST /memory/snapshot/stacks", "GET /memory/snapshots", "GET /memory/snapshots/{name}"),
]
TAKES_NOTHING = {
    "GET /memory/findings",
    "GET /policy",
    "GET /server_info",
    "GET /memory/snapshots",
    "GET /memory/snapshots/{name}",
    "GET /livez",
    "GET /readyz",
    "GET /health/deep",
}  # and so nothing can be wrong


def test_every_operation_is_tried(page):
    assert set(page) == set(OPERATIONS)


@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
    + [(label, GenerationMode.NEGATIVE) for label in OPERATIONS if label not in TAKES_NOTHING],
)
def test_every_answer_fits_the_schema(page, label, mode):
    @given(case=page[label].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def tried(case):
        response = case.call(timeout=LIMIT_SECONDS, headers={"Authorization": f"Bearer {TOKEN}"})
        # That a name is known is more than a schema can say; and a 501 or 503 is an answer where it is documented.
        excluded = [positive_data_acceptance]
        if response.status_code in {501, 503}:
            excluded.append(not_a_server_error)
        case.validate_response(response, excluded_checks=excluded)

    tried()

"""The load generator and the fake upstream of the data plane's benchmark: what is wrong must not be measured."""

import socket
import threading
from collections.abc import Iterator

import pytest

from bench.dataplane.bed import Bed, bed
from bench.dataplane.proxies import Proxy
from highwater.demo.errors import DemoError
from tests.c_compiler import obstacle

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=str(obstacle()))

UPLOAD = 200_000


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIGHWATER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with bed(tmp_path_factory.mktemp("logs")) as running:
            yield running


@pytest.mark.parametrize("fresh", [0, 1])
def test_requests_are_answered_on_kept_and_on_new_connections(ready: Bed, fresh: int):
    """Latencies are in order, and there are any."""
    sample = ready.load.run(ready.direct, {"posts": 2, "seconds": 0.1, "fresh": fresh})
    assert sample["requests"] > 0
    assert 0 < sample["post_us"]["p50"] <= sample["post_us"]["p99"] <= sample["post_us"]["max"]


def test_streams_step_together_and_their_events_carry_the_time(ready: Bed):
    """All events of the window are counted: from the first of the last stream to the end of the first one."""
    sample = ready.load.run(ready.direct, {"streams": 4, "interval_us": 5000, "count": 20})
    assert 4 < sample["events"] <= 4 * 20
    assert sample["delay_us"]["p50"] > 0


def test_a_stream_at_full_speed_is_complete(ready: Bed):
    """One event fewer and the program would have failed."""
    assert ready.load.run(ready.direct, {"streams": 1, "interval_us": 0, "count": 5000})["events"] == 4999


def test_uploads_arrive_to_the_byte_beside_streams(ready: Bed):
    """The upstream says how many bytes came, and the load generator compares."""
    options = {
        "streams": 1,
        "interval_us": 5000,
        "count": 20,
        "uploads": 2,
        "upload_bytes": UPLOAD,
        "upload_every_ms": 20,
    }
    assert ready.load.run(ready.direct, options)["sent_bytes"] >= UPLOAD


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "503"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", "cut short"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "answered with {}"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz", "framed"),
    ],
)
def test_a_wrong_answer_ends_the_run(ready: Bed, answer: bytes, complaint: str):
    """A status, a length, a body and a framing that are not the upstream's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_once, args=(server, answer))
        thread.start()
        with pytest.raises(DemoError, match=complaint):
            ready.load.run(Proxy("broken", server.getsockname()[1], list), {"posts": 1, "seconds": 0.2})
        thread.join()


def answer_once(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


def test_a_stream_with_an_event_too_few_ends_the_run(ready: Bed):
    """The number of events is the request's."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_once, args=(server, head + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"))
        thread.start()
        with pytest.raises(DemoError, match="0 events of 3"):
            ready.load.run(Proxy("broken", server.getsockname()[1], list), {"streams": 1, "count": 3, "interval_us": 0})
        thread.join()

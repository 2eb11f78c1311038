"""The cost of looking for images in bodies, beside what it costs to take the same bytes and send them on.

In one process, piece by piece, each body through both in turn: a ratio holds still where a machine's speed does not.
"""

from __future__ import annotations

import base64
import io
import json
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping

from PIL import Image

from bench.figure import Figure, Goal, number
from bench.stage import Stage
from gated_proxy.door_scanner import Scanner

BODY_BYTES = 10_000_000
PIECE_BYTES = 256 * 1024
ROUNDS, SHORT_ROUNDS = 40, 10
GOAL = Goal("under", 1.0)
# What a kernel's socket buffer takes at once.
_SENT_BYTES = 64 * 1024


def measure(_: Stage, *, short: bool) -> list[Figure]:
    """Return a figure for each kind of body: milliseconds of CPU for 10 MB; with images, by their goal."""
    return [_figure(what, body, SHORT_ROUNDS if short else ROUNDS) for what, body in _bodies().items()]


def _bodies() -> Mapping[str, bytes]:
    noise = random.Random(1).randbytes(BODY_BYTES)  # noqa: S311 - nothing is kept secret by it
    file = io.BytesIO()
    Image.new("RGB", (4032, 3024), "teal").save(file, "jpeg")
    photo = file.getvalue()

    def chat(images: int) -> bytes:
        data = photo + noise[: BODY_BYTES * 3 // 4 // images - len(photo)]
        url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}] * images
        return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()

    sentence = "The tide came in over the flats, and the marks on the pole went under one by one.\n"
    text = json.dumps({"prompt": sentence * (BODY_BYTES // len(sentence))}).encode()
    return {"one photo": chat(1), "20 photos": chat(20), "text alone": text}


def _figure(what: str, body: bytes, rounds: int) -> Figure:
    pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)]
    left, right = socket.socketpair()
    with left, right:
        taken = bytearray(_SENT_BYTES)

        def pass_on() -> None:
            for piece in pieces:
                for at in range(0, len(piece), _SENT_BYTES):
                    sent = left.send(piece[at : at + _SENT_BYTES])
                    while sent > 0:
                        sent -= right.recv_into(taken)

        def scan() -> None:
            scanner = Scanner()
            for piece in pieces:
                scanner.feed(piece)

        scanned, passed = list[float](), list[float]()
        for _ in range(rounds):
            scanned.append(_cpu_ms(scan))
            passed.append(_cpu_ms(pass_on))
    middle = statistics.median(scanned)
    share = middle / statistics.median(passed)
    return Figure(
        what=f"A body of {len(body) / 1e6:.0f} MB, {what}",
        value=middle,
        unit="ms of CPU",
        goal=GOAL if what == "one photo" else None,
        spread=f"{number(share)} of what sending and receiving the same bytes costs; "
        f"{number(min(scanned))} to {number(max(scanned))}",
        method=f"{rounds} rounds, pieces of {PIECE_BYTES // 1024} KiB, each round followed by one "
        "that sends the same bytes through a socket pair and receives them; medians",
        noise=statistics.stdev(scanned) / rounds**0.5,
    )


def _cpu_ms(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3

"""Who speaks to whom in the data plane. Base classes and not protocols: compiled, a call to one is a C call."""

from __future__ import annotations

import asyncio

from mypy_extensions import trait

from app.proxy.failures import Failure
from app.proxy.forwarded import Forwarding
from app.proxy.heads import AnswerHead, Header
from app.proxy.transports import Reading, Writing, peer_of


class Conversation:
    """Whoever answers a request of a client's; told what the client does."""

    def start(self) -> None:
        """Set out."""
        raise NotImplementedError

    def body(self, piece: bytes) -> None:
        """A piece of the request's body; or of a tunnel."""
        raise NotImplementedError

    def body_ends(self, trailers: tuple[Header, ...]) -> None:
        """The request is complete."""
        raise NotImplementedError

    def client_full(self) -> None:
        """Write no more for now."""
        raise NotImplementedError

    def client_ready(self) -> None:
        """Write on."""
        raise NotImplementedError

    def client_left(self) -> None:
        """Nobody waits for the answer any more."""
        raise NotImplementedError

    def fail(self, failure: Failure) -> None:
        """End it for this reason, and tell the client as far as that can be done."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Let this be the connection's last answer."""
        raise NotImplementedError


@trait
class Asker:
    """Whoever asked the engine; told what the engine does.

    Attributes:
        to_head: its request is a HEAD.
        wants_bare_body: its client cannot read chunks.
        wants_tunnel: it asked for a WebSocket.
    """

    to_head: bool
    wants_bare_body: bool
    wants_tunnel: bool

    def answer_interim(self, raw: bytes) -> None:
        """A 1xx head."""
        raise NotImplementedError

    def answer_begins(self, head: AnswerHead, data: bytes) -> None:
        """The head, and what came of the body with it."""
        raise NotImplementedError

    def answer_continues(self, data: bytes) -> None:
        """A piece of the body, in its framing unless that is not wanted; or of a tunnel."""
        raise NotImplementedError

    def answer_ends(self, *, reusable: bool) -> None:
        """All of it has been handed over."""
        raise NotImplementedError

    def tunnel_opens(self, head: AnswerHead) -> None:
        """The engine has switched protocols; from here on it is bytes."""
        raise NotImplementedError

    def engine_failed(self, failure: Failure) -> None:
        """There will be no more."""
        raise NotImplementedError

    def engine_full(self) -> None:
        """Send no more for now."""
        raise NotImplementedError

    def engine_ready(self) -> None:
        """It takes bytes again."""
        raise NotImplementedError


class Client:
    """Whom an answer is for.

    Attributes:
        transport: of the connection.
        reading: held while its bytes cannot be taken.
        writing: the one way to send it something.
        forwarding: what the engine is told of it; None: nothing.
    """

    transport: asyncio.Transport
    reading: Reading
    writing: Writing
    forwarding: Forwarding | None

    @property
    def peer(self) -> str:
        """Its address and port."""
        return peer_of(self.transport)

    def answered(self, *, close: bool) -> None:
        """The answer is complete; this conversation is over."""
        raise NotImplementedError

    def cut(self, *, reset: bool) -> None:
        """The answer ends here, incomplete; `reset` where the connection's end alone would look like a clean one."""
        raise NotImplementedError

"""The data plane: every request that is not the sidecar's own, passed to the engine and back byte for byte.

A protocol class for uvicorn's listening socket. Heads are parsed on both sides by llhttp; bodies go from transport to
transport as they arrive, never decoded, never held whole. What is the sidecar's own goes on to uvicorn's HTTP and the
ASGI application behind it, request by request on the same connection.

::

    client ──► ClientConnection ──┬── own path ──────► OwnConversation ──► uvicorn ──► FastAPI
               parses, one        ├── admitted ──────► Exchange ──► EngineConnection ──► engine
               request at a time  └── anything else ─► an error in the OpenAI API's shape

    The next request of a connection begins when the one before it is answered and the client has taken the answers,
    down to the low-water mark. What comes meanwhile waits: 64 KiB and a read of it here, the rest with the client.

    Exchange:  HELD ──► CONNECTING ──► ASKING ──► ANSWERING ──► over
                 │          │             │            └─ the engine fails: cut short, never a clean end
                 └──────────┴─────────────┴─ the engine fails: 502 or 504; shed by the gate: 503

    At a closed gate a request that comes is HELD whole; one whose body is on its way goes on, and its last piece waits
    in ASKING. It counts at the gate from that piece to the end of its answer, or to the head of one that has a length.

    ASKING ──101──► TUNNEL: bytes both ways until one side ends, or both are silent too long (WebSocket)

What happens to a conversation when one side goes: the client leaves, and the engine's connection is cut at once; the
engine goes before its answer's head, and the client gets an error; it goes within its answer, and the client's
connection ends without the answer's end.

There is nothing of memory or policy in here. The gate is asked before a request goes on, the observer told about it.
"""

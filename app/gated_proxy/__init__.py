"""The data plane: passes every request that is not for the sidecar itself to the engine and back, byte for byte.

It is a protocol class for uvicorn's listening socket. llhttp parses heads on both sides; bodies go from transport to
transport as they arrive, never decoded and never held whole. A request for one of the sidecar's paths goes on to
uvicorn's HTTP and the ASGI application behind it, request by request on the same connection.

::

    client ──► ClientConnection ──┬── sidecar path ──► SidecarExchange ──► uvicorn ──► FastAPI
               parses, one        ├── admitted ──────► EngineExchange ───► EngineConnection ──► engine
               request at a time  └── anything else ─► an error in the OpenAI API's shape

    A connection's next request begins when the response to the one before it is complete and the client has taken the
    responses down to the low-water mark. Until then bytes wait: 64 KiB and one read here, the rest with the client.

    EngineExchange:  HELD ──► CONNECTING ──► SENDING ──► RESPONDING ──► OVER
                       │          │             │            └─ the engine fails: cut short, never a clean end
                       └──────────┴─────────────┴─ the engine fails: 502 or 504; shed by the gate: 503

    While the gate is closed, a request that arrives is HELD whole; one whose body is already arriving goes on, and its
    last piece waits in SENDING. It counts at the gate from that piece to the end of its response, or to the head of a
    response that declares its length.

    The door looks at each piece of a body before that: one with which an image becomes known that has no room waits
    there, with all that follows, in any state before RESPONDING. No room in time: 503; room never: 413.

    SENDING ──101──► TUNNEL: bytes both ways until one side ends, or both are silent too long (WebSocket)

If the client leaves, the engine's connection is cut at once; if the engine leaves before the head of its response, the
client gets an error; if it leaves within its response, the client's connection ends without the response's end.

It imports nothing of ours, and knows nothing of memory or policy. The gate and the door admit a request before it goes
on, and the observer counts it.
"""

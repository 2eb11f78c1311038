"""Clear the multimodal processor caches on the host."""

from __future__ import annotations

from app.capabilities import Capabilities
from app.engine import Engine
from app.readings import EngineStatus, Mode
from app.remedies.remedy import Ask, Run, idle, missing, post
from app.safety import Need


class ResetMmCache:
    """The engine's ``/reset_mm_cache``. Its two sides drift apart when a request is rendered in between.

    A later use of an image that only one side knows then fails: vllm/v1/engine/core.py, "we don't attempt to re-sync".
    Pausing the engine does not help: a request that waits in it has looked its images up already.
    """

    name = "reset_mm_cache"
    frees = "processed images in the API server's and EngineCore's host memory"
    spares = "device memory: encoder outputs, weights and KV pool stay, and so does the allocator's reserve"
    needs_release = False
    path = "/reset_mm_cache"
    # Before, a request that came past the gate unseen would fail, or hang the engine for ever.
    automatic_since = "0.28"

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """At once only where a drift does not hang the engine for ever, or where nothing is under way."""
        if not capabilities.reset_mm_cache:
            return missing(self.path, "0.11.2")
        if mode == "now" and _hangs(capabilities) and not idle(status):
            return (
                f"vLLM {capabilities.version or 'of unknown version'} can hang for ever when this is called with "
                "requests under way (upstream issue 31404). ?mode=safe holds new requests and waits for the others; "
                "?force=true calls it all the same"
            )
        return None

    def need(self, capabilities: Capabilities, mode: Mode) -> Need:
        """No request on its way, in safe mode and where a drift hangs the engine; elsewhere it fails single requests.

        From 0.25 on the request fails with 500, from 0.28 on with a 503 that heals itself.
        """
        return "idle path" if mode == "safe" or _hangs(capabilities) else "nothing"

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """POST it.

        Raises:
            EngineError: The engine gave no good answer.
        """
        return await post(engine, self.path, ask.query)


def _hangs(capabilities: Capabilities) -> bool:
    # Up to 0.13 the thread that takes requests in dies of the first drift (v1/engine/core.py, `process_input_sockets`).
    # Later it survives that, but a key without an item stays behind (utils/cache.py, `touch`), on which the next reset
    # turns for ever; 0.25.1 leaves none behind.
    return not capabilities.at_least("0.25")

"""Clear the multimodal processor caches on the host."""

from __future__ import annotations

from app.capabilities import Capabilities
from app.engine import Engine
from app.readings import EngineStatus, Mode
from app.remedies.remedy import Ask, Run, missing, post
from app.safety import Need

SURVIVES_SINCE = "0.25"


class ResetMmCache:
    """The engine's ``/reset_mm_cache``. Its two sides drift apart when a request is rendered in between.

    A later use of an image that only one side knows then fails: vllm/v1/engine/core.py, "we don't attempt to re-sync".
    Pausing the engine does not help: a request that waits in it has looked its images up already.

    Afterwards every image is new, and two requests that bring the same new image can overtake each other within vLLM:
    the same drift. Before 0.25 it ends in an engine that hangs for ever. Up to 0.13 the thread that takes requests in
    dies of it (``process_input_sockets``); later a key without an item stays behind (vllm/utils/cache.py, ``touch``),
    on which the next reset turns for ever, in the quietest moment too.
    """

    name = "reset_mm_cache"
    frees = "processed images in the API server's and EngineCore's host memory"
    spares = "device memory: encoder outputs, weights and KV pool stay, and so does the allocator's reserve"
    needs_release = False
    path = "/reset_mm_cache"
    # Before, a request that came past the gate unseen would fail with 500 as long as one side knows its image.
    automatic_since = "0.28"

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Where it can hang the engine: no moment is quiet enough for what comes after it."""
        del status, mode
        if not capabilities.reset_mm_cache:
            return missing(self.path, "0.11.2")
        if capabilities.at_least(SURVIVES_SINCE):
            return None
        return (
            f"vLLM {capabilities.version or 'of unknown version'} can hang for ever when requests use the images that "
            f"this makes new (upstream issue 31404); {SURVIVES_SINCE}.1 and newer survive that. "
            "?force=true calls it all the same"
        )

    def need(self, capabilities: Capabilities, mode: Mode) -> Need:
        """No request on its way, in safe mode: it would fail, with 500 or from 0.28 on with an error to be retried."""
        del capabilities
        return "idle path" if mode == "safe" else "nothing"

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """POST it.

        Raises:
            EngineError: The engine gave no good answer.
        """
        return await post(engine, self.path, ask.query)

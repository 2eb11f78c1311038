"""Clear the multimodal processor caches on the host."""

from __future__ import annotations

from highwater.engine.capabilities import Capabilities
from highwater.engine.client import Engine
from highwater.readings import EngineStatus, Mode
from highwater.relief.remedies.remedy import Ask, Run, missing, post


class ResetMmCache:
    """The engine's ``/reset_mm_cache``. Its two sides drift apart when a request is rendered in between.

    A later use of an image that only one side knows then fails: vllm/v1/engine/core.py, "we don't attempt to re-sync".

    Afterwards every image is new, and of two requests that bring the same new image one can overtake the other within
    vLLM: a drift again, though one that the slower request heals.
    """

    name = "reset_mm_cache"
    frees = "processed images in the API server's and EngineCore's host memory"
    does_not_free = "device memory: encoder outputs, weights and KV pool stay, and so does the allocator's reserve"
    needs_release = False
    path = "/reset_mm_cache"
    # Before, a request that came past the gate unseen would fail with 500 as long as one side knows its image.
    automatic_since = "0.28"
    paces_after = True  # every image is new then

    def refusal(self, capabilities: Capabilities, status: EngineStatus, mode: Mode) -> str | None:
        """Refuse where a drift hangs the engine: at once, or when it is reset with requests under way."""
        del status, mode
        if not capabilities.reset_mm_cache:
            return missing(self.path, "0.11.2")
        version = f"vLLM {capabilities.version or 'of unknown version'}"
        if not capabilities.at_least("0.14"):
            # The thread that takes requests in dies of the first drift (vllm/v1/engine/core.py,
            # `process_input_sockets`): no moment is quiet enough for what comes after the reset.
            return (
                f"{version} can hang for ever when requests use the images that this makes new (upstream issue 31404); "
                "0.25.1 and newer do not. ?force=true calls it all the same, and may end the engine"
            )
        if not capabilities.at_least("0.25"):
            # A request between the two clearings leaves a key without an item behind (vllm/utils/cache.py, `touch`),
            # on which the next reset turns for ever.
            return (
                f"{version} can hang for ever when this is called with requests under way, and fails some that use the "
                "images that it makes new; 0.25.1 and newer do not hang. ?force=true calls it all the same, and may "
                "end the engine"
            )
        return None

    def needs_gate(self, capabilities: Capabilities, mode: Mode) -> bool:
        """In safe mode: a request on its way would fail, with 500 or from 0.28 on with an error to be retried."""
        del capabilities
        return mode == "safe"

    async def run(self, engine: Engine, ask: Ask) -> Run:
        """POST it.

        Raises:
            EngineError: The engine gave no good answer.
        """
        return await post(engine, self.path, ask.query)

"""Keeps what the engine can do, and decides when it is detected again and whether its workers may be called.

A worker call to an engine without our extension puts its queues out of step, so no other module opens them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from highwater.engine.capabilities import Capabilities, detect
from highwater.engine.client import Engine

# An engine without our extension is detected again after so long.
REDETECT_SECONDS = 30.0


class Detection:
    """The capabilities of one engine, and of the one that takes its place.

    ``assume_extension``: the operator says that our extension is loaded under another name. ``clock`` returns
    monotonic seconds.

    Attributes:
        public_capabilities: The same as ``GET /memory`` shows it.
    """

    def __init__(self, engine: Engine, *, assume_extension: bool, clock: Callable[[], float]) -> None:
        self.capabilities = Capabilities()
        self.public_capabilities: dict[str, Any] = {}
        self._engine = engine
        self._assume_extension = assume_extension
        self._clock = clock
        self._detected = Capabilities()
        self._detected_at: float | None = None
        self._has_recorders = False

    @property
    def is_current(self) -> bool:
        return self._detected_at is not None

    @property
    def has_extension(self) -> bool:
        """True if the engine itself shows that our extension is loaded, whatever recorders write."""
        return self._detected.collective_rpc

    def is_due(self, *, is_recorded: bool) -> bool:
        """Return whether the engine is to be detected; ``is_recorded``: its recorders show every rank."""
        if self._detected_at is None:
            return True
        is_settled = self.capabilities.collective_rpc or is_recorded
        return not is_settled and self._clock() - self._detected_at >= REDETECT_SECONDS

    async def detect(self) -> None:
        self._detected = await detect(self._engine, assume_extension=self._assume_extension)
        self._detected_at = self._clock()
        self._use(self._detected)

    def detect_again(self) -> None:
        """Detect the engine again before its workers are called: it may be another version with other options."""
        self._detected_at = None
        self._engine.forbid_rpc()

    def forget_engine(self) -> None:
        self._engine.forget()
        self._has_recorders = False
        self.detect_again()

    def trust_recorders(self, *, offers_calls: bool, are_read: bool) -> None:
        """Note whether recorders of this engine ``are_read``, which holds for its life, and what they offer.

        Allow worker calls while every worker's recorder writes that it has our operations (``offers_calls``).

        Files may be another engine's: a call that fails ends what they allow, for this life of the engine.
        """
        self._has_recorders = self._has_recorders or are_read
        if self._detected_at is None or self._detected.collective_rpc:
            return
        may_call = self._detected.dev_mode and not self._engine.has_rpc_failed and offers_calls
        known = replace(
            self._detected, collective_rpc=may_call, has_operations=offers_calls, has_recorders=self._has_recorders
        )
        if known != self.capabilities:
            self._use(known)

    def _use(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.public_capabilities = capabilities.public()
        if capabilities.collective_rpc:
            self._engine.allow_rpc()
        else:
            self._engine.forbid_rpc()

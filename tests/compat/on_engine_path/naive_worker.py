"""A worker extension that does what must not be done. For the controls alone; the engine finds it by its folder."""

from __future__ import annotations

from highwater_worker import MemoryExtension


class NaiveWorker(MemoryExtension):
    """Highwater's extension, and one method that touches the worker's cache behind the scheduler's back."""

    def naive_clear_encoder_cache(self) -> str:
        cache = self.model_runner.encoder_cache  # type: ignore[attr-defined]  # the worker's, where vLLM adds us
        count = len(cache)
        cache.clear()
        return str(count)

"""A KV connector, for vLLM's process: blocks of finished requests stay, as of a prefiller whose decoders are gone.

They are let go once there is a file at HIGHWATER_TEST_LET_GO.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class HoldingConnector(KVConnectorBase_V1):
    """Stores and loads nothing; the worker's side is told of each finished request, and says when it was sent."""

    _held: frozenset[str] = frozenset()

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...

    def wait_for_layer_load(self, *_: Any) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None: ...

    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, *_: Any) -> tuple[bool, None]:
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        self._held |= finished_req_ids
        if not Path(os.environ["HIGHWATER_TEST_LET_GO"]).exists():
            return None, None
        sent, self._held = set(self._held), frozenset()
        return sent or None, None

"""A connector that freezes the pool's storage while it loads, for tests."""

from __future__ import annotations

import os
import signal
from typing import Any

from kvformat_connector.connector import KVFormatConnector

#: The layer before which it happens, in a step that loads.
LAYER = "model.layers.3."


class FreezingConnector(KVFormatConnector):
    """Sends SIGSTOP to the process whose id ends the tenant's name, once."""

    _is_frozen = False

    def wait_for_layer_load(self, layer_name: str) -> None:
        if LAYER in layer_name and self.worker._loads is not None and not self._is_frozen:
            self._is_frozen = True
            extra: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
            os.kill(int(extra["tenant"].rpartition("-")[2]), signal.SIGSTOP)
        super().wait_for_layer_load(layer_name)

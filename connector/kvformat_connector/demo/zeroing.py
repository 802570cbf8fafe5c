"""The negative control: hits are claimed, but what is loaded is zeros.

If answers stayed the same with this connector, equal answers would prove nothing.
"""

from __future__ import annotations

from typing import Any

from kvformat_connector.connector import KVFormatConnector, StepMetadata


class ZeroingConnector(KVFormatConnector):
    """Loads and verifies like its base class, then clears what it has loaded."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._tensors = kv_caches
        super().register_kv_caches(kv_caches)

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        for step in metadata.plan.requests:
            for blocks in step.loads:
                for block_id in blocks.block_ids[0]:
                    self._tensors[layer_name][block_id].zero_()

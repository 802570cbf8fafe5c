"""A connector that notes what KV stands in memory when a layer has been loaded or computed."""

from __future__ import annotations

import hashlib
from typing import Any

from kvformat_connector.connector import KVFormatConnector, StepMetadata


class DigestingConnector(KVFormatConnector):
    """``digests`` has a digest by block hash and layer name, of what this rank loads and saves; for
    layouts of one group."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._tensors = kv_caches
        self.digests: dict[str, str] = {}
        super().register_kv_caches(kv_caches)

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        self._note(layer_name, "loads")

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        self._note(layer_name, "saves")

    def _note(self, layer_name: str, field: str) -> None:
        import torch

        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        for step in metadata.plan.requests:
            for blocks in getattr(step, field):
                for block_hash, block_id in zip(
                    blocks.block_hashes, blocks.block_ids[0], strict=True
                ):
                    block = self._tensors[layer_name][block_id].contiguous()
                    digest = hashlib.sha256(block.view(torch.uint8).numpy().tobytes()).hexdigest()
                    self.digests[f"{block_hash.hex()}/{layer_name}"] = digest

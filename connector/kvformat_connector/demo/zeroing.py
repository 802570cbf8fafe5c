"""The negative control: hits are claimed, but what is loaded is zeros.

If answers stayed the same with this connector, equal answers would prove nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvformat_connector.connector import KVFormatConnector, StepMetadata
from kvformat_connector.engine import layer_addresses
from kvformat_connector.messages import RequestStep

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )


class ZeroingConnector(KVFormatConnector):
    """Loads and verifies like its base class, then clears what it has loaded: a layer when it has
    been waited for, a whole request when its bulk load is over."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._tensors = kv_caches
        self._bulk: dict[str, RequestStep] = {}
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._steps = connector_metadata.plan.requests
        self._bulk |= {step.request_id: step for step in self._steps if step.load_mode == "bulk"}

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        for step in self._steps:
            if step.load_mode == "layerwise":
                self._clear(step, layer_name)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving or ():
            for layer_name in self._tensors:
                self._clear(self._bulk[request_id], layer_name)
        return results

    def _clear(self, step: RequestStep, layer_name: str) -> None:
        group = layer_addresses(self._layout)[layer_name].group
        for blocks in step.loads:
            groups = self._layout.objects[blocks.object_index]
            if group in groups:
                for block_id in blocks.block_ids[groups.index(group)]:
                    self._tensors[layer_name][block_id].zero_()

"""A connector whose worker derives its layout from a configuration that changed on the way."""

from __future__ import annotations

import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvformat_connector.connector import KVFormatConnector


class MutatingConnector(KVFormatConnector):
    """The worker's copy has another rope base than the scheduler's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role == KVConnectorRole.WORKER:
            vllm_config = copy.copy(vllm_config)
            vllm_config.model_config = copy.copy(vllm_config.model_config)
            changed = copy.deepcopy(vllm_config.model_config.hf_config)
            changed.rope_parameters["rope_theta"] = 500_000.0
            vllm_config.model_config.hf_config = changed
        super().__init__(vllm_config, role, kv_cache_config)

"""From the engine's cache structures to layouts and placements.

The only package that knows how vLLM and vllm-ascend describe and lay out a KV cache. What it can't
describe it refuses by name: a guess about bytes is never better than a miss.
"""

from kvformat_connector.engine.adapterloads import (
    LoadedAdapters,
    can_watch_adapters,
    watch_adapters,
)
from kvformat_connector.engine.derive import (
    adopt_layout,
    derive_layout,
    describe_stage,
    gather_stages,
    require_same_layout,
    stage_ranks,
)
from kvformat_connector.engine.hashing import hash_has_adapter_path
from kvformat_connector.engine.memory import (
    LayerAddress,
    derive_placement,
    is_unused,
    layer_addresses,
)
from kvformat_connector.engine.ranks import (
    Ranks,
    Replicas,
    merge_over_tensor_ranks,
    ranks_of,
    replicas_of,
    wait_for_tensor_ranks,
)

__all__ = [
    "LayerAddress",
    "LoadedAdapters",
    "Ranks",
    "Replicas",
    "adopt_layout",
    "can_watch_adapters",
    "derive_layout",
    "derive_placement",
    "describe_stage",
    "gather_stages",
    "hash_has_adapter_path",
    "is_unused",
    "layer_addresses",
    "merge_over_tensor_ranks",
    "ranks_of",
    "replicas_of",
    "require_same_layout",
    "stage_ranks",
    "wait_for_tensor_ranks",
    "watch_adapters",
]

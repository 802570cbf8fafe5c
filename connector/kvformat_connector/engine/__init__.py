"""From the engine's cache structures to layouts and placements.

The only package that knows how vLLM and vllm-ascend describe and lay out a KV cache. What it can't
describe it refuses by name: a guess about bytes is never better than a miss.
"""

from kvformat_connector.engine.derive import (
    LayerAddress,
    derive_layout,
    derive_placement,
    layer_addresses,
    require_same_layout,
)
from kvformat_connector.engine.ranks import Ranks, Replicas, merge_over_tensor_ranks, ranks_of

__all__ = [
    "LayerAddress",
    "Ranks",
    "Replicas",
    "derive_layout",
    "derive_placement",
    "layer_addresses",
    "merge_over_tensor_ranks",
    "ranks_of",
    "require_same_layout",
]

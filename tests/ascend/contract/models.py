"""Models as an NPU would keep their caches: specs of vLLM and vllm-ascend, and tensors to match.

Shapes are those of ``NPUModelRunner._reshape_kv_cache_tensors`` (vllm-ascend 0.30.0rc2).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec, AscendSFAIndexerCacheSpec

BLOCK_SIZE = 128
NUM_BLOCKS = 24
NUM_LAYERS = 3
NUM_KV_HEADS = 2
HEAD_SIZE = 16
LATENT_SIZE = 32
ROPE_SIZE = 8
INDEX_SIZE = 16
DTYPE = torch.bfloat16

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Model:
    """One kind of attention. ``hooked`` names the layers that are computed, in order; ``allocate``
    gives tensors by layer name, those of an indexer apart, as the model runner registers them."""

    config: dict[str, Any]
    hooked: list[str]
    spec: Any
    layer_names: list[str]
    allocate: Callable[[], dict[str, Tensors]]

    def write_config(self, folder: Path) -> str:
        """A folder that vLLM takes for the model."""
        (folder / "config.json").write_text(json.dumps(self.config))
        return str(folder)


def _zeros(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def gqa() -> Model:
    """Grouped-query attention: K and V are views of one allocation, in turn block by block."""
    names = [f"model.layers.{index}.self_attn.attn" for index in range(NUM_LAYERS)]

    def allocate() -> dict[str, Tensors]:
        whole = {name: _zeros(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE) for name in names}
        return {name: (both[:, 0], both[:, 1]) for name, both in whole.items()}

    return Model(
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_SIZE,
            "vocab_size": 512,
            "max_position_embeddings": 4096,
            "torch_dtype": "bfloat16",
        },
        hooked=names,
        spec=FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_SIZE, dtype=DTYPE
        ),
        layer_names=names,
        allocate=allocate,
    )


def _deepseek() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": NUM_LAYERS,
        "kv_lora_rank": LATENT_SIZE,
        "q_lora_rank": 32,
        "qk_rope_head_dim": ROPE_SIZE,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }


def _latent_spec() -> AscendMLAAttentionSpec:
    return AscendMLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=LATENT_SIZE + ROPE_SIZE, dtype=DTYPE
    )


def _latent_and_rope() -> Tensors:
    return (
        _zeros(NUM_BLOCKS, BLOCK_SIZE, 1, LATENT_SIZE),
        _zeros(NUM_BLOCKS, BLOCK_SIZE, 1, ROPE_SIZE),
    )


def mla() -> Model:
    """Latent attention: the latent and the rope part apart, one head each."""
    names = [f"model.layers.{index}.self_attn.attn" for index in range(NUM_LAYERS)]
    return Model(
        config=_deepseek(),
        hooked=names,
        spec=_latent_spec(),
        layer_names=names,
        allocate=lambda: {name: _latent_and_rope() for name in names},
    )


def sfa() -> Model:
    """Sparse attention over a latent cache: the indexer's keys are a layer of their own, without
    hooks, and the save hook of the attention layer is given all three tensors."""
    prefixes = [f"model.layers.{index}.self_attn" for index in range(NUM_LAYERS)]
    specs: dict[str, Any] = {}
    for prefix in prefixes:
        specs[f"{prefix}.attn"] = _latent_spec()
        specs[f"{prefix}.indexer.k_cache"] = AscendSFAIndexerCacheSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=INDEX_SIZE, dtype=DTYPE
        )

    def allocate() -> dict[str, Tensors]:
        tensors: dict[str, Tensors] = {}
        for prefix in prefixes:
            tensors[f"{prefix}.indexer.k_cache"] = (_zeros(NUM_BLOCKS, BLOCK_SIZE, 1, INDEX_SIZE),)
            tensors[f"{prefix}.attn"] = _latent_and_rope()
        return tensors

    return Model(
        config={**_deepseek(), "index_head_dim": INDEX_SIZE},
        hooked=[f"{prefix}.attn" for prefix in prefixes],
        spec=UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs=specs),
        layer_names=list(specs),
        allocate=allocate,
    )

"""Tiny checkpoints of several architectures, made in a process that may import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Wide weights make attention matter: narrow ones answer the same with a cache of zeros.
_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

#: By name: the class that transformers has, and what its configuration has beside the shape.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # Its embeddings are scaled up: tied to the output, they would answer with the last token alone.
    "Gemma3": (
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 6, "sliding_window": 64, "tie_word_embeddings": False},
    ),
    "GptOss": (
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "Mistral": ("MistralForCausalLM", {"num_hidden_layers": 3, "sliding_window": 64}),
    "Qwen3Next": (
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
    # Three layers and one that predicts a second token, which transformers knows nothing of.
    "DeepseekV3": (
        "DeepseekV3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "head_dim": 64,
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 4,
        },
    ),
    "Llama": ("LlamaForCausalLM", {"num_hidden_layers": 4}),
    "LlamaDraft": ("LlamaForCausalLM", {"num_hidden_layers": 1}),
    "LlamaEagle": ("LlamaForCausalLM", {"num_hidden_layers": 1}),
}


def topology_model(root: Path, name: str) -> str:
    """The folder of a checkpoint. All are made when one is first asked for, in one process."""
    if not root.exists():
        subprocess.run(
            [sys.executable, __file__, str(root)], check=True, capture_output=True, text=True
        )
    return str(root / name)


def _make(path: Path, name: str) -> None:
    import torch
    import transformers

    class_name, fields = _ARCHITECTURES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(len(name))
    model = model_class(model_class.config_class(**{**_SHAPE, **fields})).float()
    weights = model.state_dict()
    if name == "DeepseekV3":
        _make_last_layer_predict(weights, model.config.hidden_size)
    if name == "LlamaEagle":
        weights = _eagle(weights, model.config.hidden_size)
    model.save_pretrained(path, state_dict=weights)
    if name == "DeepseekV3":
        config = json.loads((path / "config.json").read_text())
        config |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
        (path / "config.json").write_text(json.dumps(config))


def _make_last_layer_predict(weights: dict[str, Any], hidden_size: int) -> None:
    """Give the last layer the names and the weights that a multi-token predictor has."""
    import torch

    layer = "model.layers.3."
    weights[f"{layer}enorm.weight"] = torch.ones(hidden_size)
    weights[f"{layer}hnorm.weight"] = torch.ones(hidden_size)
    weights[f"{layer}eh_proj.weight"] = 0.15 * torch.randn(hidden_size, 2 * hidden_size)
    weights[f"{layer}shared_head.norm.weight"] = torch.ones(hidden_size)
    weights[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()


def _eagle(weights: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """A draft of EAGLE: a layer without its first norm, that reads the model's hidden state beside
    the next token's embedding."""
    import torch

    left_out = ("model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight")
    return {
        **{
            name.removeprefix("model."): value
            for name, value in weights.items()
            if name not in left_out
        },
        "fc.weight": 0.15 * torch.randn(hidden_size, 2 * hidden_size),
    }


def main() -> None:
    """Make all checkpoints in the folder that is named."""
    root = Path(sys.argv[1])
    for name in _ARCHITECTURES:
        _make(root / name, name)


if __name__ == "__main__":
    main()

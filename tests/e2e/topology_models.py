"""Tiny checkpoints of several architectures, made in a process that may import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SHAPE = """
shape = dict(
    vocab_size=512, hidden_size=128, intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range={init},
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
"""

#: By name: the class, its own arguments, and how wide its weights are. Wide weights make attention
#: matter; gains and scales of some architectures want others.
_ARCHITECTURES = {
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", "num_hidden_layers=6, sliding_window=64"),
    "Mistral": ("MistralForCausalLM", "MistralConfig", "num_hidden_layers=3, sliding_window=64"),
    "Qwen3Next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        "num_hidden_layers=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, "
        "linear_value_head_dim=128, linear_num_key_heads=2, linear_num_value_heads=4, "
        "num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, "
        "shared_expert_intermediate_size=64, decoder_sparse_step=1",
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", "num_hidden_layers=4"),
}

_PROGRAM = """
import sys, torch, transformers
{shape}
torch.manual_seed({seed})
config = transformers.{config}(**{{**shape, **dict({arguments})}})
transformers.{model}(config).float().save_pretrained(sys.argv[1])
"""


def make_topology_model(root: Path, name: str) -> str:
    """The folder of a checkpoint, made when it is first asked for."""
    path = root / name
    if not (path / "config.json").exists():
        model, config, arguments = _ARCHITECTURES[name]
        program = _PROGRAM.format(
            shape=_SHAPE.format(init=0.15),
            seed=len(name),
            config=config,
            arguments=arguments,
            model=model,
        )
        subprocess.run(
            [sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True
        )
    return str(path)

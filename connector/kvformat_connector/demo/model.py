"""A tiny Llama with real weights, laid out the way a hub cache lays out a snapshot."""

from __future__ import annotations

from pathlib import Path

HUB_NAME = "models--kvformat--tiny-llama"

#: Weights this wide make attention matter: with the default of 0.02 a zeroed KV cache answers
#: with the same tokens, and every comparison of answers would prove nothing.
INITIALIZER_RANGE = 0.15


def make_model(
    root: Path,
    commit: str,
    *,
    seed: int = 0,
    num_layers: int = 8,
    hidden_size: int = 512,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_size: int = 64,
) -> Path:
    """Save a Llama under ``root/models--.../snapshots/<commit>`` and return that folder.

    ``commit`` is 40 hex digits, as a hub cache has them; another ``seed`` is another checkpoint of
    the same name. A folder that is there already is left as it is.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = root / HUB_NAME / "snapshots" / commit
    if (path / "config.json").exists():
        return path
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=INITIALIZER_RANGE,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def make_prompt(num_tokens: int, stride: int = 7) -> list[int]:
    """Token ids below 512; two strides give prompts that share no block."""
    return [(at * stride + 3 + (at * at) % 11) % 500 for at in range(num_tokens)]

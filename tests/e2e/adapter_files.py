"""LoRA adapters for the tests' model, written without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvformat_connector.demo.model import HUB_NAME

_RANK = 8


def save_adapter(folder: Path, seed: int) -> str:
    """An adapter that changes keys and values of every layer a lot; a seed is another one."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(8):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = random.normal(0, 0.3, (_RANK, 512))
            tensors[f"{name}.lora_B.weight"] = random.normal(0, 0.3, (128, _RANK))
    header, payload = {}, b""
    for name, values in tensors.items():
        data = values.astype(np.float32).tobytes()
        offsets = [len(payload), len(payload) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": offsets}
        payload += data
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": ["k_proj", "v_proj"],
        "base_model_name_or_path": HUB_NAME,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)

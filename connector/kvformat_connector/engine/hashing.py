"""How the engine hashes blocks.

Source: vllm/v1/core/kv_cache_utils.py (``init_none_hash``, ``resolve_kv_cache_block_sizes``).
"""

from __future__ import annotations

import hashlib
import os
from types import SimpleNamespace
from typing import Any, Final

from kvformat.layout import HashRecipe
from kvformat_connector.engine.refusal import refuse

_HASH_NBYTES: Final = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}


def hash_recipe(cache_config: Any, kv_cache_config: Any) -> HashRecipe:
    """The recipe of an engine's block hashes.

    Raises ``ConfigError`` for an algorithm that is not known, or whose seed is random.
    """
    algorithm = str(cache_config.prefix_caching_hash_algo)
    if algorithm not in _HASH_NBYTES:
        refuse("prefix_caching_hash_algo", algorithm, f"known: {', '.join(_HASH_NBYTES)}")
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        if algorithm.startswith("xxhash"):
            refuse(
                "prefix_caching_hash_algo",
                algorithm,
                "without PYTHONHASHSEED its seed is random in every process, so no two share a "
                "block; set PYTHONHASHSEED to one value everywhere, or use sha256",
            )
        from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

        seed = DEFAULT_NONE_HASH_SEED
    block_size = (
        getattr(kv_cache_config, "hash_block_size", None)
        or getattr(cache_config, "hash_block_size", None)
        or cache_config.block_size
    )
    return HashRecipe(
        algorithm=algorithm,
        seed=hashlib.sha256(seed.encode()).hexdigest(),
        block_size=block_size,
        digest_nbytes=_HASH_NBYTES[algorithm],
    )


def hash_has_adapter_path() -> bool:
    """Whether block hashes hold an adapter's path and not its name alone, as since vLLM 0.32."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    lora = SimpleNamespace(lora_name="name", lora_path="the path", lora_int_id=1)
    request: Any = SimpleNamespace(
        lora_request=lora, mm_features=[], cache_salt=None, prompt_embeds=None
    )
    keys, _ = generate_block_hash_extra_keys(request, 0, 1, 0)
    return lora.lora_path in repr(keys)

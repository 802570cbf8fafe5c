"""The names and numbers of format version 1. Each is listed in spec/registry.md.

A released entry is never renumbered, renamed or reused.
"""

from __future__ import annotations

from typing import Final

FORMAT_MAJOR: Final = 1
FORMAT_MINOR: Final = 0

#: dtype name -> bits of one element.
DTYPE_BITS: Final[dict[str, int]] = {
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
    "float64": 64,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4,
    "int4": 4,
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint4": 4,
    "uint8": 8,
}

#: Group kinds that carry a window (in tokens), and those that don't.
WINDOWED_KINDS: Final = frozenset({"sliding_window", "chunked_local"})
UNWINDOWED_KINDS: Final = frozenset({"full_attention", "recurrent_state"})
GROUP_KINDS: Final = WINDOWED_KINDS | UNWINDOWED_KINDS

#: The axes along which a shard grid cuts. Axes of any other name are never cut.
HEAD_AXIS: Final = "head"
TOKEN_AXIS: Final = "token"

#: Standard component names. A layout may use others that match the same grammar.
COMPONENT_NAMES: Final[dict[str, str]] = {
    "k": "keys",
    "v": "values",
    "kv": "keys and values in one component, apart along its 'kv' or 'channel' axis",
    "k_scale": "scales of k",
    "v_scale": "scales of v",
    "kv_scale": "scales of kv",
    "latent": "compressed latent of multi-head latent attention",
    "rope": "rotary part that goes with a latent",
    "latent_rope": "latent and rotary part in one component, latent first",
    "latent_scale": "scales of latent or latent_rope",
    "indexer_k": "keys of a sparse-attention indexer",
    "indexer_scale": "scales of indexer_k",
    "indexer": "keys of an indexer with their scales, interleaved as the engine's kernel has them",
    "conv_state": "convolution state of a recurrent layer",
    "ssm_state": "state-space or linear-attention state of a recurrent layer",
    "state": "all state of a recurrent layer, opaque",
}

# Required features: a reader that doesn't know a set bit rejects the object. None in 1.0.
KNOWN_REQUIRED_FEATURES: Final = 0
#: Reserved for blocks of fewer tokens than block_size; no 1.0 writer sets it.
REQUIRED_PARTIAL_BLOCK: Final = 1 << 0

# Optional features: a reader may ignore a bit that it doesn't know.
#: The range checksums are filled in. Without it they are all zero.
OPTIONAL_PAYLOAD_XXH3: Final = 1 << 0
#: None of these has data in the header's extension.
KNOWN_OPTIONAL_FEATURES: Final = OPTIONAL_PAYLOAD_XXH3

# Limits, so that no length in foreign bytes can ask for more than a reader is ready to give.
MAX_TEXT_NBYTES: Final = 16384
MAX_KEY_NBYTES: Final = 131072
MAX_MANIFEST_NBYTES: Final = 16 << 20
#: Arrays and objects around a value of a manifest, which needs 8.
MAX_DEPTH: Final = 32
MAX_GROUPS: Final = 64
MAX_OBJECT_LAYERS: Final = 16384
MAX_COMPONENTS: Final = 64
MAX_AXES: Final = 8
MAX_SHARDS: Final = 65536
#: Shards of a whole grid: who has a foreign manifest can walk over all of them.
MAX_GRID_SHARDS: Final = 65536
MAX_HASH_NBYTES: Final = 64
MAX_INTEGER: Final = (1 << 53) - 1
#: Payload bytes of one object; a range's size has two zero bytes at its high end.
MAX_OBJECT_NBYTES: Final = (1 << 48) - 1

"""The configuration values that go into a layout's identity.

Everything the engine resolved counts, except what stands in the lists below: one value too many
costs a miss, one too few serves garbage. A value that a new engine version adds counts until
somebody has written down here why it doesn't.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvformat.registry import MAX_INTEGER, MAX_TEXT_NBYTES

ConfigValue = bool | int | str

#: Sections of the engine's configuration that don't change what a stored byte means.
IGNORED_SECTIONS: Final[dict[str, str]] = {
    "parallel_config": "how work is spread over devices; the shard grid says what is stored",
    "scheduler_config": "when tokens are computed, not what they come to",
    "device_config": "where tensors live; how kernels pack them is the value kv_packing",
    "load_config": "how weights are read; which ones is the weights identity",
    "offload_config": "where weights wait",
    "compilation_config": "how kernels are built: rounding at most",
    "kernel_config": "which of several equivalent kernels runs: rounding at most",
    "lora_config": "of requests with an adapter; what counts of it is in the adapter's identity",
    "kv_transfer_config": "this connector's own options",
    "kv_events_config": "reporting",
    "ec_transfer_config": "encoder outputs, hashed into the block hash by content",
    "ec_manager_config": "encoder outputs, hashed into the block hash by content",
    "aux_output_config": "what is returned besides tokens",
    "structured_outputs_config": "sampling",
    "watermark_config": "sampling",
    "reasoning_config": "sampling",
    "observability_config": "reporting",
    "logging_config": "reporting",
    "profiler_config": "reporting",
    "instance_id": "a name of the process",
    "shutdown_timeout": "life of the process",
    "optimization_level": "how kernels are built: rounding at most",
    "performance_mode": "how kernels are chosen: rounding at most",
    "weight_transfer_config": "how weights are updated; which ones is the weights identity",
}

#: Single values, as ``section.field``.
IGNORED_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "names and places of the model; key and weights identity have them": (
        "model_config.model",
        "model_config.model_weights",
        "model_config.served_model_name",
        "model_config.revision",
        "model_config.hf_config_path",
        "model_config.hf_token",
        "model_config.hf_config._name_or_path",
        "model_config.hf_text_config._name_or_path",
        "model_config.hf_config._commit_hash",
        "model_config.hf_text_config._commit_hash",
        "model_config.config_format",
    ),
    "versions of software, which a rolling upgrade changes": (
        "model_config.hf_config.transformers_version",
        "model_config.hf_text_config.transformers_version",
    ),
    "text to tokens: the block hash holds the tokens": (
        "model_config.tokenizer",
        "model_config.tokenizer_mode",
        "model_config.tokenizer_revision",
        "model_config.skip_tokenizer_init",
    ),
    "sampling and what is returned": (
        "model_config.seed",
        "model_config.max_logprobs",
        "model_config.logprobs_mode",
        "model_config.use_fp64_gumbel",
        "model_config.generation_config",
        "model_config.override_generation_config",
        "model_config.logits_processors",
        "model_config.return_sampling_mask",
        "model_config.pooler_config",
        "model_config.io_processor_plugin",
        "model_config.hf_config.id2label",
        "model_config.hf_config.label2id",
        "model_config.hf_text_config.id2label",
        "model_config.hf_text_config.label2id",
    ),
    "life and memory of the process": (
        "model_config.enforce_eager",
        "model_config.enable_sleep_mode",
        "model_config.sleep_mode_backend",
        "model_config.sleep_mode_offload_cudagraph",
        "model_config.sleep_preserve_parameter_names",
        "model_config.enable_nccl_comm_suspend",
        "model_config.enable_cumem_allocator",
        "model_config.enable_trace_replay",
        "model_config.renderer_num_workers",
        "model_config.allowed_local_media_path",
        "model_config.allowed_media_domains",
        "model_config.spec_target_max_model_len",
        "cache_config.gpu_memory_utilization",
        "cache_config.kv_cache_memory_bytes",
        "cache_config.num_gpu_blocks",
        "cache_config.num_gpu_blocks_override",
        "cache_config.num_cpu_blocks",
        "cache_config.kv_cache_size_tokens",
        "cache_config.kv_cache_max_concurrency",
        "cache_config.kv_offloading_size",
        "cache_config.kv_offloading_backend",
    ),
    "which blocks are looked up and kept, not what they hold": (
        "cache_config.enable_prefix_caching",
        "cache_config.prefix_cache_retention_interval",
        "cache_config.prefix_match_unit",
        "cache_config.enable_mamba_shared_prefix_checkpoint",
        "cache_config.cache_hit_alignment_tokens",
        "cache_config.effective_attention_block_size",
        "cache_config.user_specified_block_size",
        "cache_config._block_size_resolved",
    ),
    "names, places and ranks of a draft; its weights are the value draft_weights": (
        "speculative_config.model",
        "speculative_config.revision",
        "speculative_config.code_revision",
        "speculative_config.target_model_config",
        "speculative_config.target_parallel_config",
        "speculative_config.draft_parallel_config",
        "speculative_config.draft_tensor_parallel_size",
        "speculative_config.tensor_parallel_size",
        "speculative_config.draft_load_config",
    ),
    "how many tokens are drafted and which of them are taken; no KV of those that aren't": (
        "speculative_config.num_speculative_tokens",
        "speculative_config.rejection_sample_method",
        "speculative_config.synthetic_acceptance_rates",
        "speculative_config.synthetic_acceptance_length",
        "speculative_config.draft_sample_method",
    ),
    "said by the layout itself: groups, axes, hash recipe": (
        "cache_config.block_size",
        "cache_config.hash_block_size",
        "cache_config.prefix_caching_hash_algo",
        "cache_config.kv_cache_layout",
        "cache_config.mamba_block_size",  # found out by workers; the scheduler isn't always told
        "cache_config.mamba_page_size_padded",
        "cache_config.skip_page_size_padded",
    ),
}

#: Of ``lora_config``, for requests with an adapter.
IGNORED_ADAPTER_FIELDS: Final[dict[str, str]] = {
    "max_lora_rank": "room: lower ranks are filled up with zeros, higher ones refused",
    "max_loras": "how many adapters a step computes with",
    "max_cpu_loras": "how many adapters are kept",
    "fully_sharded_loras": "how work is spread over devices",
    "specialize_active_lora": "how kernels are built",
    "default_mm_loras": "which requests get which adapter; its own identity says which it is",
    "max_lora_cls_labels": "classification heads: no KV",
}

#: Kinds of rotary embedding whose values at a position are the same whatever the longest position:
#: ``max_model_len`` counts beside all others. ``longrope`` takes other factors above the original
#: length, ``dynamic`` may stretch by the length.
_ROPE_WITHOUT_LENGTH: Final = (
    "default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional", "mrope",
)  # fmt: skip
#: Kinds of model whose code in vLLM doesn't read ``max_model_len`` for what it computes. It counts
#: beside every other: Llama 4 scales its attention above 32768, and a new model may do as much.
_MODELS_WITHOUT_LENGTH: Final = (
    "deepseek_v2", "deepseek_v3", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "llama", "mistral",
    "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip
_MODEL_SECTIONS: Final = ("model_config.", "speculative_config.draft_model_config.")

_NAMED: Final = frozenset(name for names in IGNORED_FIELDS.values() for name in names)
#: What doesn't matter of a model doesn't matter of a draft either.
_IGNORED: Final = _NAMED | {
    f"speculative_config.draft_{name}" for name in _NAMED if name.startswith("model_config.")
}
_BAD_NAME_BYTE: Final = re.compile(r"[^A-Za-z0-9_.\-\[\]]")
_MAX_NAME: Final = 255
_MAX_DEPTH: Final = 12
_ABSENT: Final = object()


def config_values(config: Any) -> dict[str, ConfigValue]:
    """Dotted names and values of everything in a ``VllmConfig`` that counts.

    Floats become their shortest text, enumerations and dtypes their names: a layout holds text,
    integers and booleans only. ``None`` is left out, so that it is no text's value, and a setting
    that a newer engine adds and nobody sets changes nothing.
    """
    values: dict[str, ConfigValue] = {}
    for section, value in _fields_of(config):
        if section not in IGNORED_SECTIONS and value is not None:
            for name, leaf in _flatten(section, value, 0):
                values[_config_name(name)] = leaf
    for section in _MODEL_SECTIONS:
        if not _length_counts(section, values):
            values.pop(f"{section}max_model_len", None)
    return _without_repetition(values)


def adapter_settings(lora_config: Any) -> str:
    """The settings that change what an adapter computes, as ``" name=value"`` each, for its
    identity."""
    settings = " ".join(
        f"{name}={leaf}"
        for field, value in sorted(_fields_of(lora_config))
        if field not in IGNORED_ADAPTER_FIELDS
        for name, leaf in _flatten(field, value, 0)
    )
    return f" {_short(settings)}"


def _length_counts(section: str, values: Mapping[str, ConfigValue]) -> bool:
    """Whether ``max_model_len`` changes what a model computes for a token.

    Source: vllm/model_executor/layers/rotary_embedding, and the models that read it.
    """
    is_known = False
    for name, value in values.items():
        if not name.startswith(section):
            continue
        *_, parent, last = name.split(".")
        is_rope = last == "rope_type" or (last == "type" and parent.startswith("rope"))
        if is_rope and value not in _ROPE_WITHOUT_LENGTH:
            return True
        if last == "model_type":
            if value not in _MODELS_WITHOUT_LENGTH:
                return True
            is_known = True
        if parent == "dual_chunk_attention_config":
            return True
    return not is_known


def _without_repetition(values: dict[str, ConfigValue]) -> dict[str, ConfigValue]:
    """Drop the text model's configuration where it says what the whole model's says."""
    whole, text = "model_config.hf_config.", "model_config.hf_text_config."
    return {
        name: value
        for name, value in values.items()
        if not (
            name.startswith(text) and values.get(whole + name.removeprefix(text), _ABSENT) == value
        )
    }


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        yield field.name, getattr(value, field.name)


def _flatten(name: str, value: Any, depth: int) -> Iterator[tuple[str, ConfigValue]]:
    if name in _IGNORED or value is None:
        return
    if depth > _MAX_DEPTH:
        raise RecursionError(f"configuration value {name} is nested too deeply to be compared")
    children = _children(value)
    if children is None:
        yield name, _leaf(value)
        return
    for key, child in children:
        yield from _flatten(f"{name}.{key}", child, depth + 1)


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Names and values inside a value, or None for one that is a value itself."""
    if isinstance(value, enum.Enum | type):
        return None
    if dataclasses.is_dataclass(value):
        return _fields_of(value)
    if callable(getattr(value, "to_dict", None)):  # a transformers configuration, after overrides
        value = value.to_dict()
    if isinstance(value, Mapping):
        # An empty mapping counts as a value, so that a first entry is a difference.
        return iter([(str(key), value[key]) for key in value]) if value else None
    if isinstance(value, list | tuple) and any(_children(item) is not None for item in value):
        return iter([(f"[{index}]", item) for index, item in enumerate(value)])
    if hasattr(value, "__dict__") and type(value).__module__.startswith("vllm"):
        # Quantisation configurations are plain objects; their class counts as well.
        return iter([("class", type(value)), *sorted(vars(value).items())])
    return None


def _leaf(value: Any) -> ConfigValue:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_INTEGER else str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return _short(json.dumps([None if item is None else _leaf(item) for item in value]))
    if isinstance(value, set | frozenset):
        return _short(json.dumps(sorted(str(_leaf(item)) for item in value)))
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if str(value) == object.__repr__(value):
        # Its text would hold an address, which no other process shares.
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return _short(str(value))


def _short(text: str) -> str:
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_TEXT_NBYTES // 4:
        return data.decode("utf-8")
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _config_name(name: str) -> str:
    name = _BAD_NAME_BYTE.sub(lambda match: f"-{ord(match[0]):x}-", name)
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[: _MAX_NAME - 33]}.{hashlib.sha256(name.encode()).hexdigest()[:32]}"

"""Configuration values: what counts, by name, and what doesn't."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import pytest

from kvformat.layout import Identity
from kvformat_connector.resolved import (
    IGNORED_ADAPTER_FIELDS,
    IGNORED_FIELDS,
    IGNORED_SECTIONS,
    adapter_settings,
    config_values,
)


class Backend(enum.Enum):
    FAST = 1


class HubConfig:
    """A transformers configuration, as far as this matters."""

    def __init__(self, **values: object) -> None:
        self.values = values

    def to_dict(self) -> dict[str, object]:
        return {"_name_or_path": "/somewhere", "transformers_version": "5", **self.values}


@dataclass
class ModelConfig:
    model: str = "/models/a"
    dtype: str = "bfloat16"
    seed: int = 0
    rope_scale: float = 0.1
    hf_config: object = field(default_factory=lambda: HubConfig(rope={"theta": 1e4}, layers=[1, 2]))
    hf_text_config: object = field(
        default_factory=lambda: HubConfig(rope={"theta": 1e4}, layers=[1, 2])
    )


@dataclass
class SizedModelConfig(ModelConfig):
    max_model_len: int = 4096


@dataclass
class SchedulerConfig:
    max_num_seqs: int = 8


@dataclass
class NewSection:
    backend: Backend = Backend.FAST
    wide: int = 1 << 60
    missing: None = None


@dataclass
class Config:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    new_section: NewSection = field(default_factory=NewSection)
    lora_config: None = None


def test_values_are_flat_and_of_the_types_a_layout_holds() -> None:
    """Nested values get dotted names, floats and enumerations become text, names of files go."""
    assert config_values(Config()) == {
        "model_config.dtype": "bfloat16",
        "model_config.rope_scale": "0.1",
        "model_config.hf_config.rope.theta": "10000.0",
        "model_config.hf_config.layers": "[1, 2]",
        "new_section.backend": "FAST",
        "new_section.wide": str(1 << 60),
    }


def test_a_value_nobody_has_judged_counts() -> None:
    """A section and a field that no list names are in: one too many costs only a miss."""
    assert "new_section" not in IGNORED_SECTIONS
    before = config_values(Config())
    after = config_values(Config(new_section=NewSection(wide=2)))
    assert {name for name in before if before[name] != after[name]} == {"new_section.wide"}


@pytest.mark.parametrize(
    ("hub", "counts"),
    [
        ({}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, False),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, False),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, False),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "one that is new"},
                }
            },
            True,
        ),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, True),
        ({"text_config": {"model_type": "llama4_text"}}, True),
        ({"text_config": {"model_type": "one that is new"}}, True),
        ({"text_config": {"model_type": "qwen3"}}, False),
        ({"model_type": None}, True),
    ],
)
def test_the_longest_prompt_counts_where_positions_depend_on_it(
    hub: dict[str, object], counts: bool
) -> None:
    """Servers of other ``max_model_len`` share where what is computed for a token is the same: by
    the kind of rotary embedding, and by the kind of model. The same holds for a draft."""

    known = {"model_type": "llama", **hub}

    def values(max_model_len: int) -> dict[str, object]:
        model = SizedModelConfig(max_model_len=max_model_len, hf_config=HubConfig(**known))
        return config_values(Config(model_config=model))

    def draft_values(max_model_len: int) -> dict[str, object]:
        draft = SizedModelConfig(max_model_len=max_model_len, hf_config=HubConfig(**known))
        return config_values(
            WithDraft(speculative_config=SpeculativeConfig(draft_model_config=draft))
        )

    assert (values(4096) != values(2048)) == counts
    assert (draft_values(4096) != draft_values(2048)) == counts


def test_what_cannot_matter_does_not_count() -> None:
    """Every ignored field and section leaves the values as they are."""
    other = Config(
        model_config=ModelConfig(model="/models/b", seed=7),
        scheduler_config=SchedulerConfig(max_num_seqs=1),
    )
    assert config_values(other) == config_values(Config())


def test_a_text_model_that_differs_from_the_whole_is_seen() -> None:
    """The text model's values are dropped only where they repeat the whole model's."""
    config = Config()
    config.model_config.hf_text_config = HubConfig(rope={"theta": 5e5}, layers=[1, 2])
    assert config_values(config)["model_config.hf_text_config.rope.theta"] == "500000.0"


def test_a_setting_that_is_not_set_is_no_text() -> None:
    """None is no value, so it differs from the text ``none``, in a list too; and a setting that a
    newer engine adds and nobody sets keeps the cache."""

    def values(missing: object) -> dict[str, object]:
        config = Config()
        config.new_section.missing = missing  # type: ignore[assignment]
        return config_values(config)

    assert "new_section.missing" not in values(None)
    assert values("none")["new_section.missing"] == "none"
    assert values([1, None]) != values([1, "none"])


@dataclass
class LoRAConfig:
    max_lora_rank: int = 16
    lora_dtype: str = "float32"
    target_modules: list[str] | None = None
    some_new_field: int = 1


def test_settings_of_adapters_count_where_they_change_what_one_computes() -> None:
    """Dtype and modules are part of an adapter's identity, and so is what nobody has judged yet;
    room for ranks is not."""
    settings = adapter_settings(LoRAConfig())
    assert settings == " lora_dtype=float32 some_new_field=1"
    assert adapter_settings(LoRAConfig(max_lora_rank=64)) == settings
    assert adapter_settings(LoRAConfig(target_modules=["q_proj"])) == (
        ' lora_dtype=float32 some_new_field=1 target_modules=["q_proj"]'
    )
    assert config_values(Config()) == config_values(Config(lora_config=LoRAConfig()))  # type: ignore[arg-type]


def test_any_name_and_value_fits_into_an_identity() -> None:
    """Keys with odd characters, long names and objects without a text of their own are taken, and
    the same values give the same text in every process."""
    config = Config()
    config.model_config.hf_config = HubConfig(
        **{"a/b c": 1, "x" * 400: 2, "object": object(), "text": "\ud800" * 5, "big": "y" * 20_000}
    )
    values = config_values(config)
    Identity(tenant="t", model="m", weights="w", config=values)
    assert values["model_config.hf_config.object"] == "builtins.object"
    assert values == config_values(config)


@dataclass
class CacheConfig:
    mamba_block_size: int = 32
    mamba_ssm_cache_dtype: str = "auto"


@dataclass
class HybridConfig:
    cache_config: CacheConfig = field(default_factory=CacheConfig)


def test_the_block_size_of_a_state_is_said_by_its_group_alone() -> None:
    """Workers find it out, and a scheduler in another process keeps what it began with: the two
    must agree none the less. The dtype of a state counts."""
    values = config_values(HybridConfig())
    assert config_values(HybridConfig(CacheConfig(mamba_block_size=1056))) == values
    assert config_values(HybridConfig(CacheConfig(mamba_ssm_cache_dtype="float32"))) != values


def test_every_ignored_value_has_a_reason() -> None:
    """The lists are for people: no entry without a why, no field under an ignored section."""
    assert all(why for why in (*IGNORED_SECTIONS.values(), *IGNORED_FIELDS,
                                 *IGNORED_ADAPTER_FIELDS.values()))  # fmt: skip
    names = [name for names in IGNORED_FIELDS.values() for name in names]
    assert len(names) == len(set(names))
    assert not [name for name in names if name.split(".")[0] in IGNORED_SECTIONS]


@dataclass
class SpeculativeConfig:
    num_speculative_tokens: int = 2
    method: str = "draft_model"
    draft_model_config: ModelConfig = field(default_factory=ModelConfig)
    target_model_config: ModelConfig = field(default_factory=ModelConfig)


@dataclass
class WithDraft:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    speculative_config: SpeculativeConfig | None = field(default_factory=SpeculativeConfig)


def test_a_draft_counts_by_what_it_is_and_not_by_where_it_lies() -> None:
    """The draft's KV is in the objects: its configuration counts, its path and the number of
    drafted tokens don't, and the model is not listed twice."""
    values = config_values(WithDraft())
    assert values["speculative_config.draft_model_config.rope_scale"] == "0.1"
    assert not [name for name in values if "target_model_config" in name]
    moved = WithDraft()
    assert moved.speculative_config is not None
    moved.speculative_config.num_speculative_tokens = 5
    moved.speculative_config.draft_model_config.model = "/elsewhere"
    assert config_values(moved) == values
    moved.speculative_config.draft_model_config.rope_scale = 0.2
    assert config_values(moved) != values

"""Which part of a model one worker process holds: its stage, its heads, and who holds the same.

Source: vllm/config/parallel.py, vllm/v1/kv_cache_interface.py (``max_tp_shards``).
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any, Final

import msgspec

from kvformat.layout import Component
from kvformat.objectmap import ObjectMap, head_interval
from kvformat_connector.engine.refusal import refuse

_LAYER_INDEX: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process stands in the engine's tensor and pipeline parallel grid.

    ``layer_names`` are those of its pipeline stage; None is all of the model's.
    """

    tensor_size: int = 1
    tensor_rank: int = 0
    num_stages: int = 1
    stage: int = 0
    layer_names: frozenset[str] | None = None

    def has_layer(self, name: str) -> bool:
        """Whether the layer is in this process's stage."""
        return self.layer_names is None or name in self.layer_names


class Replicas(msgspec.Struct, frozen=True):
    """One of ``num`` ranks that hold the same bytes, as it is with heads that are replicated."""

    num: int = 1
    index: int = 0

    def writes(self, block_hash: bytes) -> bool:
        """Whether this rank is the one that saves the block: each block has one, spread evenly."""
        return int.from_bytes(block_hash[-8:], "big") % self.num == self.index


def ranks_of(parallel_config: Any, layer_names: frozenset[str] | None = None) -> Ranks:
    """The place of this process, from a ``ParallelConfig``."""
    tensor_size = parallel_config.tensor_parallel_size
    num_stages = parallel_config.pipeline_parallel_size
    rank = getattr(parallel_config, "rank", 0)
    return Ranks(
        tensor_size=tensor_size,
        tensor_rank=rank % tensor_size,
        num_stages=num_stages,
        stage=rank // tensor_size % num_stages,
        layer_names=layer_names,
    )


def layer_index(name: str) -> int:
    """The number in a layer's name, as ``model.layers.7.self_attn.attn`` has it; 0 without one."""
    match = _LAYER_INDEX.search(name)
    return int(match[1]) if match else 0


def num_kv_heads_of_model(vllm_config: Any, name: str, spec: Any, ranks: Ranks) -> int:
    """KV heads of a layer over all tensor ranks, from the number that one rank has.

    A rank has ``max(1, total // tensor_size)`` heads, so that 1 is not enough to know the total:
    the model's configuration tells.
    """
    here, size = int(spec.num_kv_heads), ranks.tensor_size
    if size == 1:
        return here
    if (num_shards := getattr(spec, "max_tp_shards", None)) is not None:
        return here * min(size, int(num_shards))
    if here > 1:
        return here * size
    total = _configured_heads(vllm_config, name)
    if max(1, total // size) != here:
        refuse(
            f"kv cache spec of layer {name}",
            f"num_kv_heads={here}",
            f"the model has {total} and tensor_parallel_size is {size}",
        )
    return min(total, size)


def local_heads(described: Component, ranks: Ranks) -> tuple[int, int]:
    """First and last-plus-one head of the whole model that a rank holds; (0, 1) without heads."""
    if "head" not in described.axes:
        return 0, 1
    return _rank_heads(described.num_heads, ranks.tensor_size, ranks.tensor_rank)


def first_rank_cut(num_heads: int, num_shards: int, ranks: Ranks) -> int | None:
    """The first tensor rank in whose heads, and not at their end, a head shard ends; None where
    every shard lies in one rank, and so has one writer."""
    if num_heads < ranks.tensor_size:
        return None
    for rank in range(ranks.tensor_size):
        _, end = _rank_heads(num_heads, ranks.tensor_size, rank)
        if head_interval(num_heads, num_shards, end * num_shards // num_heads)[0] != end:
            return rank
    return None


def replicas_of(object_map: ObjectMap, ranks: Ranks) -> Replicas:
    """This rank among the tensor ranks that hold all of an object.

    Meant for an object that this rank holds; another one's answer means nothing.
    """
    shard, num_shards = object_map.shard.head, object_map.layout.grid.head_shards
    parts = {part.component for part in object_map.components if part.nbytes}
    holders = [
        rank
        for rank in range(ranks.tensor_size)
        if all(
            _covers(
                _rank_heads(part.num_heads, ranks.tensor_size, rank)
                if "head" in part.axes
                else (0, 1),
                head_interval(part.num_heads, num_shards, shard),
            )
            for part in parts
        )
    ]
    if ranks.tensor_rank not in holders:
        return Replicas()
    return Replicas(len(holders), holders.index(ranks.tensor_rank))


def merge_over_tensor_ranks(ranks: Ranks, names: Set[str]) -> set[str]:
    """The union of what every tensor rank of this stage says. All of them must call it.

    A layer's output is summed over these ranks, so what one of them computed on garbage all of
    them have.
    """
    if ranks.tensor_size == 1:
        return set(names)
    import torch.distributed
    from vllm.distributed.parallel_state import get_tp_group

    said: list[set[str]] = [set() for _ in range(ranks.tensor_size)]
    torch.distributed.all_gather_object(said, set(names), group=get_tp_group().cpu_group)
    return set().union(*said)


def wait_for_tensor_ranks(ranks: Ranks) -> None:
    """Return when every tensor rank of this stage has called it."""
    merge_over_tensor_ranks(ranks, set())


def _rank_heads(num_heads: int, size: int, rank: int) -> tuple[int, int]:
    if num_heads >= size:
        return rank * num_heads // size, (rank + 1) * num_heads // size
    head = rank * num_heads // size
    return head, head + 1


def _covers(held: tuple[int, int], wanted: tuple[int, int]) -> bool:
    return wanted[0] >= wanted[1] or (held[0] <= wanted[0] and wanted[1] <= held[1])


def _configured_heads(vllm_config: Any, name: str) -> int:
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    num_layers = int(model.get_total_num_hidden_layers())
    index = layer_index(name)
    if draft is not None and (name.startswith("draft_model.") or index >= num_layers):
        return int(draft.get_total_num_kv_heads())
    try:
        # A model whose layers differ has one entry a layer.
        return int(model.model_arch_config[index].total_num_kv_heads)
    except (TypeError, KeyError, IndexError, AttributeError):
        return int(model.get_total_num_kv_heads())

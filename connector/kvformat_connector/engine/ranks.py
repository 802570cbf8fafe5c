"""Which part of a model one worker process holds: its stage, its heads, and who holds the same.

Source: vllm/config/parallel.py, vllm/v1/kv_cache_interface.py (``max_tp_shards``).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import msgspec


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process stands in the engine's tensor and pipeline parallel grid."""

    tensor_size: int = 1
    tensor_rank: int = 0
    num_stages: int = 1
    stage: int = 0


class Replicas(msgspec.Struct, frozen=True):
    """One of ``num`` ranks that hold the same bytes, as it is with heads that are replicated."""

    num: int = 1
    index: int = 0

    def writes(self, block_hash: bytes) -> bool:
        """Whether this rank is the one that saves the block: each block has one, spread evenly."""
        # The last bytes: an engine may count in the first ones.
        return int.from_bytes(block_hash[-8:], "big") % self.num == self.index


def ranks_of(parallel_config: Any) -> Ranks:
    """The place of this process, from a ``ParallelConfig``."""
    tensor_size = parallel_config.tensor_parallel_size
    num_stages = parallel_config.pipeline_parallel_size
    rank = parallel_config.rank
    return Ranks(
        tensor_size=tensor_size,
        tensor_rank=rank % tensor_size,
        num_stages=num_stages,
        stage=rank // tensor_size % num_stages,
    )


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

"""One rank's worker over memory of its own, and the step plans that a scheduler would send it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from shapes import model

from kvformat import Layout, component
from kvformat.key import layout_namespace
from kvformat.stores import Store
from kvformat_connector.config import parse_options
from kvformat_connector.messages import BlockList, RequestStep, StepPlan
from kvformat_connector.stats import Counters
from kvformat_connector.worker import Worker


class BenchRank:
    """A worker of an engine on CPU: ``num_layers`` layers of ``num_blocks`` blocks."""

    def __init__(
        self,
        store: Store,
        *,
        num_layers: int,
        num_blocks: int,
        num_heads: int = 8,
        head_size: int = 64,
        block_size: int = 128,
        **options: Any,
    ) -> None:
        packed = block_size * head_size
        parts = (component("kv", "float16", head=num_heads, kv=2, packed=packed),)
        self.layout: Layout = model(num_layers, parts)
        self.layer_names = [layer.name for layer in self.layout.groups[0].layers]
        self.counters = Counters()
        self.namespace = layout_namespace(self.layout)
        self.worker = Worker(
            self.layout,
            store,
            parse_options({"store": "memory://", **options}),
            self.counters,
        )
        shape = (num_blocks, num_heads, block_size, 2 * head_size)
        self.memory = {name: torch.ones(shape, dtype=torch.float16) for name in self.layer_names}
        self.worker.register(self.memory)
        self.layer_nbytes = self.memory[self.layer_names[0]][0].nbytes

    def save(self, plan: StepPlan) -> None:
        """A step that saves, up to the last commit."""
        self.worker.begin_step(plan)
        for name in self.layer_names:
            self.worker.save_layer(name)
        self.worker.end_step()
        assert self.worker.settle(60)

    def load(self, plan: StepPlan) -> None:
        """A step that loads, without any computation."""
        self.worker.begin_step(plan)
        for name in self.layer_names:
            self.worker.wait_layer(name)
        self.worker.end_step()
        assert not self.worker.take_failed_block_ids()


def block_hashes(num_blocks: int, tag: str = "") -> list[bytes]:
    """Made-up hashes; another tag gives others."""
    return [hashlib.sha256(f"{tag}{index}".encode()).digest() for index in range(num_blocks)]


def step(hashes: list[bytes], *, loads: bool, request_id: str = "r") -> StepPlan:
    """One request that loads, or saves, its first blocks."""
    lists = [BlockList(object_index=0, block_hashes=hashes, block_ids=(list(range(len(hashes))),))]
    return StepPlan(
        requests=[RequestStep(request_id=request_id, **{"loads" if loads else "saves": lists})]
    )

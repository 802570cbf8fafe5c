"""A model runner small enough to read, around what is real: vLLM 0.30's scheduler and connector
calls, vllm-ascend's hook functions, and our connector.

A token's bytes in a layer follow from the bytes of the token before it in that layer, as they
stand in the cache, and from the token; the answer follows from all bytes that attention reads. So
KV that is wrong, late or missing changes the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm.distributed.kv_transfer.kv_transfer_state as transfer_state
import vllm.platforms
from models import BLOCK_SIZE, NUM_BLOCKS, Model, Tensors
from stand_ins import COMPUTE
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm_ascend.attention.utils import (
    maybe_save_kv_layer_to_connector,
    notify_kv_cache_written,
    wait_for_kv_layer_from_connector,
)

#: Computes one layer: writes the step's tokens, and later reads what attention reads.
Compute = Callable[[], None]


@dataclass(frozen=True)
class Layer:
    """What the engine computes one after the other."""

    name: str
    write: Compute
    attend: Compute
    is_prefill: bool
    kv_cache: list[torch.Tensor]


Hooks = Callable[[Layer], None]


def gqa_hooks(layer: Layer) -> None:
    """vLLM's own decorator around the layer, and ``reshape_and_cache`` (attention_v1.py), which
    doesn't know the layer's name."""

    @maybe_transfer_kv_layer
    def unified_attention(layer_name: str) -> None:
        layer.write()
        notify_kv_cache_written()
        layer.attend()

    unified_attention(layer.name)


def mla_hooks(layer: Layer) -> None:
    """``_mla_preprocess`` and ``forward`` (mla_v1.py): nothing waits for a layer where all the
    requests of a batch decode."""
    if layer.is_prefill:
        wait_for_kv_layer_from_connector(layer.name)
    layer.write()
    notify_kv_cache_written(layer.name)
    layer.attend()
    maybe_save_kv_layer_to_connector(layer.name, layer.kv_cache)


def sfa_hooks(layer: Layer) -> None:
    """``forward`` (sfa_v1.py) of a layer that wasn't told its name."""
    wait_for_kv_layer_from_connector(layer.name)
    layer.write()
    notify_kv_cache_written("")
    layer.attend()
    maybe_save_kv_layer_to_connector(layer.name, layer.kv_cache)


def with_recurrent_layers(hooks: Hooks) -> Hooks:
    """A GDN or KDA layer (gdn.py, kimi_kda.py) before each layer: it waits under its own name, and
    saves with an empty name and nothing."""

    def both(layer: Layer) -> None:
        wait_for_kv_layer_from_connector(layer.name.replace("self_attn.attn", "linear_attn"))
        maybe_save_kv_layer_to_connector("", [])
        hooks(layer)
        maybe_save_kv_layer_to_connector("", [])

    return both


@dataclass
class Served:
    """What one request came to."""

    token_ids: list[int] = field(default_factory=list)
    num_hit_tokens: int = 0


@contextmanager
def on_platform(platform: Platform) -> Iterator[None]:
    """Another platform in place of the one that vLLM has found."""
    before = vllm.platforms.current_platform
    vllm.platforms._current_platform = platform
    try:
        yield
    finally:
        vllm.platforms._current_platform = before


def make_config(model: Model, folder: Path, store: str, **options: Any) -> VllmConfig:
    """vLLM's configuration of an engine with our connector. Made on vLLM's own platform: what
    vllm-ascend's changes in it needs a CANN toolkit."""
    arguments = EngineArgs(
        model=model.write_config(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=256,
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVFormatConnector",
            kv_connector_module_path="kvformat_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": store, "model_identity": "contract", **options},
        ),
    )
    with on_platform(CpuPlatform()):
        config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


class AscendEngine:
    """One engine. Use it on vllm-ascend's platform."""

    def __init__(self, model: Model, config: VllmConfig, hooks: Hooks) -> None:
        self._model = model
        self._config = config
        self._hooks = hooks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        cache = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(model.layer_names, model.spec)],
        )
        self.scheduler = Scheduler(
            config,
            generate_scheduler_kv_cache_config([cache]),
            StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        self.connector: Any = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, cache
        )
        self.kv_caches = model.allocate()
        self.connector.register_kv_caches(self.kv_caches)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.connector.get_handshake_metadata()}
        )
        transfer_state._KV_CONNECTOR_AGENT = self.connector
        contexts = config.compilation_config.static_forward_context
        for name in model.hooked:
            contexts[name] = SimpleNamespace(kv_cache=self.kv_caches[name])
        self._bytes = {
            name: [tensor.view(torch.uint8).numpy() for tensor in self.components(name)]
            for name in model.hooked
        }
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._num_requests = 0

    def close(self) -> None:
        """End the connector's both sides; what is being saved is finished."""
        transfer_state._KV_CONNECTOR_AGENT = None
        self.connector.shutdown()
        self.scheduler.connector.shutdown()

    def components(self, name: str) -> Tensors:
        """All tensors that a layer's hooks cover, in object order."""
        indexer = name.removesuffix(".attn") + ".indexer.k_cache"
        return (*self.kv_caches[name], *self.kv_caches.get(indexer, ()))

    def last_blocks(self, num_blocks: int) -> list[bytes]:
        """The first blocks of the last request as they stand in the cache: the bytes of each, layer
        by layer, component by component."""
        table = self._tables[f"r{self._num_requests}"]
        return [
            b"".join(
                array[block].tobytes() for name in self._model.hooked for array in self._bytes[name]
            )
            for block in table[:num_blocks]
        ]

    def serve(self, prompt: list[int], num_new_tokens: int = 3) -> Served:
        """Answer one prompt."""
        self._num_requests += 1
        request = Request(
            request_id=f"r{self._num_requests}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True
            ),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._tokens[request.request_id] = prompt
        self.scheduler.add_request(request)
        served = Served()
        while self.scheduler.has_unfinished_requests():
            self._step(served)
        self._step(served)  # tells the worker that the request is finished
        return served

    def _step(self, served: Served) -> None:
        plan = self.scheduler.schedule()
        for new in plan.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            served.num_hit_tokens = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self._tables[name] = []
            self._tables[name] += blocks[0] if blocks else []
        computed = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.connector.handle_preemptions(plan.kv_connector_metadata)
        if not plan.total_num_scheduled_tokens:
            output = KVConnectorModelRunnerMixin.kv_connector_no_forward(plan, self._config)
        else:
            output = self._forward(plan, computed)
        for outputs in self.scheduler.update_from_output(plan, output).values():
            for result in outputs.outputs:
                served.token_ids += result.new_token_ids
                self._tokens[result.request_id] = (
                    self._tokens[result.request_id] + result.new_token_ids
                )

    def _forward(self, plan: Any, computed: dict[str, int]) -> ModelRunnerOutput:
        digests = {name: hashlib.sha256() for name in plan.num_scheduled_tokens}
        metadata = {name: object() for name in self._model.hooked}
        with (
            set_forward_context(metadata, self._config, slot_mapping={}),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(plan) as connector_output,
        ):
            for name in self._model.hooked:
                self._hooks(self._layer(name, plan.num_scheduled_tokens, computed, digests))
        COMPUTE.synchronize()
        names = list(digests)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                [int.from_bytes(digests[name].digest()[:4], "little") % 500]
                if computed[name] + plan.num_scheduled_tokens[name] >= len(self._tokens[name])
                else []
                for name in names
            ],
            kv_connector_output=connector_output,
        )

    def _layer(
        self, name: str, num_tokens: dict[str, int], computed: dict[str, int], digests: Any
    ) -> Layer:
        def write() -> None:
            for request_id, num in num_tokens.items():
                start = computed[request_id]
                self._write(name, request_id, start, start + num)

        def attend() -> None:
            for request_id, num in num_tokens.items():
                for data in self.kv(name, self._tables[request_id], computed[request_id] + num):
                    digests[request_id].update(data)

        return Layer(
            name=name,
            write=lambda: COMPUTE.give(write),
            attend=lambda: COMPUTE.give(attend),
            is_prefill=any(num > 1 for num in num_tokens.values()),
            kv_cache=list(self.components(name)),
        )

    def kv(self, name: str, table: list[int], num_tokens: int) -> Iterator[bytes]:
        """What stands in the cache of a layer for the first tokens of a request, in pieces."""
        for start in range(0, num_tokens, BLOCK_SIZE):
            for array in self._bytes[name]:
                yield array[table[start // BLOCK_SIZE], : num_tokens - start].tobytes()

    def _write(self, name: str, request_id: str, start: int, stop: int) -> None:
        table, tokens = self._tables[request_id], self._tokens[request_id]
        for position in range(start, stop):
            seed = hashlib.sha256(tokens[position].to_bytes(4, "little"))
            if position:
                before = (position - 1) % BLOCK_SIZE
                for array in self._bytes[name]:
                    seed.update(array[table[(position - 1) // BLOCK_SIZE], before].tobytes())
            seed.update(name.encode())
            for array in self._bytes[name]:
                seed.update(b"component")
                row = array[table[position // BLOCK_SIZE], position % BLOCK_SIZE]
                data = hashlib.shake_128(seed.digest()).digest(row.size)
                row[:] = np.frombuffer(data, np.uint8).reshape(row.shape)

"""An engine small enough to read: a scheduler, one worker and its memory, without vLLM.

It calls the connector's two sides in the order in which vLLM does. "Computing" a block writes bytes
that follow from all tokens up to the block's end and from the layer, so a wrong byte anywhere in a
cache shows in what is computed or loaded later.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from kvformat.key import Namespace, layout_namespace
from kvformat.layout import Group, HashRecipe, Identity, Layer, Layout, ShardGrid, component
from kvformat.stores.protocol import Store
from kvformat_connector.config import Options, parse_options
from kvformat_connector.engine import LoadedAdapters, Ranks
from kvformat_connector.loadpolicy import load_policy
from kvformat_connector.messages import WorkerReport
from kvformat_connector.scheduler import Scheduler
from kvformat_connector.stats import Counters
from kvformat_connector.worker import Worker

BLOCK_SIZE = 4
NUM_HEADS = 2
HEAD_SIZE = 8
NUM_BLOCKS = 64
PACKED = BLOCK_SIZE * HEAD_SIZE


def prompt(num_tokens: int, start: int = 1) -> list[int]:
    """Tokens; another start gives blocks that nobody shares."""
    return [(start + index) % 250 for index in range(num_tokens)]


#: A prompt, and the blocks that it fills.
TOKENS = prompt(27)
NUM_FULL = 6


def make_layout(
    *, weights: str = "commit:1", dtype: str = "float32", num_layers: int = 3, tenant: str = "t"
) -> Layout:
    """A layout like the one that a vLLM on CPU gives."""
    return Layout(
        identity=Identity(tenant=tenant, model="m", weights=weights, config={"rope_theta": "1e4"}),
        hash=HashRecipe(algorithm="sha256", seed="00", block_size=BLOCK_SIZE, digest_nbytes=32),
        groups=(
            Group(
                kind="full_attention",
                block_size=BLOCK_SIZE,
                layers=tuple(
                    Layer(
                        name=f"layer{index}",
                        components=(component("kv", dtype, head=NUM_HEADS, kv=2, packed=PACKED),),
                    )
                    for index in range(num_layers)
                ),
            ),
        ),
        objects=((0,),),
        grid=ShardGrid(layer_starts=((0,),)),
    )


class Tensor:
    """As much of a torch tensor as the connector reads, over a numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = array.shape

    def dim(self) -> int:
        return self.array.ndim

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> SimpleNamespace:
        array = self.array
        return SimpleNamespace(data_ptr=lambda: array.ctypes.data, nbytes=lambda: array.nbytes)


@dataclass
class Request:
    """What the connector reads of a vLLM request."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int = 0
    lora_request: object = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)
        parent = b""
        for start in range(0, len(self.tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            parent = hashlib.sha256(
                parent + bytes(self.tokens[start : start + BLOCK_SIZE])
            ).digest()
            self.block_hashes.append(parent)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class Served:
    """What one request came to: the KV bytes of its blocks, ``[num_blocks][num_layers]``."""

    kv: list[list[bytes]]
    num_hit_tokens: int
    failed_block_ids: set[int]


class SimulatedEngine:
    """One engine over one store."""

    def __init__(self, store: Store, layout: Layout | None = None, **options: object) -> None:
        self.layout = layout or make_layout()
        self.namespace: Namespace = layout_namespace(self.layout)
        self.options: Options = parse_options({"store": "memory://", **options})
        self.counters = Counters()
        policy = load_policy(self.layout, Ranks(), self.options)
        self.scheduler = Scheduler(
            self.layout, store, self.options, self.counters, load_policy=policy
        )
        #: What the engine has loaded: adapters, when it is told to or a request needs them.
        self.loaded_adapters = LoadedAdapters()
        self._adapter_numbers: set[int] = set()
        self.worker = Worker(
            self.layout, store, self.options, self.counters, adapters=self.loaded_adapters
        )
        dtype = np.dtype(np.float32 if "32" in self._dtype() else np.float16)
        self.memory = {
            layer.name: np.zeros((NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), dtype)
            for layer in self.layout.groups[0].layers
        }
        self.worker.register({name: Tensor(array) for name, array in self.memory.items()})
        self._next_block = 0
        self.tables: dict[str, list[int]] = {}
        self.reports: list[WorkerReport] = []
        #: Whether memory is used for something else between two steps.
        self.forgets = False
        #: Hooks for tests: called before a layer is computed.
        self.before_layer = lambda layer_index: None

    def _dtype(self) -> str:
        return self.layout.groups[0].layers[0].components[0].dtype

    def serve(self, request: Request, *, chunk: int = 1 << 30) -> Served:
        """Serve one request in prefill chunks of at most ``chunk`` tokens; failed loads are
        recomputed, as vLLM does with ``kv_load_failure_policy=recompute``."""
        hit = self.match(request)
        waits = bool(hit) and self.scheduler.loads_in_bulk(request.request_id)
        block_ids = self.allocate(-(-request.num_tokens // BLOCK_SIZE))
        self.scheduler.allocated(request, hit, lambda: (block_ids,))
        failed_block_ids: set[int] = set()
        computed, is_new = hit, True
        if waits:
            failed_block_ids = self.receive(request.request_id)
            if bad := [index for index, block in enumerate(block_ids) if block in failed_block_ids]:
                computed = bad[0] * BLOCK_SIZE
            # The engine asks for nothing more, and tells the connector that it schedules it now.
            self.scheduler.allocated(request, 0, lambda: (block_ids,))
        while computed < request.num_tokens:
            if self.forgets:
                for array in self.memory.values():
                    array[:] = 7
            num_tokens = min(chunk, request.num_tokens - computed)
            failed = self.step([(request, block_ids if is_new else None, computed, num_tokens)])
            computed += num_tokens
            is_new = False
            if bad := [index for index, block in enumerate(block_ids) if block in failed]:
                failed_block_ids |= failed
                computed = bad[0] * BLOCK_SIZE
        self.scheduler.finished(request.request_id)
        return Served(self.kv_of(request, block_ids), hit, failed_block_ids)

    def match(self, request: Request, num_local_tokens: int = 0) -> int:
        """What is promised to a request, asked for until it's known."""
        deadline = time.monotonic() + 30
        while (found := self.scheduler.match(request, num_local_tokens)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return found

    def load_adapter(self, lora_request: object) -> None:
        """Load an adapter, or load it again."""
        number, path = lora_request.lora_int_id, lora_request.lora_path  # type: ignore[attr-defined]
        self._adapter_numbers.add(number)
        self.loaded_adapters.load(number, path, lambda: None)

    def receive(self, request_id: str) -> set[int]:
        """Steps without the request, until it has been loaded; answers the blocks that failed."""
        failed: set[int] = set()
        deadline = time.monotonic() + 30
        received: set[str] = set()
        while request_id not in received:
            assert time.monotonic() < deadline
            failed |= self.step([])
            received |= self.worker.take_received()[0]
            failed |= self.worker.take_failed_block_ids()
        return failed

    def allocate(self, num_blocks: int) -> list[int]:
        """Fresh blocks, round and round through the memory."""
        ids = [(self._next_block + index) % NUM_BLOCKS for index in range(num_blocks)]
        self._next_block = (self._next_block + num_blocks) % NUM_BLOCKS
        return ids

    def step(
        self,
        scheduled: list[tuple[Request, list[int] | None, int, int]],
        *,
        acknowledge: bool = True,
    ) -> set[int]:
        """One engine step; answers the block ids that failed to load.

        ``scheduled`` holds request, its block ids where it is new, tokens computed so far, and
        tokens to compute. ``acknowledge=False`` keeps the worker's report from the scheduler, as
        when the next step is scheduled before this one's outcome is known.
        """
        plan = self.scheduler.plan_step(self._output(scheduled))
        for request, *_ in scheduled:
            lora = request.lora_request
            if lora is not None and lora.lora_int_id not in self._adapter_numbers:  # type: ignore[attr-defined]
                self.load_adapter(lora)
        self.worker.begin_step(plan)
        for index, name in enumerate(self.memory):
            self.before_layer(index)
            self.worker.wait_layer(name)
            for request, _, computed, num_tokens in scheduled:
                self._compute(request, name, computed, num_tokens)
            self.worker.save_layer(name)
        self.worker.end_step()
        # Commits come after the step; these tests look at the store right then.
        assert self.worker.settle(10)
        failed = self.worker.take_failed_block_ids()
        report = self.worker.take_report()
        if report is not None:
            self.reports.append(report)
            if acknowledge:
                self.scheduler.reported(report)
        return failed

    def kv_of(self, request: Request, block_ids: list[int]) -> list[list[bytes]]:
        """Bytes of the full blocks of a request."""
        full = len(request.tokens) // BLOCK_SIZE
        return [
            [self.memory[name][block_id].tobytes() for name in self.memory]
            for block_id in block_ids[:full]
        ]

    def _output(
        self, scheduled: list[tuple[Request, list[int] | None, int, int]]
    ) -> SimpleNamespace:
        new, cached = (
            [],
            SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
        )
        for request, block_ids, computed, _ in scheduled:
            if block_ids is not None:
                self.tables[request.request_id] = block_ids
                new.append(
                    SimpleNamespace(
                        req_id=request.request_id,
                        block_ids=(block_ids,),
                        num_computed_tokens=computed,
                    )
                )
            else:
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(computed)
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={r.request_id: n for r, _, _, n in scheduled},
        )

    def _compute(self, request: Request, name: str, computed: int, num_tokens: int) -> None:
        """Write the blocks that these tokens touch. What is written depends on what stands in the
        blocks before, as attention does: garbage in, garbage out."""
        table = self.tables[request.request_id]
        array = self.memory[name]
        for index in range(computed // BLOCK_SIZE, -(-(computed + num_tokens) // BLOCK_SIZE)):
            end = min((index + 1) * BLOCK_SIZE, computed + num_tokens)
            before = array[table[index - 1]].tobytes() if index else b""
            seed = hashlib.sha256(
                before + name.encode() + bytes(request.tokens[index * BLOCK_SIZE : end])
            ).digest()
            array[table[index]] = np.resize(np.frombuffer(seed, np.uint8), array[0].shape)

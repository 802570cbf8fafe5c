"""What the scheduler's side and the worker's side tell each other, once a step.

Source: the engine's call order, connector/README.md section "One step".
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvformat_connector.namespaces import Variant

#: How a request's loads are moved.
#:
#: ``layerwise``: the request is computed in this very step. Each layer must be in memory and
#: verified when ``wait_for_layer_load`` returns; rows that fail become block ids of
#: ``get_block_ids_with_load_errors``, and nothing that this step computes for the request is
#: committed, on any rank (``engine.merge_over_tensor_ranks`` tells what failed on the others).
#: Only ever planned where there is one group, of full attention, and one pipeline stage.
#:
#: ``bulk``: the request waits outside of the batch until the worker names it in
#: ``get_transfer_results().finished_recving``, exactly once and on every rank, also when all of it
#: failed, when there was nothing for this rank, or when the request was aborted meanwhile. Nothing
#: computes on the blocks before that, so a failure taints no save and leaves no garbage: it raises
#: no report number and puts no block ids into a report, only hashes. What failed is told in the
#: same step or earlier: block ids through ``get_block_ids_with_load_errors`` where
#: ``needs.fails_by_block``; elsewhere the request's id in ``failed_recving``, and the engine
#: computes all of it.
LoadMode = Literal["layerwise", "bulk"]


class BlockList(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one kind of object: ``block_ids[i][j]`` is where group ``i`` of the object keeps
    the block whose hash is ``block_hashes[j]``.

    One list covers all shards of the object: a rank reads and writes those that it has templates
    for (``plan_get``, ``plan_put``), and of what several ranks hold alike it writes only the
    blocks that ``engine.Replicas.writes`` gives it. Objects of windowed and recurrent groups list
    fewer blocks than those of full attention, or none. Block ids are never the null block.
    """

    object_index: int
    block_hashes: list[bytes]
    block_ids: tuple[list[int], ...]


class RequestStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one request loads and saves in a step.

    ``loads`` and ``saves`` have one entry per object index at most, and any number of indices.
    A request with ``bulk`` loads saves nothing in the same step. ``variant`` says in which
    namespace all of them are.

    ``saves`` become full in this step. Layers of ``recurrent_state`` groups get no layer hook:
    the worker writes them in ``wait_for_save``, when the step has been computed.

    ``shared_block_ids`` are blocks that another request loads in this step and this one reads: if
    one of them fails, what this request computes is as wrong as what the other one does.

    ``adapter_number`` is the engine's ``lora_int_id``, 0 where there is no adapter: what was loaded
    under it must be what ``variant`` names.
    """

    request_id: str
    variant: Variant = Variant()
    loads: list[BlockList] = []
    load_mode: LoadMode = "layerwise"
    saves: list[BlockList] = []
    shared_block_ids: list[int] = []
    adapter_number: int = 0


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``acknowledged[rank]`` is the last failure report of that rank that the scheduler
    has acted on: until its own last one is, a worker can't tell which blocks still hold garbage.

    ``weights`` are those of every request from now on, as in a variant: KV of others that is still
    being loaded is of no use.
    """

    weights: str = ""
    requests: list[RequestStep] = []
    acknowledged: dict[int, int] = {}


class StoredBlock(msgspec.Struct, frozen=True):
    """An object, in whatever shard, that a worker has committed."""

    object_index: int
    block_hash: bytes


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Loads that failed: the number of the report by rank, the blocks that nobody should be
    promised for a while, and where in memory garbage stands for them.

    ``store_down[rank]`` is told when it changes: while it's true the rank loads and saves nothing.
    ``stored`` is told where the engine publishes cache events. ``changed_adapters`` are the numbers
    of adapters that are not what the scheduler takes them for.
    """

    numbers: dict[int, int] = {}
    failed_hashes: list[bytes] = []
    failed_block_ids: list[int] = []
    store_down: dict[int, bool] = {}
    stored: list[StoredBlock] = []
    changed_adapters: list[int] = []


def merge_reports(first: WorkerReport, second: WorkerReport) -> WorkerReport:
    """One report for two ranks."""
    return WorkerReport(
        numbers={**first.numbers, **second.numbers},
        failed_hashes=[*first.failed_hashes, *second.failed_hashes],
        failed_block_ids=[*first.failed_block_ids, *second.failed_block_ids],
        store_down={**first.store_down, **second.store_down},
        stored=[*first.stored, *second.stored],
        changed_adapters=[*first.changed_adapters, *second.changed_adapters],
    )


class LayoutNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The layout a worker derived, told to the scheduler at start-up: canonical JSON."""

    rank: int
    manifest: bytes

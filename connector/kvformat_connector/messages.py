"""What the scheduler's side and the worker's side tell each other, once a step.

Source: the engine's call order, connector/README.md section "One step".
"""

from __future__ import annotations

import msgspec


class BlockList(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one kind of object: ``block_ids[i][j]`` is where group ``i`` of the object keeps
    the block whose hash is ``block_hashes[j]``."""

    object_index: int
    block_hashes: list[bytes]
    block_ids: tuple[list[int], ...]


class RequestStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one request loads and saves in a step.

    ``shared_block_ids`` are blocks that another request loads in this step and this one reads: if
    one of them fails, what this request computes is as wrong as what the other one does.
    """

    request_id: str
    loads: list[BlockList] = []
    saves: list[BlockList] = []
    shared_block_ids: list[int] = []


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``acknowledged[rank]`` is the last failure report of that rank that the scheduler
    has acted on: until its own last one is, a worker can't tell which blocks still hold garbage."""

    requests: list[RequestStep] = []
    acknowledged: dict[int, int] = {}


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Loads that failed: the number of the report by rank, the blocks that nobody should be
    promised for a while, and where in memory garbage stands for them."""

    numbers: dict[int, int]
    failed_hashes: list[bytes]
    failed_block_ids: list[int]


def merge_reports(first: WorkerReport, second: WorkerReport) -> WorkerReport:
    """One report for two ranks."""
    return WorkerReport(
        numbers={**first.numbers, **second.numbers},
        failed_hashes=[*first.failed_hashes, *second.failed_hashes],
        failed_block_ids=[*first.failed_block_ids, *second.failed_block_ids],
    )


class LayoutNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The layout a worker derived, told to the scheduler at start-up: canonical JSON."""

    rank: int
    manifest: bytes

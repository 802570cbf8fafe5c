"""Lookup of a prompt of 128K tokens whose blocks are cut into 8 shards, on a store that answers at
once; the floor is making the same keys and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from measure import Row, best_us, report, row
from ranks import block_hashes
from shapes import BLOCK_SIZE, GQA, model

from kvformat.key import format_keys
from kvformat_connector.config import parse_options
from kvformat_connector.needs import object_needs
from kvformat_connector.scheduler import Scheduler
from kvformat_connector.stats import Counters

NUM_TOKENS = 128 << 10
NUM_SHARDS = 8


class NullStore:
    """All objects exist, or none does; ``num_calls`` counts lookups and ``num_keys`` their keys."""

    def __init__(self, answer: int) -> None:
        self._codes = [answer] * (1 << 16)
        self.num_calls = self.num_keys = 0

    def exists(self, keys: Sequence[str]) -> list[int]:
        self.num_calls += 1
        self.num_keys += len(keys)
        return self._codes[: len(keys)]


def measure() -> list[Row]:
    layout = model(64, GQA, head_shards=NUM_SHARDS)
    hashes = block_hashes(NUM_TOKENS // BLOCK_SIZE)
    request = SimpleNamespace(
        request_id="r", block_hashes=hashes, num_tokens=NUM_TOKENS + 1, lora_request=None
    )

    def scheduler(answer: int) -> tuple[Scheduler, NullStore]:
        store = NullStore(answer)
        options = parse_options({"store": "memory://"})
        return Scheduler(layout, store, options, Counters()), store  # type: ignore[arg-type]

    there, _ = scheduler(1)
    missing, store = scheduler(0)
    prefixes = [there.namespace + part for part in object_needs(layout)[0].parts]

    def look_up() -> int:
        promised = there.match(request, 0)
        there.finished("r")
        return promised

    assert look_up() == NUM_TOKENS
    assert missing.match(request, 0) == 0
    missing.finished("r")
    calls, keys = store.num_calls, store.num_keys

    def look_up_missing() -> None:
        missing.match(request, 0)
        missing.finished("r")

    def keys_alone() -> None:
        format_keys(prefixes, hashes)

    found, first_missing, floor = best_us(look_up, look_up_missing, keys_alone, number=3)
    there.match(request, 0)
    (again,) = best_us(lambda: there.match(request, 0), number=2000)
    return [
        row(f"lookup of 128K tokens x {NUM_SHARDS} shards", found / 1e3, "ms", at_most=1.5),
        row("the same against its keys alone", found / 1e3, "ms", floor=floor / 1e3),
        row("first block missing: calls", calls, "calls", at_most=1),
        row("first block missing: keys asked", keys, "keys"),
        row("first block missing", first_missing, "us"),
        row("a waiting request asked again", again, "us"),
    ]


if __name__ == "__main__":
    report("lookup", measure())

"""Minutes of random work on a real Mooncake that keeps breaking: no wrong byte, no leak.

Several engines share one pool. They serve prompts with common beginnings, in chunks, several a
step, and abort some. Meanwhile storage is frozen, killed and started again, the master is
restarted, calls fail, come late, or bring a wrong bit. Each finished request is compared with what
it computes to without a pool; each computed byte follows from all that stands before it, so one
wrong byte makes all later ones wrong.

Run by ``make soak``; ``--seconds`` (default 300) says how long. Prints one JSON object and exits
with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import logging
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

for _folder in ("connector", "faults"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))

from pool import LAYOUT, Pool, make_pool  # noqa: E402
from simulated_engine import BLOCK_SIZE, Request, SimulatedEngine  # noqa: E402

from kvformat.stores import open_store  # noqa: E402
from kvformat.stores.protocol import Code, Store  # noqa: E402

NUM_ENGINES = 2
MAX_TOKENS = 60
BLOCK_SHAPE = (2, BLOCK_SIZE, 16)
OPTIONS = {
    "overlap_saves": True,
    "transfer_deadline_ms": 400,
    "breaker_retry_ms": 100,
    "failed_key_retry_ms": 200,
    "layerwise_max_transfer_blocks": 8,
}
#: How much more memory, and how many more Python objects, there may be at the end than after a
#: third of the time.
MAX_GROWTH = 0.10
NUM_SAMPLES = 100


class Hostile:
    """A store whose calls sometimes fail, come late, or bring a wrong bit."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        self._store = store
        self._chance = chance
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in ("put_start", "put_ranges", "put_commit", "get_start", "get_ranges"):
            return method
        return lambda keys, *rest: self._spoil(name, method, keys, rest)

    def _spoil(
        self,
        name: str,
        method: Callable[..., list[int]],
        keys: Sequence[str],
        rest: tuple[Any, ...],
    ) -> list[int]:
        fate = self._chance.random()
        if fate < 0.002:
            self.counts["raised"] += 1
            raise RuntimeError("a bug in a store")
        if fate < 0.006:
            self.counts["late"] += 1
            time.sleep(self._chance.uniform(0.0, 0.6))
        codes = list(method(keys, *rest))
        if fate > 0.996:
            self.counts["short"] += 1
            return codes[:-1]
        victim = self._chance.randrange(len(codes)) if codes else 0
        if fate > 0.99 and codes:
            self.counts["failed"] += 1
            codes[victim] = Code.TRANSFER_FAILED
        elif fate > 0.97 and name == "get_ranges" and codes[victim] > 0:
            self.counts["wrong bit"] += 1
            ctypes.c_uint8.from_address(rest[0][victim][0] + codes[victim] // 2).value ^= 16
        return codes


@dataclass
class Running:
    """A request that an engine is at."""

    request: Request
    table: list[int]
    computed: int
    is_new: bool = True


def expected_kv(tokens: list[int]) -> list[list[bytes]]:
    """KV of the full blocks of a prompt, ``[num_blocks][num_layers]``, from the tokens alone."""
    before = {layer.name: b"" for layer in LAYOUT.groups[0].layers}
    blocks = []
    for start in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
        text = bytes(tokens[start : start + BLOCK_SIZE])
        for name, previous in before.items():
            seed = hashlib.sha256(previous + name.encode() + text).digest()
            filled = np.resize(np.frombuffer(seed, np.uint8), BLOCK_SHAPE)
            before[name] = filled.astype(np.float32).tobytes()
        blocks.append(list(before.values()))
    return blocks


class Server:
    """One engine and its random work."""

    def __init__(self, uri: str, number: int, seed: int) -> None:
        self._chance = random.Random(seed + number)
        self.store = Hostile(open_store(uri), random.Random(seed + 100 + number))
        self.engine = SimulatedEngine(self.store, LAYOUT, **OPTIONS)  # type: ignore[arg-type]
        # Steps don't wait for commits here.
        self.settle = self.engine.worker.settle
        self.engine.worker.settle = lambda timeout_s: True  # type: ignore[method-assign]
        self._number = number
        self._num_requests = 0
        self.counts: Counter[str] = Counter()

    def serve_some(self, prefixes: list[list[int]]) -> None:
        """One to three requests at once, to their ends."""
        running = [self._start(prefixes) for _ in range(self._chance.randint(1, 3))]
        while running:
            scheduled = []
            for each in running:
                left = each.request.num_tokens - each.computed
                num_tokens = min(left, self._chance.choice((3, 8, 17, 99)))
                table = each.table if each.is_new else None
                scheduled.append((each.request, table, each.computed, num_tokens))
                each.computed += num_tokens
                each.is_new = False
            failed = self.engine.step(scheduled)
            for each in running:
                bad = [index for index, block in enumerate(each.table) if block in failed]
                if bad:
                    self.counts["recomputed"] += 1
                    each.computed = min(each.computed, bad[0] * BLOCK_SIZE)
            running = [each for each in running if not self._is_over(each)]

    def _start(self, prefixes: list[list[int]]) -> Running:
        self._num_requests += 1
        prefix = self._chance.choice(prefixes)
        tail = [self._chance.randrange(250) for _ in range(self._chance.randint(1, 9))]
        name = f"{self._number}-{self._num_requests}"
        request = Request(name, [*prefix[: self._chance.randint(1, len(prefix))], *tail])
        hit = self.engine.scheduler.match(request, 0)
        self.counts["hit tokens"] += hit
        table = self.engine.allocate(-(-request.num_tokens // BLOCK_SIZE))
        self.engine.scheduler.allocated(request, hit)
        return Running(request, table, hit)

    def _is_over(self, each: Running) -> bool:
        is_done = each.computed >= each.request.num_tokens
        is_aborted = self._chance.random() < 0.05
        if is_done:
            right = expected_kv(each.request.tokens)
            is_right = self.engine.kv_of(each.request, each.table) == right
            self.counts["right" if is_right else "WRONG"] += 1
        elif is_aborted:
            self.counts["aborted"] += 1
        if is_done or is_aborted:
            self.engine.scheduler.finished(each.request.request_id)
            # What the engine of the tests remembers for its tests is no leak.
            self.engine.tables.pop(each.request.request_id, None)
            self.engine.reports.clear()
        return is_done or is_aborted


def break_once(pool: Pool, chance: random.Random, stop: threading.Event) -> str:
    """Something happens to the pool, and is mended again; what it was."""
    what = chance.choice(("freeze", "freeze", "freeze", "kill client", "kill master"))
    if what == "freeze":
        pool.send("client", signal.SIGSTOP)
        stop.wait(chance.uniform(0.2, 3))
        pool.send("client", signal.SIGCONT)
    else:
        name = what.split()[1]
        pool.kill(name)
        stop.wait(chance.uniform(0, 2))
        pool.start(name)
    return what


def break_things(pool: Pool, chance: random.Random, stop: threading.Event) -> None:
    """Something happens to the pool every few seconds."""
    while not stop.wait(chance.uniform(2, 6)):
        break_once(pool, chance, stop)


def resident_nbytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(seconds: float, seed: int) -> dict[str, Any]:
    """The soak; what it came to."""
    chance = random.Random(seed)
    prefixes = [[chance.randrange(250) for _ in range(MAX_TOKENS - 9)] for _ in range(30)]
    samples: list[tuple[float, int, int]] = []
    with ExitStack() as stack:
        pool = stack.enter_context(make_pool(segment_nbytes=64 << 20))
        servers = [Server(pool.uri, number, seed) for number in range(NUM_ENGINES)]
        stop = threading.Event()
        breaker = threading.Thread(
            target=break_things, args=(pool, random.Random(seed + 1), stop), daemon=True
        )
        breaker.start()
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            chance.choice(servers).serve_some(prefixes)
            elapsed = time.monotonic() - started
            if elapsed >= len(samples) * seconds / NUM_SAMPLES:
                gc.collect()
                samples.append((elapsed, resident_nbytes(), sys.getallocatedblocks()))
        stop.set()
        breaker.join(60)
        leaks = [leak for server in servers for leak in find_leaks(server)]
        counts: Counter[str] = Counter()
        for server in servers:
            counts.update(server.counts)
            counts.update({f"fault: {name}": n for name, n in server.store.counts.items()})
            counts.update(server.engine.counters.snapshot())
            server.engine.worker.close()
    return {
        "seconds": round(seconds),
        "seed": seed,
        "wrong": counts["WRONG"],
        "leaks": leaks,
        "memory_growth": growth([nbytes for _, nbytes, _ in samples]),
        "object_growth": growth([num_objects for _, _, num_objects in samples]),
        "memory_mib": [nbytes >> 20 for _, nbytes, _ in samples[:: NUM_SAMPLES // 10]],
        "counts": dict(sorted(counts.items())),
    }


def growth(samples: list[int]) -> float:
    """How much more the last fifth is than the fifth after the first third."""
    fifth = max(1, len(samples) // 5)
    early = np.median(samples[len(samples) // 3 :][:fifth])
    return round(float(np.median(samples[-fifth:]) / early - 1), 4)


def find_leaks(server: Server) -> list[str]:
    """What is held at idle and shouldn't be."""
    worker, rank = server.engine.worker, server.engine.worker._rank
    assert rank is not None
    deadline = time.monotonic() + 60
    held: dict[str, Callable[[], int]] = {
        "requests": lambda: server.engine.scheduler.num_requests,
        "sessions": lambda: worker.num_open_sessions,
        "stages of loads": lambda: rank.load_staging.num_taken_nbytes,
        "stages of saves": lambda: rank.save_staging.num_taken_nbytes,
        "calls left behind": lambda: worker.num_left_behind,
    }
    while any(count() for count in held.values()) and time.monotonic() < deadline:
        server.engine.step([])
        server.settle(1.0)
        time.sleep(0.05)
    return [f"{count()} {name}" for name, count in held.items() if count()]


def main() -> int:
    """Run, print, and say whether it went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    result = run(options.seconds, options.seed)
    print(json.dumps(result, indent=1))
    is_good = not result["wrong"] and not result["leaks"]
    is_good &= max(result["memory_growth"], result["object_growth"]) <= MAX_GROWTH
    is_good &= result["counts"].get("right", 0) > 0
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())

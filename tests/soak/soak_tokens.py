"""Minutes of real vLLM on a Mooncake that keeps breaking: no wrong token, no leak.

One engine serves random prompts, several at once and in chunks, and aborts some of them, all the
time. Others come, share the pool with it, and end or are killed. Meanwhile storage is frozen,
killed and started again, the master is restarted, and objects are damaged. Each answer is compared
with that of an engine that has neither a pool nor a prefix cache.

Run by ``make soak``; ``--seconds`` (default 300) says how long. Prints one JSON object and exits
with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

for _folder in ("connector", "faults", "e2e", "soak"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))

from pool import Pool, make_pool  # noqa: E402
from real_engine import Servers, make_models  # noqa: E402
from soak import MAX_GROWTH, break_once, growth  # noqa: E402
from token_engine import Outcome, Task  # noqa: E402

from kvformat.errors import ConnectorError  # noqa: E402
from kvformat.key import BlockKey, parse_key  # noqa: E402
from kvformat.stores import open_store  # noqa: E402
from kvformat.stores.protocol import Code  # noqa: E402
from kvformat_connector.demo.engines import EngineReport  # noqa: E402
from kvformat_connector.demo.host import EngineHost  # noqa: E402

NUM_PROMPTS = 36
NUM_NEW_TOKENS = 8
#: Where the best two logits are closer, kernels for other chunk sizes may choose the other one.
MIN_LOGPROB_GAP = 1e-3
OPTIONS = {
    "transfer_deadline_ms": 1000,
    "breaker_retry_ms": 200,
    "failed_key_retry_ms": 500,
    "layerwise_prefetch_layers": 1,
}
LEASE_TTL_MS = 1000
_START_LIMIT_S = 120
_END_LIMIT_S = 90
#: An engine takes so long to start and to serve a little.
_VISIT_S = 20


def make_prompts(chance: random.Random) -> list[list[int]]:
    """Prompts of up to 18 blocks, of any length, that begin in one of a few ways."""
    beginnings = [_random_tokens(chance, 400) for _ in range(4)]
    return [
        [
            *chance.choice(beginnings)[: chance.randint(0, 400)],
            *_random_tokens(chance, chance.randint(1, 180)),
        ]
        for _ in range(NUM_PROMPTS)
    ]


def _random_tokens(chance: random.Random, num_tokens: int) -> list[int]:
    return [chance.randrange(3, 500) for _ in range(num_tokens)]


def is_clear(answer: Any) -> bool:
    """Whether no token of an answer was chosen by a hair."""
    gaps = (sorted(each.values())[-2:] for each in answer.logprobs)
    return all(best - second > MIN_LOGPROB_GAP for second, best in gaps)


def uncached_answers(model: str, prompts: list[list[int]], folder: Path) -> EngineReport:
    """What an engine answers that has no connector and no prefix cache."""
    with EngineHost(folder / "reference.log") as host:
        return Servers(host, {"": model}).run(
            store=None,
            prompts=prompts,
            commit="",
            num_new_tokens=NUM_NEW_TOKENS,
            engine_options={"enable_prefix_caching": False},
        )


class Engines:
    """Starts engines, and adds up what they came to."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._task = task
        self._folder = folder
        self._num_started = 0

    @contextmanager
    def running(self) -> Iterator[Engine]:
        """An engine, ended with the context in whatever way."""
        self._num_started += 1
        name = f"engine{self._num_started}"
        task = msgspec.structs.replace(
            self._task,
            seed=self._task.seed + self._num_started,
            outcome=str(self._folder / f"{name}.json"),
        )
        engine = Engine(task, self._folder / name)
        try:
            yield engine
        finally:
            engine.kill()


class Engine:
    """One engine's process."""

    def __init__(self, task: Task, path: Path) -> None:
        self._outcome = Path(task.outcome)
        task_file = path.with_suffix(".task")
        task_file.write_bytes(msgspec.json.encode(task))
        program = Path(__file__).with_name("token_engine.py")
        with path.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(program), str(task_file)], stdout=log, stderr=log
            )

    @property
    def outcome(self) -> Outcome | None:
        """What it has come to so far; None before its first round."""
        if not self._outcome.exists():
            return None
        return msgspec.json.decode(self._outcome.read_bytes(), type=Outcome)

    def serves(self) -> bool:
        """Wait for its first round; False if it has ended instead."""
        deadline = time.monotonic() + _START_LIMIT_S
        while self.outcome is None and self._process.poll() is None:
            assert time.monotonic() < deadline, "the engine doesn't start"
            time.sleep(0.1)
        return self.is_running

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def end(self) -> int:
        """Ask it to end; its exit status, which tells too if it had ended before."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(_END_LIMIT_S)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


def damage(uri: str, chance: random.Random) -> bool:
    """Put an object with a wrong bit in the place of a right one. False where it can't be done."""
    try:
        store = open_store(uri)
    except ConnectorError:
        return False
    try:
        keys = [key for key in store.list() if isinstance(parse_key(key), BlockKey)]
        key = chance.choice(keys)
        data = bytearray(store.get(key) or b"")
        data[len(data) // 2] ^= 4
        deadline = time.monotonic() + 3 * LEASE_TTL_MS / 1e3
        while store.remove([key]) == [Code.NOT_READY] and time.monotonic() < deadline:
            time.sleep(0.1)  # whoever reads it has a lease
        return store.put(key, data) == Code.OK
    except (ConnectorError, IndexError):
        return False
    finally:
        store.close()


def run(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """The soak; what it came to."""
    chance = random.Random(seed)
    [model, *_] = make_models(folder / "hub").values()
    candidates = make_prompts(chance)
    report = uncached_answers(model, candidates, folder)
    chosen = [index for index, answer in enumerate(report.answers) if is_clear(answer)]
    outcomes: list[Outcome] = []
    faults: Counter[str] = Counter()
    num_died = 0
    with ExitStack() as stack:
        pool = stack.enter_context(make_pool(segment_nbytes=64 << 20, lease_ttl_ms=LEASE_TTL_MS))
        task = Task(
            model=model,
            options={"store": pool.uri, **OPTIONS},
            prompts=[candidates[index] for index in chosen],
            expected=[report.answers[index].token_ids for index in chosen],
            seed=seed,
            outcome="",
        )
        engines = Engines(task, folder)
        long_lived = stack.enter_context(engines.running())
        if not long_lived.serves():
            raise RuntimeError(f"the first engine did not start: {long_lived.outcome}")
        stop = threading.Event()

        def break_things(pool: Pool, chance: random.Random) -> None:
            while not stop.wait(chance.uniform(2, 6)):
                if chance.random() < 0.6:
                    faults[break_once(pool, chance, stop)] += 1
                elif damage(pool.uri, chance):
                    faults["damage"] += 1

        breaker = threading.Thread(
            target=break_things, args=(pool, random.Random(seed + 1)), daemon=True
        )
        breaker.start()
        ends_at = time.monotonic() + seconds
        while ends_at - time.monotonic() > _VISIT_S:
            with engines.running() as visitor:
                if visitor.serves():
                    left = ends_at - time.monotonic()
                    time.sleep(max(0.0, min(chance.uniform(5, 20), left)))
                    if chance.random() < 0.5 and visitor.is_running:
                        visitor.kill()
                        faults["engine killed"] += 1
                    elif visitor.end():
                        num_died += 1
                elif not (visitor.outcome and visitor.outcome.refused):
                    num_died += 1
                outcomes.append(visitor.outcome or Outcome())
        time.sleep(max(0.0, ends_at - time.monotonic()))
        stop.set()
        breaker.join(60)
        num_died += bool(long_lived.end())
        last = long_lived.outcome
        assert last is not None
        outcomes.append(last)
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
        if outcome.refused:
            # The pool was down when it started: an engine refuses to, and says so.
            counts[f"start: {outcome.refused}"] += 1
    return {
        "seconds": round(seconds),
        "seed": seed,
        "engines": len(outcomes),
        "prompts": len(chosen),
        "wrong": counts["WRONG"] + counts["unanswered"],
        "leaks": [leak for outcome in outcomes for leak in outcome.leaks],
        "died": num_died,
        "memory_growth": growth(last.memory_nbytes),
        "memory_mib": [n >> 20 for n in last.memory_nbytes[:: len(last.memory_nbytes) // 10 + 1]],
        "faults": dict(sorted(faults.items())),
        "counts": dict(sorted(counts.items())),
    }


def main() -> int:
    """Run, print, and say whether it went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--logs", type=Path, help="a folder to keep the engines' output in")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        result = run(options.seconds, options.seed, folder)
    print(json.dumps(result, indent=1))
    is_good = not result["died"] and not result["wrong"] and not result["leaks"]
    is_good &= result["memory_growth"] <= MAX_GROWTH
    # The pool was used, and it was broken.
    counts = result["counts"]
    is_good &= min(counts.get(name, 0) for name in ("right", "load.blocks", "save.blocks")) > 0
    is_good &= any(name.startswith("rejected.") for name in counts)
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())

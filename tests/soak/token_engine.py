"""One vLLM engine of the soak: it serves and aborts random requests until it is told to end.

Started by ``soak_tokens.py`` with the file of a ``Task``. After each round it writes what it came
to so far, because it may be killed; SIGTERM asks it to end, and to say what it still holds then.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvformat_connector.demo.engines import BLOCK_SIZE, prepare_environment

#: So few that requests preempt each other and cached blocks don't last.
NUM_BLOCKS = 40
MAX_TOKENS = 640
ENGINE_OPTIONS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": BLOCK_SIZE,
    "dtype": "float32",
    "seed": 1,
    "disable_log_stats": True,
    "max_model_len": MAX_TOKENS,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "num_gpu_blocks_override": NUM_BLOCKS,
}
_IDLE_LIMIT_S = 60.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, with the tokens that an engine without a pool answers."""

    model: str
    options: dict[str, Any]
    prompts: list[list[int]]
    expected: list[list[int]]
    seed: int
    outcome: str  #: the file that the outcome goes to


class Outcome(msgspec.Struct, kw_only=True):
    """What came of it so far. ``is_over``: the engine ended by itself, and ``leaks`` is known."""

    counts: dict[str, int] = {}
    refused: str = ""  #: the reason code of the error that stopped the start
    memory_nbytes: list[int] = []
    leaks: list[str] = []
    is_over: bool = False


class TokenEngine:
    """The engine and its random work."""

    def __init__(self, task: Task) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._task = task
        self._chance = random.Random(task.seed)
        self._llm = LLM(
            model=task.model,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVFormatConnector",
                kv_connector_module_path="kvformat_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=task.options,
            ),
            **ENGINE_OPTIONS,
        )
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=len(task.expected[0]), detokenize=False, ignore_eos=True
        )
        self._num_requests = 0
        self.counts: Counter[str] = Counter()

    def serve_some(self) -> None:
        """One to four requests at once; some are aborted after some steps."""
        engine, chance = self._llm.llm_engine, self._chance
        running: dict[str, int] = {}
        aborts: dict[str, int] = {}
        for index in chance.sample(range(len(self._task.prompts)), chance.randint(1, 4)):
            self._num_requests += 1
            name = f"r{self._num_requests}"
            running[name] = index
            if chance.random() < 0.2:
                aborts[name] = chance.randrange(12)
            prompt = {"prompt_token_ids": self._task.prompts[index]}
            engine.add_request(name, prompt, self._sampling.clone())
        num_steps = 0
        while engine.has_unfinished_requests():
            due = [name for name in running if aborts.get(name) == num_steps]
            if due:
                engine.abort_request(due)
                self.counts["aborted"] += len(due)
            for name in due:
                del running[name]
            for output in engine.step():
                if output.finished and output.request_id in running:
                    self._judge(running.pop(output.request_id), output)
            num_steps += 1
        self.counts["unanswered"] += len(running)
        if chance.random() < 0.3:
            self._llm.reset_prefix_cache()

    def _judge(self, index: int, output: Any) -> None:
        found = list(output.outputs[0].token_ids)
        self.counts["right" if found == self._task.expected[index] else "WRONG"] += 1
        self.counts["cached tokens"] += output.num_cached_tokens or 0

    def all_counts(self) -> Counter[str]:
        """The counts of the work and of both sides of the connector."""
        worker, scheduler = self._sides()
        return self.counts + Counter(worker.counters) + Counter(scheduler.counters)

    def find_leaks(self) -> list[str]:
        """What is held at idle and shouldn't be. Calls that hang get some time to come back."""
        worker, scheduler = (side for side in self._sides())
        rank = worker.worker._rank
        held: dict[str, Callable[[], int]] = {
            "requests": lambda: scheduler.scheduler.num_requests,
            "sessions": lambda: worker.worker.num_open_sessions,
            "stages of loads": lambda: rank.load_staging.num_taken_nbytes,
            "stages of saves": lambda: rank.save_staging.num_taken_nbytes,
            "calls left behind": lambda: worker.worker.num_left_behind,
        }
        deadline = time.monotonic() + _IDLE_LIMIT_S
        while any(count() for count in held.values()) and time.monotonic() < deadline:
            worker.worker.settle(1.0)
            time.sleep(0.05)
        return [f"{count()} {name}" for name, count in held.items() if count()]

    def _sides(self) -> tuple[Any, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        return get_kv_transfer_group(), scheduler.connector


def main() -> int:
    """Serve until SIGTERM."""
    task = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Task)
    is_told_to_end: list[int] = []
    prepare_environment()
    outcome = Outcome()

    def write() -> None:
        part = Path(f"{task.outcome}.part")
        part.write_bytes(msgspec.json.encode(outcome))
        part.rename(task.outcome)

    from kvformat.errors import KVFormatError

    try:
        engine = TokenEngine(task)
    except KVFormatError as error:
        outcome.refused = error.reason.value
        write()
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: is_told_to_end.append(number))
    while not is_told_to_end:
        engine.serve_some()
        gc.collect()
        outcome.memory_nbytes.append(
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        )
        outcome.counts = engine.all_counts()
        write()
    outcome.leaks = engine.find_leaks()
    outcome.counts = engine.all_counts()
    outcome.is_over = True
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())

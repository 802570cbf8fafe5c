"""Two data-parallel ranks behind one client of vLLM, each handed the same prompts at the same time.

A program, because the engines of one client run in processes that it starts itself.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import msgspec

from kvformat_connector.demo.engines import (
    BLOCK_SIZE,
    RankReport,
    prepare_environment,
    rank_report,
)

NUM_RANKS = 2


class DataParallelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of each answer, ``[rank][prompt][token]``, and what each rank's worker counted."""

    answers: list[list[list[int]]]
    ranks: list[RankReport]


def run_data_parallel(model: str, store: str, prompts: list[list[int]]) -> DataParallelReport:
    """Run the program. Raises ``CalledProcessError`` where it fails."""
    request = json.dumps({"model": model, "store": store, "prompts": prompts})
    done = subprocess.run(
        [sys.executable, __file__, request], check=True, stdout=subprocess.PIPE, timeout=280
    )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=DataParallelReport)


async def _serve(model: str, store: str, prompts: list[list[int]]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            data_parallel_size=NUM_RANKS,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=2048,
            block_size=BLOCK_SIZE,
            dtype="float32",
            seed=1,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVFormatConnector",
                kv_connector_module_path="kvformat_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"store": store},
            ),
        )
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False, ignore_eos=True)

    async def ask(rank: int, index: int) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(
            {"prompt_token_ids": prompts[index]},
            sampling.clone(),
            f"rank{rank}-prompt{index}",
            data_parallel_rank=rank,
        ):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    places = [(rank, index) for rank in range(NUM_RANKS) for index in range(len(prompts))]
    answers = await asyncio.gather(*(ask(*place) for place in places))
    reports = await engine.engine_core.call_utility_all_async(
        "collective_rpc", rank_report, None, (), None
    )
    engine.shutdown()
    return {
        "answers": [answers[: len(prompts)], answers[len(prompts) :]],
        "ranks": [report for [report] in reports],
    }


if __name__ == "__main__":
    prepare_environment(
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        # What is asked of the workers at the end is a function of ours.
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    )
    print(json.dumps(asyncio.run(_serve(**json.loads(sys.argv[1])))))

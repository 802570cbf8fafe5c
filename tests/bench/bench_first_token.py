"""Time to the first token of a 900-token prompt, cold and warm, through a real Mooncake over TCP.

Real vLLM on CPU, a Llama of 8 layers and hidden size 1024, each engine a fresh process. Beside ours
the same prompts run through vLLM's own MooncakeStoreConnector on the same pool, and without any
connector. An engine answers NUM_PROMPTS prompts that share no block; cold engines fill the pool,
warm ones find everything there. Engines take turns, and each number is the best of its prompts and
rounds, because what else runs on a machine can only add to a time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import report, row

from kvformat_connector.demo.engines import ENVIRONMENT, import_vllm, in_fork
from kvformat_connector.demo.model import make_model
from kvformat_connector.store.mooncake_services import MooncakeServices, mooncake_services

NUM_PROMPTS = 5
NUM_TOKENS = 900
NUM_ROUNDS = 3
BLOCK_SIZE = 32
COMMIT = "5eed" * 10
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def prompt(number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Two numbers give prompts that differ from their first token on."""
    return [(at * 7 + (at * at) % 11 + 13 * number) % 500 for at in range(num_tokens)]


def connector(which: str, services: MooncakeServices, tag: str) -> dict[str, Any] | None:
    """A kv_transfer_config. ``tag`` keeps the rounds apart in the pool."""
    if which == "none":
        return None
    if which == "peer":
        return {
            "kv_connector": "MooncakeStoreConnector",
            "kv_connector_extra_config": {"cache_prefix": tag, "load_async": True},
        }
    return {
        "kv_connector": "KVFormatConnector",
        "kv_connector_module_path": "kvformat_connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": services.uri, "tenant": tag},
    }


def serve(model: str, transfer: dict[str, Any] | None, first: int) -> dict[str, Any]:
    """One engine: milliseconds to the first token of each prompt, and what was found cached."""
    import ctypes
    import time

    # The C library gives large freed memory back to the kernel or not by how its heap happens to
    # lie, which costs a step up to 60 ms of page faults, with any connector or none. Kept here.
    mallopt = ctypes.CDLL(None).mallopt
    assert mallopt(M_TRIM_THRESHOLD, 1 << 30)
    assert mallopt(M_MMAP_THRESHOLD, 1 << 30)

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {}
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(kv_role="kv_both", **transfer)
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        block_size=BLOCK_SIZE,
        dtype="float32",
        seed=1,
        enable_prefix_caching=False,
        **options,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False, ignore_eos=True)
    engine = llm.llm_engine

    def answer(name: str, tokens: list[int]) -> tuple[float, int, list[int]]:
        start, ttft, last = time.perf_counter(), 0.0, None
        engine.add_request(name, {"prompt_token_ids": tokens}, sampling.clone())
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not ttft and output.outputs[0].token_ids:
                    ttft = (time.perf_counter() - start) * 1e3
                last = output
        assert last is not None
        return ttft, last.num_cached_tokens or 0, list(last.outputs[0].token_ids)

    answer("warm-up", prompt(first + 77, BLOCK_SIZE - 12))
    answer("warm-up of all sizes", prompt(first + 78))
    found = []
    for index in range(NUM_PROMPTS):
        found.append(answer(str(index), prompt(first + index)))
        time.sleep(0.3)  # what is saved behind the engine's back is no cost of the next prompt
    time.sleep(1.0)
    return {
        "ttft_ms": [ttft for ttft, _, _ in found],
        "cached": [cached for _, cached, _ in found],
        "tokens": [tokens for _, _, tokens in found],
    }


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mooncake_services(segment_nbytes=2 << 30, log_folder=Path(folder)) as services,
    ):
        mooncake = Path(folder) / "mooncake.json"
        mooncake.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": services.master_server_address,
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "standalone-store",
                    "global_segment_size": 0,
                    "local_buffer_size": "256MB",
                }
            )
        )
        os.environ.update(ENVIRONMENT, MOONCAKE_CONFIG_PATH=str(mooncake))
        log = Path(folder) / "engines.log"
        model = in_fork(
            lambda: str(
                make_model(Path(folder), COMMIT, hidden_size=1024, num_heads=16, num_kv_heads=4)
            ),
            log,
        )
        import_vllm()
        best: dict[str, float] = {}
        cached: dict[str, list[int]] = {}
        tokens: dict[str, list[list[int]]] = {}
        for turn in range(NUM_ROUNDS):
            for name in ("none cold", "ours cold", "peer cold", "ours warm", "peer warm"):
                which = name.split()[0]
                transfer = connector(which, services, f"round{turn}")
                found = in_fork(lambda t=transfer, f=100 * turn: serve(model, t, f), log)
                best[name] = min(best.get(name, float("inf")), *found["ttft_ms"])
                cached[name] = found["cached"]
                tokens[f"{name} {turn}"] = found["tokens"]
                print(name, [round(t, 1) for t in found["ttft_ms"]], file=sys.stderr)
        for name in ("ours", "peer"):
            assert max(cached[f"{name} cold"]) == 0, cached
            assert min(cached[f"{name} warm"]) >= NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
        for turn in range(NUM_ROUNDS):
            assert tokens[f"ours warm {turn}"] == tokens[f"none cold {turn}"]
    report(
        "first_token",
        [
            row(
                f"first token, warm {NUM_TOKENS}-token prompt, floor: vLLM's Mooncake connector",
                best["ours warm"],
                "ms",
                floor=best["peer warm"],
                at_most=1.0,
            ),
            row(
                f"first token, cold {NUM_TOKENS}-token prompt, floor: no connector",
                best["ours cold"],
                "ms",
                floor=best["none cold"],
                at_most=1.03,
            ),
            row("first token, cold, vLLM's own Mooncake connector", best["peer cold"], "ms"),
        ],
    )


if __name__ == "__main__":
    main()

"""Real engines, each in a fresh process, from one import of vLLM.

The parent imports vLLM once and forks for every engine: a fork costs two seconds where a new
interpreter costs eleven. The parent never starts a thread and never opens a store, so nothing but
imported code is shared between the processes.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

#: What a vLLM on a small CPU machine needs; facts of the engine, not options of ours.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

BLOCK_SIZE = 32
_SETTLE_LIMIT_S = 10.0


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Other weights for an engine that runs: a folder, and what an operator calls them, in the file
    of option ``model_identity_file``; ``resets_in_use`` where a request runs meanwhile."""

    weights: str
    name: str = ""
    resets_in_use: bool = False


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine and what it is asked."""

    model: str
    prompts: list[list[int]]
    connector_options: dict[str, Any] | None = None  #: None runs vLLM without a connector
    connector_name: str = "KVFormatConnector"
    connector_module: str = "kvformat_connector"
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    num_new_tokens: int = 8
    engine_options: dict[str, Any] = {}
    environment: dict[str, str] = {}  #: set before the engine starts
    together: bool = False  #: hand all prompts in before the first step
    adapters: dict[int, str] = {}  #: folders of LoRA adapters, by index of the prompt
    updates: dict[int, Update] = {}  #: by index of the prompt that comes after it
    timeout_s: int = 180  #: the process is ended after so long


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request came to. ``logprobs[i][token]`` as exact floats; ``ttft_ms`` is wall time to
    the first token, 0 where none came."""

    token_ids: list[int]
    logprobs: list[dict[str, float]]
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_ms: float
    finish_reason: str


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's counts, and what a connector that digests KV has noted of it."""

    counters: dict[str, int] = {}
    rejections: list[dict[str, Any]] = []
    digests: dict[str, str] = {}


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine came to; ``error`` names what stopped its start, if anything did.

    ``worker`` adds up the counts of all worker ranks, ``ranks`` has those of each.
    """

    answers: list[Answer] = []
    scheduler: dict[str, int] = {}
    worker: dict[str, int] = {}
    ranks: list[RankReport] = []
    rejections: list[dict[str, Any]] = []
    namespace: str = ""
    metrics: dict[str, float] = {}  #: this connector's, by sample name and label value
    error: str = ""
    error_reason: str = ""


#: Labels of our metrics that aren't the engine's.
_OWN_LABELS = ("reason", "event", "phase", "le")


class ChildError(RuntimeError):
    """A forked process that ended without an answer."""


def prepare_environment(**values: str) -> None:
    """Set what must be set before vLLM is imported, and these values. Values already in the
    environment stay, except for those that are named here."""
    os.environ.update(values)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def import_vllm() -> None:
    """Import what every engine will need, so that forks find it loaded."""
    prepare_environment()
    # vLLM for CPU has no use for the Triton that came with PyTorch, and warns of it.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    import vllm
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401


def in_fork(function: Callable[[], Any], log: Path, timeout_s: int = 180) -> Any:
    """Run ``function`` in a forked process and return its answer, a value msgspec can encode.

    Output of the process goes to ``log``. Raises ``ChildError`` with the end of that log.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(timeout_s)
            answer = msgspec.json.encode(function())
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(answer)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
    except BaseException:  # interrupted: nobody waits for the answer any more
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    _, status = os.waitpid(pid, 0)
    if status != 0 or not answer:
        tail = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        raise ChildError(f"process ended with status {status}; end of {log}:\n{tail}")
    return msgspec.json.decode(answer)


def run_engine(spec: EngineSpec, log: Path) -> EngineReport:
    """Run one engine in a fresh process."""
    answer = in_fork(lambda: _serve(spec), log, spec.timeout_s)
    return msgspec.convert(answer, EngineReport)


def _serve(spec: EngineSpec) -> EngineReport:
    os.environ.update(spec.environment)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from kvformat.errors import KVFormatError

    options: dict[str, Any] = {
        "model": spec.model,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "seed": 1,
        "disable_log_stats": True,
        **spec.engine_options,
    }
    if spec.connector_options is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=spec.connector_name,
            kv_connector_module_path=spec.connector_module,
            kv_role="kv_both",
            kv_load_failure_policy=spec.load_failure_policy,
            kv_connector_extra_config=spec.connector_options,
        )
    try:
        llm = LLM(**options)
    except KVFormatError as error:
        return EngineReport(error=str(error), error_reason=error.reason.value)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=spec.num_new_tokens,
        logprobs=3,
        detokenize=False,
        ignore_eos=True,
    )
    _answer(llm, [_warm_up_prompt()], sampling)
    if spec.together:
        answers = _answer(llm, spec.prompts, sampling)
    else:
        answers = []
        for index, prompt in enumerate(spec.prompts):
            if index in spec.updates:
                _update(llm, spec, spec.updates[index])
            answers += _answer(llm, [prompt], sampling, _adapter(spec, index))
    if spec.connector_options is None:
        return EngineReport(answers=answers)
    return _report(llm, spec, sampling, answers)


def _warm_up_prompt() -> list[int]:
    """Shorter than a block: it touches every kernel and leaves nothing in any cache."""
    return list(range(7, 7 + BLOCK_SIZE - 12))


def _update(llm: Any, spec: EngineSpec, update: Update) -> None:
    if update.name:
        assert spec.connector_options is not None
        Path(spec.connector_options["model_identity_file"]).write_text(update.name)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": update.weights})
    if update.resets_in_use:
        _reset_in_use(llm)
    else:
        assert llm.reset_prefix_cache(reset_connector=True)


def _reset_in_use(llm: Any) -> None:
    """Reset the caches while a request has blocks, so that the engine keeps its own."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request(
        "busy",
        {"prompt_token_ids": _warm_up_prompt()},
        SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False),
    )
    engine.step()
    assert not llm.reset_prefix_cache(reset_connector=True)
    engine.abort_request(["busy"])


def _adapter(spec: EngineSpec, index: int) -> Any:
    from vllm.lora.request import LoRARequest

    folder = spec.adapters.get(index)
    if folder is None:
        return None
    number = sorted(set(spec.adapters.values())).index(folder) + 1
    return LoRARequest(lora_name=f"adapter {number}", lora_int_id=number, lora_path=folder)


def _answer(
    llm: Any, prompts: Sequence[list[int]], sampling: Any, adapter: Any = None
) -> list[Answer]:
    engine = llm.llm_engine
    started = time.perf_counter()
    names = [f"r{time.monotonic_ns()}-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(
            name, {"prompt_token_ids": prompt}, sampling.clone(), lora_request=adapter
        )
    first: dict[str, float] = {}
    last: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs and output.outputs[0].token_ids:
                first.setdefault(output.request_id, time.perf_counter() - started)
            last[output.request_id] = output
    return [_to_answer(last[name], first.get(name, 0.0)) for name in names]


def _to_answer(output: Any, ttft_s: float) -> Answer:
    completion = output.outputs[0]
    return Answer(
        token_ids=list(completion.token_ids),
        logprobs=[
            {str(token): entry.logprob for token, entry in position.items()}
            for position in completion.logprobs or []
        ],
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens or 0,
        ttft_ms=ttft_s * 1e3,
        finish_reason=completion.finish_reason or "",
    )


def _report(llm: Any, spec: EngineSpec, sampling: Any, answers: list[Answer]) -> EngineReport:
    ranks = [msgspec.convert(found, RankReport) for found in llm.collective_rpc(rank_report)]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector
    if not spec.engine_options.get("disable_log_stats", True):
        # Saves end behind the engine's back; the steps of one more request collect their counts.
        _answer(llm, [_warm_up_prompt()], sampling)
    return EngineReport(
        answers=answers,
        scheduler=scheduler.counters,
        worker=dict(sum((Counter(rank.counters) for rank in ranks), Counter())),
        ranks=ranks,
        rejections=[rejection for rank in ranks for rejection in rank.rejections],
        namespace=scheduler.namespace,
        metrics=_metrics(),
    )


def rank_report(engine_worker: object) -> dict[str, Any]:
    """A ``RankReport``, made in a worker's process. Objects are committed behind the engine's back;
    the counts are complete when all are."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    connector.worker.settle(_SETTLE_LIMIT_S)
    return {
        "counters": connector.counters,
        "rejections": [msgspec.to_builtins(rejection) for rejection in connector.rejections],
        "digests": getattr(connector, "digests", {}),
    }


def _metrics() -> dict[str, float]:
    """Samples of this connector that the engine put into Prometheus: none where
    ``disable_log_stats`` keeps it from doing so."""
    from prometheus_client import REGISTRY

    return {
        ":".join([sample.name, *(v for k, v in sample.labels.items() if k in _OWN_LABELS)]): (
            sample.value
        )
        for family in REGISTRY.collect()
        if family.name.startswith("vllm:kvformat_")
        for sample in family.samples
    }

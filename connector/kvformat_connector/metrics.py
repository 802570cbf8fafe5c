"""The counters as vLLM's own statistics: its log line, and its Prometheus metrics.

A worker and the scheduler each hand over what came in since the last step. vLLM adds the ranks and
the steps up, logs :meth:`ConnectorStats.reduce`, and passes the data to :class:`PrometheusMetrics`.

The data is what it takes to cross processes as JSON: ``counts`` by name, ``times`` in seconds by
phase, ``gauges`` by source (a rank, or the scheduler) and name.

Source: vllm/distributed/kv_transfer/kv_connector/v1/metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvformat_connector.stats import Counters

#: From a header on a local network to a layer from a frozen node.
_BUCKETS_S: Final = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class CounterMetric(NamedTuple):
    """A Prometheus counter, and the counts that feed it: those whose name is ``prefix``, or begins
    with it where there is a label, whose value is then the rest of the name."""

    name: str
    help: str
    prefix: str
    label: str = ""


#: In this order; the first that fits a count has it, so the last one takes all others.
COUNTERS: Final = (
    CounterMetric(
        "vllm:kvformat_hit_tokens", "Tokens promised from the store.", "lookup.hit_tokens"
    ),
    CounterMetric(
        "vllm:kvformat_miss_tokens",
        "Tokens of prompts that were not promised from the store, by reason.",
        "lookup.miss_tokens.",
        "reason",
    ),
    CounterMetric("vllm:kvformat_lookup_calls", "Lookup calls to the store.", "lookup.calls"),
    CounterMetric("vllm:kvformat_loaded_blocks", "Objects loaded and verified.", "load.blocks"),
    CounterMetric("vllm:kvformat_loaded_bytes", "Bytes loaded and verified.", "load.nbytes"),
    CounterMetric("vllm:kvformat_saved_blocks", "Objects committed.", "save.blocks"),
    CounterMetric("vllm:kvformat_saved_bytes", "Bytes committed.", "save.nbytes"),
    CounterMetric(
        "vllm:kvformat_rejected_objects",
        "Objects that were not used, by reason.",
        "rejected.",
        "reason",
    ),
    CounterMetric(
        "vllm:kvformat_unsaved_objects",
        "Objects that were not saved, by reason; 'exists' is one that was there already.",
        "save.",
        "reason",
    ),
    CounterMetric("vllm:kvformat_events", "Everything else that is counted, by name.", "", "event"),
)

PHASE_SECONDS: Final = "vllm:kvformat_phase_seconds"

#: Prometheus gauge by the name of ours, and how those of several ranks make one.
GAUGES: Final[dict[str, tuple[str, str, Callable[[Iterable[float]], float]]]] = {
    "open_sessions": ("vllm:kvformat_open_sessions", "Put and get sessions that are open.", sum),
    "breaker_open": (
        "vllm:kvformat_breaker_open",
        "1 while a rank leaves the store alone because it failed or hung.",
        max,
    ),
    "prefetch_layers": (
        "vllm:kvformat_prefetch_layers",
        "Layers read ahead of the one that computes.",
        max,
    ),
}


class ConnectorStats(KVConnectorStats):
    """What came in, of one source or of several."""

    @classmethod
    def take(cls, counters: Counters, source: str) -> ConnectorStats | None:
        """What ``counters`` got since the last call, or None where nothing came."""
        interval = counters.take()
        if interval is None:
            return None
        gauges = {source: interval.gauges} if interval.gauges else {}
        return cls({"counts": interval.counts, "times": interval.times, "gauges": gauges})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counts = self.data.setdefault("counts", {})
        for name, count in other.data.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + count
        times = self.data.setdefault("times", {})
        for phase, seconds in other.data.get("times", {}).items():
            times.setdefault(phase, []).extend(seconds)
        gauges = self.data.setdefault("gauges", {})
        for source, values in other.data.get("gauges", {}).items():
            gauges.setdefault(source, {}).update(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of the log: every count, and per phase the number of times and the mean."""
        found: dict[str, int | float] = dict(sorted(self.data.get("counts", {}).items()))
        for phase, seconds in sorted(self.data.get("times", {}).items()):
            found[f"{phase}_count"] = len(seconds)
            found[f"{phase}_avg_ms"] = round(sum(seconds) / len(seconds) * 1e3, 3)
        for name, value in _merged_gauges(self.data.get("gauges", {})):
            found[name] = value
        return found


class PrometheusMetrics(KVConnectorPromMetrics):
    """The metrics of connector/README.md, "What the metrics mean", one set an engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._counters = [
            self._counter_cls(
                name=metric.name,
                documentation=metric.help,
                labelnames=[*self._labelnames, *([metric.label] if metric.label else [])],
            )
            for metric in COUNTERS
        ]
        self._seconds = self._histogram_cls(
            name=PHASE_SECONDS,
            documentation="Time spent in a phase of lookup, load or save.",
            buckets=_BUCKETS_S,
            labelnames=[*self._labelnames, "phase"],
        )
        self._gauges = {
            name: self._gauge_cls(
                name=metric_name,
                documentation=help_text,
                labelnames=self._labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, (metric_name, help_text, _) in GAUGES.items()
        }
        # From the start on, so that a rate or an alert has a value before anything has happened.
        for values in self.per_engine_labelvalues.values():
            for metric, counter in zip(COUNTERS, self._counters, strict=True):
                if not metric.label:
                    counter.labels(*values)
            self._gauges["breaker_open"].labels(*values).set(0)
        #: The last that each source of each engine said.
        self._standing: dict[int, dict[str, dict[str, float]]] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.get("counts", {}).items():
            index, label = _counter_of(name)
            self._counters[index].labels(*values, *label).inc(count)
        for phase, seconds in transfer_stats_data.get("times", {}).items():
            histogram = self._seconds.labels(*values, phase)
            for each in seconds:
                histogram.observe(each)
        if changed := transfer_stats_data.get("gauges"):
            standing = self._standing.setdefault(engine_idx, {})
            for source, gauges in changed.items():
                standing.setdefault(source, {}).update(gauges)
            for name, value in _merged_gauges(standing):
                self._gauges[name].labels(*values).set(value)


def _counter_of(count_name: str) -> tuple[int, list[str]]:
    """Which counter a count feeds, and the value of its label, if it has one."""
    for index, metric in enumerate(COUNTERS):
        if metric.label and count_name.startswith(metric.prefix):
            return index, [count_name.removeprefix(metric.prefix)]
        if count_name == metric.prefix:
            return index, []
    raise AssertionError("the last counter takes every name")


def _merged_gauges(
    sources: Mapping[str, Mapping[str, float]],
) -> Iterator[tuple[str, float]]:
    """Each gauge that some source knows, over all sources."""
    for name, (_, _, merge) in GAUGES.items():
        known = [values[name] for values in sources.values() if name in values]
        if known:
            yield name, merge(known)

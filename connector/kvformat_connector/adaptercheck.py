"""Whether a step is computed with the adapters that its plan names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvformat_connector.engine import LoadedAdapters
from kvformat_connector.messages import RequestStep


class Mistaken(NamedTuple):
    """Requests whose KV belongs elsewhere, and the numbers of adapters that aren't what the plan
    takes them for."""

    request_ids: set[str]
    changed_adapters: list[int]


def mistaken_requests(loaded: LoadedAdapters, steps: Iterable[RequestStep]) -> Mistaken:
    """Compare what the engine has loaded. It has loaded what the requests of its batch need before
    the step begins; for one that waits for whole objects it may do so later."""
    found = Mistaken(set(), [])
    for step in steps:
        if not step.adapter_number:
            continue
        digest = loaded.digest(step.adapter_number)
        if digest is None:
            if step.load_mode == "layerwise":
                found.request_ids.add(step.request_id)
        elif digest != step.variant.adapter.partition(" ")[0]:
            found.request_ids.add(step.request_id)
            found.changed_adapters.append(step.adapter_number)
    return found

"""The namespaces of one engine.

A block belongs to the weights and the adapter that computed it, and an engine may serve many
adapters, and other weights after an update. So it has a namespace for each such variant: groups,
objects and ranges are the same in all of them, while the identity differs, and with it manifest,
fingerprint and keys.

Source: spec/kvformat.md section 3.1 (identity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from kvformat.layout import Layout
from kvformat_connector.recent import Recent

T = TypeVar("T")

#: The configuration value that tells the weights of a draft whose layers are in the cache.
DRAFT_WEIGHTS: Final = "draft_weights"
#: Variants in use at once are far fewer: an engine computes with a few adapters a step.
_MAX_KEPT: Final = 64


class Variant(msgspec.Struct, frozen=True):
    """What a request is computed with, where it isn't what the engine started with.

    ``weights`` is the identity of the weights since the last update, empty for those of the start;
    ``adapter`` the identity of a LoRA adapter, empty for none. The scheduler decides it, and the
    plan carries it to the workers.
    """

    weights: str = ""
    adapter: str = ""


def layout_of(layout: Layout, variant: Variant) -> Layout:
    """The layout of an engine's variant."""
    before = layout.identity
    weights = variant.weights or before.weights
    config = before.config
    if config.get(DRAFT_WEIGHTS) == before.weights:
        # An operator's word on the weights is one on the draft's, too.
        config = {**config, DRAFT_WEIGHTS: weights}
    identity = msgspec.structs.replace(
        before, weights=weights, adapter=variant.adapter, config=config
    )
    return msgspec.structs.replace(layout, identity=identity)


class Namespaces(Generic[T]):
    """What ``make`` gives for each variant's layout: made when a variant is first used, and kept
    for the variants used last."""

    def __init__(self, layout: Layout, make: Callable[[Layout], T]) -> None:
        self._layout = layout
        self._make = make
        self._kept: Recent[Variant, T] = Recent(_MAX_KEPT)

    def of(self, variant: Variant) -> T:
        """The value of a variant."""
        found = self._kept.get(variant)
        if found is None:
            found = self._make(layout_of(self._layout, variant))
        self._kept.keep(variant, found)
        return found

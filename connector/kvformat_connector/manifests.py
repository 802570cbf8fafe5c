"""Manifests of the namespaces in use.

Source: spec/kvformat.md section 4 (manifests).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvformat_connector.namespaces import Variant
from kvformat_connector.objects import Rank
from kvformat_connector.recent import Recent
from kvformat_connector.transfer import Channel

#: A store may evict a manifest like any object, so it is offered again from time to time while the
#: namespace is in use, for loads as well as for saves: a store that counts a put as a use, as the
#: file store does, then keeps it as long as the objects it explains.
_EVERY_S: Final = 60.0
_MAX_KEPT: Final = 1024


class Manifests:
    """When each is to be published again. Kept for more namespaces than objects are: an engine
    that goes round many adapters need not publish at each step. The engine's thread calls."""

    def __init__(self, rank: Rank, clock: Callable[[], float]) -> None:
        self._rank = rank
        self._clock = clock
        self._due_at: Recent[Variant, float] = Recent(_MAX_KEPT)

    def publish(self, variants: Iterable[Variant], channel: Channel) -> None:
        """Have the channel store those that are due."""
        now = self._clock()
        for variant in variants:
            if now < self._due_at.get(variant, now):
                continue
            self._due_at.keep(variant, now + _EVERY_S)
            channel.post(self._rank.publish_manifest, channel, self._rank.templates(variant))

"""How a request's loads are moved: layer by layer while it computes, or as whole objects before."""

from __future__ import annotations

from typing import Final

import msgspec

from kvformat.errors import ConfigError, Reason
from kvformat.layout import Layout
from kvformat_connector.config import NO_LIMIT, Options
from kvformat_connector.engine import Ranks
from kvformat_connector.messages import LoadMode
from kvformat_connector.needs import fails_by_block

#: Of so few layers, layerwise loading could hide two thirds of a transfer at best.
_FEW_LAYERS: Final = 3
#: A store moves so much in a few milliseconds as whole objects, which is about the engine step that
#: a request outside of the batch waits for. Layer by layer it would be a call, and a range of a few
#: KiB a block, for each layer, in a step that the whole batch waits for.
_FEW_NBYTES: Final = 4 << 20


class LoadPolicy(msgspec.Struct, frozen=True):
    """Loads of fewer than ``bulk_below_nbytes`` are moved in bulk, all others layer by layer."""

    bulk_below_nbytes: int = 0

    def mode(self, nbytes: int) -> LoadMode:
        """How a load of so many bytes is moved."""
        return "bulk" if nbytes < self.bulk_below_nbytes else "layerwise"


def load_policy(layout: Layout, ranks: Ranks, options: Options) -> LoadPolicy:
    """How the requests of this engine are loaded.

    In bulk where a layer can't be waited for: where the engine can't compute anew a part of what
    failed during a step, and in a pipeline, whose later stages compute on what an earlier one
    failed to load before anybody can tell them. ``auto`` also takes bulk loads where layerwise ones
    can't win: for models of so few layers that computing one hides little of the transfer of the
    others, and for loads of few bytes.

    Raises ``ConfigError`` where layers must be waited for and can't be.
    """
    can_wait = fails_by_block(layout) and ranks.num_stages == 1
    if options.chunk_prefix_reload:
        # Whoever needs a prefix again in each chunk can't be given it once and for all.
        if can_wait:
            return LoadPolicy()
        raise ConfigError(
            Reason.CONFIG_UNSUPPORTED,
            "option 'chunk_prefix_reload' has the value True, but pipelines and models with other "
            "than one group of full attention are loaded before they compute",
        )
    if not can_wait or options.use_layerwise is False:
        return LoadPolicy(NO_LIMIT)
    if options.use_layerwise == "auto":
        num_layers = sum(len(group.layers) for group in layout.groups)
        return LoadPolicy(NO_LIMIT if num_layers <= _FEW_LAYERS else _FEW_NBYTES)
    return LoadPolicy()

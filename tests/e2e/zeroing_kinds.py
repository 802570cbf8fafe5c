"""The negative control for one kind of group among several."""

from __future__ import annotations

import os

from kvformat_connector.demo.zeroing import ZeroingConnector
from kvformat_connector.engine import layer_addresses
from kvformat_connector.messages import RequestStep


class ZeroingKindConnector(ZeroingConnector):
    """Clears what it has loaded of the kind that ``ZEROED_KIND`` in the environment names."""

    def _clear(self, step: RequestStep, layer_name: str) -> None:
        group = self._layout.groups[layer_addresses(self._layout)[layer_name].group]
        if group.kind == os.environ["ZEROED_KIND"]:
            super()._clear(step, layer_name)

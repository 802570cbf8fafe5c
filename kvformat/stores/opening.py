"""Find a store by the scheme of its URI.

A store is any callable that takes the URI and gives a :class:`~kvformat.stores.protocol.Store`,
published under its scheme as an entry point of the group ``kvformat.stores``. It raises
``ConfigError`` for options it doesn't know and ``StoreUnavailableError`` where it can't be opened.
A store that changes nothing when it is opened with ``readonly=true`` says so by naming that option
in an attribute ``options`` of the callable.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from kvformat.errors import ConfigError, Reason
from kvformat.stores.protocol import Store
from kvformat.stores.uri import parse_store_uri

ENTRY_POINT_GROUP = "kvformat.stores"


def open_store(uri: str, *, readonly: bool = False) -> Store:
    """Open the store that ``uri`` names, e.g. ``file:///var/cache/kv?max_nbytes=100GiB``.

    ``readonly`` is for who only looks: a store that has the option ``readonly`` is opened with it,
    unless ``uri`` sets it.

    Raises ``ConfigError`` for a URI that no store understands and ``StoreUnavailableError`` for a
    store that doesn't answer. The caller closes the store.
    """
    parsed = parse_store_uri(uri)
    scheme = parsed.scheme
    # Two distributions may publish one scheme (an editable install beside a wheel): any will do.
    published = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if scheme not in published:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option store: no store for scheme {scheme!r} (found {uri!r}); "
            f"known schemes: {', '.join(sorted(published)) or 'none, is kvformat installed?'}",
        )
    opener = cast("Callable[[str], Store]", published[scheme].load())
    has_option = "readonly" in getattr(opener, "options", ())
    if readonly and has_option and "readonly" not in parsed.options:
        uri = f"{uri}&readonly=true" if parsed.options else f"{uri.removesuffix('?')}?readonly=true"
    return opener(uri)

"""What only the master's HTTP port tells: the keys of a Mooncake store, and who lends it memory."""

from __future__ import annotations

import http.client

from kvformat.errors import Reason, StoreUnavailableError
from kvformat_connector.store.mooncake_options import split_address

_LIMIT_S = 10.0


def fetch_keys(metrics: str) -> list[str]:
    """The committed keys, one a line, so a key with a newline comes as several.

    ``metrics`` is ``host:port``. Raises ``StoreUnavailableError`` where that isn't a master's.
    """
    body = _fetch(metrics, "/get_all_keys")
    return body.removesuffix("\n").split("\n") if body else []


def has_storage(metrics: str) -> bool:
    """Whether some process lends memory. Raises as :func:`fetch_keys` does."""
    return bool(_fetch(metrics, "/get_all_segments").strip())


def _fetch(metrics: str, page: str) -> str:
    host, port = split_address("metrics", metrics)
    connection = http.client.HTTPConnection(host, port, timeout=_LIMIT_S)
    try:
        connection.request("GET", page)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            f"option metrics: the master's HTTP port {metrics!r} doesn't answer: {error}",
        ) from error
    finally:
        connection.close()
    if response.status != 200:
        raise StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            f"option metrics: {metrics!r} answered {response.status} on {page}",
        )
    return body.decode(errors="replace")

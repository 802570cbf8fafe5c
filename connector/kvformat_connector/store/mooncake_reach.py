"""Do Mooncake's services answer? They are asked by hand, and with a deadline.

Mooncake's own client has none: before a service that takes connections and says nothing, its set-up
stands for minutes, and the whole interpreter with it.
"""

from __future__ import annotations

import re
import socket
from typing import Final

from kvformat.errors import ConfigError, Reason, StoreUnavailableError
from kvformat_connector.deadline import within
from kvformat_connector.store.mooncake_options import split_address

_REACH_LIMIT_S = 2.0
#: Finding the address of a name has no deadline of its own.
_NAME_LIMIT_S = 3.0
# The header of a request for no function, in the framing of the master's RPC (coro_rpc): a magic
# byte and 19 more. A master answers that there is no such function.
_EMPTY_REQUEST: Final = b"\x15" + bytes(19)
_PEER_TO_PEER: Final = "P2PHANDSHAKE"
#: By scheme of a metadata server: the port where none is given, and something that it answers.
_HTTP_REQUEST: Final = b"GET / HTTP/1.0\r\n\r\n"
_METADATA_SERVERS: Final = {
    "http": (80, _HTTP_REQUEST),
    "https": (443, _HTTP_REQUEST),
    "etcd": (2379, _HTTP_REQUEST),
    "redis": (6379, b"PING\r\n"),
}


def reach_master(address: str) -> str:
    """This machine's address on the way to the master.

    Raises ``StoreUnavailableError`` where nothing answers there.
    """
    host, port = split_address("master_server_address", address)
    try:
        # What it says is left to setup, which refuses a stranger in two seconds.
        return _speak(host, port, _EMPTY_REQUEST, "master")
    except OSError as error:
        raise StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            f"option store: no Mooncake master answers at {address!r}: {error}",
        ) from error


def reach_metadata_server(text: str) -> None:
    """See that one of the servers that ``text`` names answers.

    Raises ``ConfigError`` for what names none, ``StoreUnavailableError`` where nothing answers.
    """
    if text == _PEER_TO_PEER:
        return
    scheme, separator, rest = text.partition("://")
    if not separator:  # as Mooncake reads it
        scheme, rest = "etcd", text
    if scheme not in _METADATA_SERVERS:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option metadata_server: expected {_PEER_TO_PEER} or one of "
            f"{', '.join(f'{name}://host:port' for name in _METADATA_SERVERS)}; found {text!r}",
        )
    default_port, request = _METADATA_SERVERS[scheme]
    errors = []
    for address in re.split("[,;]", rest.partition("/")[0]):
        address = address.rpartition("@")[2]
        if not re.search(r":\d+$", address):
            address = f"{address}:{default_port}"
        try:
            _speak(*split_address("metadata_server", address), request, "metadata server")
        except OSError as error:
            errors.append(f"{address!r}: {error}")
        else:
            return
    raise StoreUnavailableError(
        Reason.STORE_UNAVAILABLE,
        f"option metadata_server: no server answers at {'; '.join(errors)} (found {text!r}, "
        f"{_PEER_TO_PEER} needs none)",
    )


def _speak(host: str, port: int, request: bytes, what: str) -> str:
    """Connect, see that something is answered, and hang up; this machine's address there."""
    found = within(
        _NAME_LIMIT_S,
        f"finding the Mooncake {what} by its name, {host!r},",
        lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
    )
    names = sorted({str(address[0]) for *_, address in found})
    for left, name in enumerate(names, 1 - len(names)):
        try:
            return _speak_at(name, port, request, _REACH_LIMIT_S / len(names))
        except OSError:
            if not left:
                raise
    raise OSError(f"{host!r} has no address")


def _speak_at(name: str, port: int, request: bytes, limit_s: float) -> str:
    with socket.create_connection((name, port), timeout=limit_s) as connection:
        connection.sendall(request)
        connection.recv(1)
        own: str = connection.getsockname()[0]
        return own

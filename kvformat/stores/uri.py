"""The URI that names a store: ``scheme://authority/path?option=value&...``.

Source: spec/kvformat.md section 8; the options of each scheme stand in its store's module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from kvformat.errors import ConfigError, Reason

_NBYTES = re.compile(r"([0-9]{1,18})\s*(?:([KMGT])(?:iB|B)?|B)?", re.IGNORECASE)


class StoreURI(NamedTuple):
    """A store URI in parts. ``path`` and the options are percent-decoded."""

    scheme: str
    authority: str
    path: str
    options: Mapping[str, str]


def parse_store_uri(uri: str) -> StoreURI:
    """Split ``uri``. Raises ``ConfigError`` for text that is no URI or has an option twice."""
    if not is_text(uri):
        raise ConfigError(Reason.CONFIG_VALUE, f"option store: {uri!r} is no text")
    if "://" not in uri:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option store: expected a URI such as file:///path, found {uri!r}",
        )
    try:
        parts = urlsplit(uri)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(
            Reason.CONFIG_VALUE, f"option store: {uri!r} is not a URI: {error}"
        ) from error
    if parts.fragment:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option store: {uri!r} has a fragment; write a '#' of the path as %23",
        )
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError(Reason.CONFIG_CONFLICT, f"option store: {uri!r} has an option twice")
    return StoreURI(parts.scheme, parts.netloc, unquote(parts.path), options)


def is_text(value: str) -> bool:
    """Whether ``value`` can be written as UTF-8, which a lone surrogate can't."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def refuse_unknown_options(uri: StoreURI, known: Collection[str]) -> None:
    """Raise ``ConfigError`` for the first option of ``uri`` that is not in ``known``."""
    for name, value in uri.options.items():
        if name not in known:
            raise ConfigError(
                Reason.CONFIG_UNKNOWN,
                f"option store: {uri.scheme}:// has no option {name!r} (found {name}={value!r}); "
                f"it has: {', '.join(sorted(known)) or 'none'}",
            )


def parse_nbytes(option: str, text: str) -> int:
    """A size such as ``4096``, ``10G``, ``10GB`` or ``10GiB``.

    Units are powers of 1024 however they are spelled, as Mooncake and vLLM read them. Raises
    ``ConfigError`` naming ``option`` for anything else.
    """
    match = _NBYTES.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option {option}: expected bytes such as 4096, 10G, 10GB or 10GiB, found {text!r}",
        )
    number, unit = match.groups()
    return int(number) << (10 * " KMGT".index((unit or " ").upper()))


def parse_flag(option: str, text: str) -> bool:
    """``true`` or ``false``. Raises ``ConfigError`` naming ``option`` for anything else."""
    if text not in ("true", "false"):
        raise ConfigError(
            Reason.CONFIG_VALUE, f"option {option}: expected true or false, found {text!r}"
        )
    return text == "true"


def is_readonly(uri: str) -> bool:
    """Whether a store's URI says that nothing in it is to be changed."""
    return parse_flag("readonly", parse_store_uri(uri).options.get("readonly", "false"))


def parse_whole_number(option: str, text: str) -> int:
    """A number of at least 1. Raises ``ConfigError`` naming ``option`` for anything else."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) == 0:
        raise ConfigError(
            Reason.CONFIG_VALUE, f"option {option}: expected a number above zero, found {text!r}"
        )
    return int(text)

"""Keys: one grammar, one function that formats, one that parses.

``parse_key(format_key(x)) == x`` for every x, and no two x give one key. A key's constant part is
built once per (namespace, object, shard) by :func:`key_prefix`; a key is that plus the hash in hex.

Source: spec/kvformat.md section 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvformat import registry
from kvformat.errors import KeyFormatError, LayoutError, Reason, UnsupportedVersionError
from kvformat.fingerprint import FINGERPRINT_NBYTES, fingerprint
from kvformat.layout import Layout, check_text

FORMAT_NAME: Final = "kvformat"
_FORMAT_PART: Final = f"{FORMAT_NAME}{registry.FORMAT_MAJOR}"
_EMPTY_TEXT: Final = "~"
_MANIFEST_PART: Final = "manifest"

_UNRESERVED: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_ESCAPES: Final = [chr(b) if b in _UNRESERVED else f"%{b:02X}" for b in range(256)]

_FORMAT = re.compile(rf"{FORMAT_NAME}([1-9][0-9]{{0,4}})")
_TEXT = re.compile(r"~|(?!\.)(?:[A-Za-z0-9_.\-]|%[0-9A-F]{2})+")
_ESCAPE = re.compile(rb"%([0-9A-F]{2})")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_GROUPS = re.compile(r"g(?!0{16})([0-9a-f]{16})")
_SHARD = re.compile(r"l([0-9a-f]{4})h([0-9a-f]{4})c([0-9a-f]{4})")
_HASH = re.compile(rf"(?:[0-9a-f]{{2}}){{1,{registry.MAX_HASH_NBYTES}}}")


class Shard(msgspec.Struct, frozen=True, order=True, gc=False):
    """Coordinates of one object in the shard grid: indices along layer, head and context."""

    layer: int = 0
    head: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        # One test for all three, because a header decode makes a shard each time: the "or" of
        # integers is negative where one is, and has a high bit where one has.
        if (self.layer | self.head | self.context) >> 16:
            raise LayoutError(Reason.KEY_SHARD, f"{self}: an index is not in 0..65535")


class Namespace(msgspec.Struct, frozen=True):
    """Whose objects: tenant, model and 16-byte layout fingerprint."""

    tenant: str
    model: str
    fingerprint: bytes

    def __post_init__(self) -> None:
        check_text(self.tenant, Reason.KEY_TEXT, "tenant")
        check_text(self.model, Reason.KEY_TEXT, "model")
        if len(self.fingerprint) != FINGERPRINT_NBYTES:
            raise LayoutError(
                Reason.KEY_FINGERPRINT,
                f"a fingerprint has {FINGERPRINT_NBYTES} bytes, found {len(self.fingerprint)}",
            )


class BlockKey(msgspec.Struct, frozen=True):
    """The name of one object: namespace, its groups as a bitmap, shard, and full block hash."""

    namespace: Namespace
    group_bitmap: int
    shard: Shard
    block_hash: bytes

    def __post_init__(self) -> None:
        _check_group_bitmap(self.group_bitmap)
        _check_block_hash(self.block_hash)


class ManifestKey(msgspec.Struct, frozen=True):
    """The name under which a namespace's manifest is stored."""

    namespace: Namespace


def layout_namespace(layout: Layout) -> Namespace:
    """The namespace of a layout. Computes the fingerprint: keep the result."""
    return Namespace(layout.identity.tenant, layout.identity.model, fingerprint(layout))


def namespace_prefix(namespace: Namespace) -> str:
    """The prefix, with its final ``/``, of every key of a namespace and of no other key."""
    tenant, model = escape_text(namespace.tenant), escape_text(namespace.model)
    return f"{_FORMAT_PART}/{tenant}/{model}/{namespace.fingerprint.hex()}/"


def key_prefix(namespace: Namespace, group_bitmap: int, shard: Shard) -> str:
    """The part of a key that is constant for one object of the layout and one shard."""
    return namespace_prefix(namespace) + object_part(group_bitmap, shard)


def object_part(group_bitmap: int, shard: Shard) -> str:
    """What stands between namespace and block hash, with its final ``/``: the same for one object
    and shard in every namespace."""
    _check_group_bitmap(group_bitmap)
    return f"g{group_bitmap:016x}/l{shard.layer:04x}h{shard.head:04x}c{shard.context:04x}/"


def format_keys(prefixes: Iterable[str], block_hashes: Sequence[bytes]) -> list[list[str]]:
    """Keys of many blocks under several prefixes: one row a prefix, one key a block.

    The hashes are the engine's and are not checked again here.
    """
    hexes = [block_hash.hex() for block_hash in block_hashes]
    return [[prefix + text for text in hexes] for prefix in prefixes]


def format_key(key: BlockKey | ManifestKey) -> str:
    """The text of a key."""
    if isinstance(key, ManifestKey):
        return namespace_prefix(key.namespace) + _MANIFEST_PART
    return key_prefix(key.namespace, key.group_bitmap, key.shard) + key.block_hash.hex()


def parse_key(text: str, digest_nbytes: int | None = None) -> BlockKey | ManifestKey:
    """What a key says.

    Args:
        text: a key of any origin.
        digest_nbytes: the length of the layout's block hashes, where the layout is known.

    Raises:
        KeyFormatError: not a key of this format; ``reason`` tells the first part that is wrong.
        UnsupportedVersionError: a key of another format major.
    """
    if len(text) > registry.MAX_KEY_NBYTES:
        raise KeyFormatError(
            Reason.KEY_LENGTH, f"key has {len(text)} characters, at most {registry.MAX_KEY_NBYTES}"
        )
    parts = text.split("/")
    match = _FORMAT.fullmatch(parts[0])
    if match is None:
        raise KeyFormatError(
            Reason.KEY_FORMAT, f"key does not start with {_FORMAT_PART}/: {text[:80]!r}"
        )
    if parts[0] != _FORMAT_PART:
        raise UnsupportedVersionError(
            Reason.KEY_VERSION,
            f"key has format major {match[1]}, this library knows {registry.FORMAT_MAJOR}",
        )
    if len(parts) not in (5, 7) or (len(parts) == 5 and parts[4] != _MANIFEST_PART):
        raise KeyFormatError(
            Reason.KEY_FORMAT,
            f"key has {len(parts)} parts; a block key has 7, a manifest key 5 and ends in "
            f"/{_MANIFEST_PART}",
        )
    namespace = Namespace(
        unescape_text(parts[1]),
        unescape_text(parts[2]),
        bytes.fromhex(
            _part(_FINGERPRINT, parts[3], Reason.KEY_FINGERPRINT, "32 lowercase hex digits")[0]
        ),
    )
    if len(parts) == 5:
        return ManifestKey(namespace)
    groups = _part(_GROUPS, parts[4], Reason.KEY_GROUPS, "g and 16 lowercase hex digits, not all 0")
    shard = _part(_SHARD, parts[5], Reason.KEY_SHARD, "l, h and c with 4 lowercase hex digits each")
    block_hash = _part(_HASH, parts[6], Reason.KEY_HASH, "lowercase hex of 1 to 64 bytes")
    if digest_nbytes is not None and len(block_hash[0]) != 2 * digest_nbytes:
        raise KeyFormatError(
            Reason.KEY_HASH,
            f"the key's block hash has {len(block_hash[0]) // 2} bytes, the layout's have "
            f"{digest_nbytes}",
        )
    return BlockKey(
        namespace,
        int(groups[1], 16),
        Shard(int(shard[1], 16), int(shard[2], 16), int(shard[3], 16)),
        bytes.fromhex(block_hash[0]),
    )


def escape_text(text: str) -> str:
    """Free text as one key part: never empty, without ``/``, never ``.`` or ``..``."""
    if not text:
        return _EMPTY_TEXT
    try:
        escaped = "".join([_ESCAPES[byte] for byte in text.encode("utf-8")])
    except UnicodeEncodeError as error:
        raise LayoutError(
            Reason.KEY_TEXT, f"text {text[:40]!r} is not valid Unicode: {error.reason}"
        ) from None
    return f"%2E{escaped[1:]}" if escaped[0] == "." else escaped


def unescape_text(part: str) -> str:
    """The free text of a key part. Only the spelling that ``escape_text`` writes is accepted."""
    if part == _EMPTY_TEXT:
        return ""
    try:
        if _TEXT.fullmatch(part) is not None:
            data = _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode()), part.encode("ascii"))
            text = data.decode("utf-8")
            if len(data) <= registry.MAX_TEXT_NBYTES and escape_text(text) == part:
                return text
    except UnicodeDecodeError:
        pass
    raise KeyFormatError(
        Reason.KEY_TEXT,
        f"part {part[:80]!r} is not canonically escaped UTF-8 of at most "
        f"{registry.MAX_TEXT_NBYTES} bytes",
    )


def _part(pattern: re.Pattern[str], part: str, reason: Reason, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(part)
    if match is None:
        raise KeyFormatError(reason, f"expected {expected}, found {part[:80]!r}")
    return match


def _check_group_bitmap(bitmap: int) -> None:
    if not 0 < bitmap < 1 << registry.MAX_GROUPS:
        raise LayoutError(Reason.KEY_GROUPS, f"group bitmap {bitmap:#x} is not in 1..2^64-1")


def _check_block_hash(block_hash: bytes) -> None:
    if not 0 < len(block_hash) <= registry.MAX_HASH_NBYTES:
        raise LayoutError(
            Reason.KEY_HASH,
            f"a block hash has 1 to {registry.MAX_HASH_NBYTES} bytes, found {len(block_hash)}",
        )

"""The manifest (a layout as canonical JSON) and the digests taken of it.

Canonical JSON is RFC 8785 restricted to objects, arrays, strings, booleans and integers below
2^53, so that ``sha256sum`` and ``jq -cS`` are enough to check a fingerprint.

Source: spec/kvformat.md section 4.
"""

from __future__ import annotations

import hashlib
import json
from types import GenericAlias
from typing import Final, get_args, get_origin

import msgspec

from kvformat import registry
from kvformat.errors import (
    FingerprintMismatchError,
    LayoutError,
    ManifestError,
    Reason,
    UnsupportedVersionError,
)
from kvformat.layout import SCHEMA, Layout

FINGERPRINT_NBYTES: Final = 16


def canonical_json(value: object) -> bytes:
    """RFC 8785 bytes of a value of the restricted domain.

    Sorting by code point equals RFC 8785's order by UTF-16 unit here, because object names are
    ASCII in every manifest.
    """
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
    )
    return text.encode("utf-8")


def manifest(layout: Layout) -> bytes:
    """The layout as canonical JSON."""
    return canonical_json(msgspec.to_builtins(layout))


def fingerprint(layout: Layout) -> bytes:
    """The layout fingerprint: the first 16 bytes of the manifest's SHA-256."""
    return _digest(manifest(layout))


def content_fingerprint(layout: Layout) -> bytes:
    """The same without the shard grid: what prefill and decode peers compare."""
    fields = msgspec.to_builtins(layout)
    del fields["grid"]
    return _digest(canonical_json(fields))


def parse_manifest(data: bytes | bytearray | memoryview, expected: bytes | None = None) -> Layout:
    """The layout of a stored manifest.

    Args:
        data: bytes of any origin. They must be the canonical form.
        expected: the 16-byte fingerprint of the namespace they were found under.

    Raises:
        ManifestError: not JSON, not a layout, not canonical, over the size limit.
        UnsupportedVersionError: another schema major.
        FingerprintMismatchError: a manifest, but of another namespace.
    """
    data = bytes(data)
    layout = parse_layout(data)
    if manifest(layout) != data:
        raise ManifestError(
            Reason.MANIFEST_CANONICAL,
            "the manifest is not in canonical form (order, spacing, text)",
        )
    if expected is not None and _digest(data) != expected:
        raise FingerprintMismatchError(
            Reason.MANIFEST_FINGERPRINT,
            f"manifest has fingerprint {_digest(data).hex()}, expected {expected.hex()}",
        )
    return layout


def parse_layout(data: bytes) -> Layout:
    """The layout of a JSON document whose fields, all of them, may stand in any order.

    The rules are applied in the order of section 4.2: JSON, numbers, schema, fields, layout.

    Raises ``ManifestError`` or ``UnsupportedVersionError`` like :func:`parse_manifest`.
    """
    fields = _parse_json(data)
    if not isinstance(fields, dict):
        raise ManifestError(Reason.MANIFEST_FIELD, "manifest is not an object")
    if isinstance(schema := fields.get("schema"), str) and schema != SCHEMA:
        raise UnsupportedVersionError(
            Reason.LAYOUT_SCHEMA, f"manifest has schema {schema!r}, this library knows {SCHEMA!r}"
        )
    if "schema" not in fields:
        raise ManifestError(Reason.MANIFEST_FIELD, "manifest has no schema")
    try:
        msgspec.convert(fields, _FIELDS, strict=True)
        return msgspec.convert(fields, Layout, strict=True)
    except msgspec.ValidationError as error:
        raise ManifestError(Reason.MANIFEST_FIELD, f"manifest: {error}") from None
    except LayoutError as error:
        raise ManifestError(error.reason, error.detail) from None


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:FINGERPRINT_NBYTES]


def _parse_json(data: bytes) -> object:
    """The value of a JSON document of the restricted domain: first all of its syntax, then its
    numbers, so that which of two faults is reported doesn't depend on which comes first."""
    if len(data) > registry.MAX_MANIFEST_NBYTES:
        raise ManifestError(
            Reason.MANIFEST_JSON,
            f"manifest has {len(data)} bytes, at most {registry.MAX_MANIFEST_NBYTES}",
        )
    refused: list[str] = []

    def parse_int(text: str) -> int:
        # The length check keeps a run of a million digits from being converted at all.
        if text == "-0" or len(text) > 17 or abs(int(text)) > registry.MAX_INTEGER:
            refused.append(text)
            return 0
        return int(text)

    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_fields,
            parse_int=parse_int,
            parse_float=refused.append,
            parse_constant=_no_constant,
        )
        _check_depth(value)
        canonical_json(value)  # an escaped lone surrogate parses, but is no text
    except RecursionError:
        raise ManifestError(Reason.MANIFEST_JSON, "manifest is nested too deeply") from None
    except ValueError as error:  # UnicodeError and JSONDecodeError are ValueErrors
        raise ManifestError(Reason.MANIFEST_JSON, f"manifest is not JSON: {error}") from None
    if refused:
        raise ManifestError(
            Reason.MANIFEST_NUMBER,
            f"{refused[0][:40]} is not an integer below 2^53 in its only spelling",
        )
    return value


def _check_depth(value: object) -> None:
    """Refuse a value with more arrays and objects around each other than a manifest may have."""
    level = [value]
    for _ in range(registry.MAX_DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if any(isinstance(item, dict | list) for item in level):
        raise ValueError(f"more than {registry.MAX_DEPTH} levels of arrays and objects")


def _unique_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ManifestError(Reason.MANIFEST_JSON, "a field occurs twice in one object")
    return fields


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON value")


def _fields_alone(annotation: object) -> object:
    """A type of the layout with all of its fields required and none of its rules."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        fields = msgspec.structs.fields(annotation)
        return msgspec.defstruct(
            annotation.__name__,
            [(field.name, _fields_alone(field.type)) for field in fields],
            forbid_unknown_fields=True,
        )
    if get_origin(annotation) is tuple:
        return GenericAlias(tuple, (_fields_alone(get_args(annotation)[0]), ...))
    return annotation


_FIELDS: Final = _fields_alone(Layout)

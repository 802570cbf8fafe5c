"""A schema-versioned format for KV-cache objects.

A layout says what every byte of a block means (:mod:`~kvformat.layout`, digests in
:mod:`~kvformat.fingerprint`); a key names an object (:mod:`~kvformat.key`); an object opens with a
header (:mod:`~kvformat.header`), which a reader holds against its own layout before it uses a byte
(:mod:`~kvformat.acceptance`); a plan turns a layout and a rank's memory into byte ranges
(:mod:`~kvformat.plan`); objects live in a store (:mod:`~kvformat.stores`).

Source: spec/kvformat.md.
"""

from kvformat.acceptance import check_header, check_range, check_same_write
from kvformat.diff import Difference, diff
from kvformat.errors import (
    ChecksumMismatchError,
    ConfigError,
    ConnectorError,
    FingerprintMismatchError,
    HandshakeError,
    HeaderError,
    KeyFormatError,
    KVFormatError,
    LayoutError,
    ManifestError,
    PlanError,
    Reason,
    RemoteDataError,
    StoreUnavailableError,
    TransferError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from kvformat.fingerprint import (
    content_fingerprint,
    fingerprint,
    manifest,
    parse_layout,
    parse_manifest,
)
from kvformat.header import GroupSpan, ObjectHeader, decode_header, encode_header, new_header
from kvformat.key import (
    BlockKey,
    ManifestKey,
    Namespace,
    Shard,
    format_key,
    format_keys,
    key_prefix,
    layout_namespace,
    namespace_prefix,
    parse_key,
)
from kvformat.layout import (
    Component,
    Group,
    HashRecipe,
    Identity,
    Layer,
    Layout,
    ShardGrid,
    component,
)
from kvformat.objectmap import ComponentRange, LayerRange, ObjectMap, object_maps
from kvformat.placement import ComponentPlacement, LayerPlacement, Placement, Region
from kvformat.plan import (
    Batch,
    LayerTemplate,
    Limits,
    Ranges,
    RangeTemplate,
    RowTemplate,
    TransferTemplate,
    plan_get,
    plan_put,
    plan_transfer,
)

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BlockKey",
    "ChecksumMismatchError",
    "Component",
    "ComponentPlacement",
    "ComponentRange",
    "ConfigError",
    "ConnectorError",
    "Difference",
    "FingerprintMismatchError",
    "Group",
    "GroupSpan",
    "HandshakeError",
    "HashRecipe",
    "HeaderError",
    "Identity",
    "KVFormatError",
    "KeyFormatError",
    "Layer",
    "LayerPlacement",
    "LayerRange",
    "LayerTemplate",
    "Layout",
    "LayoutError",
    "Limits",
    "ManifestError",
    "ManifestKey",
    "Namespace",
    "ObjectHeader",
    "ObjectMap",
    "Placement",
    "PlanError",
    "RangeTemplate",
    "Ranges",
    "Reason",
    "Region",
    "RemoteDataError",
    "RowTemplate",
    "Shard",
    "ShardGrid",
    "StoreUnavailableError",
    "TransferError",
    "TransferTemplate",
    "UnsupportedFeatureError",
    "UnsupportedVersionError",
    "check_header",
    "check_range",
    "check_same_write",
    "component",
    "content_fingerprint",
    "decode_header",
    "diff",
    "encode_header",
    "fingerprint",
    "format_key",
    "format_keys",
    "key_prefix",
    "layout_namespace",
    "manifest",
    "namespace_prefix",
    "new_header",
    "object_maps",
    "parse_key",
    "parse_layout",
    "parse_manifest",
    "plan_get",
    "plan_put",
    "plan_transfer",
]

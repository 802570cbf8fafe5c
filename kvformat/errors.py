"""Every error of the project, in one tree.

``LayoutError`` and ``PlanError`` mean that the calling program is wrong; ``RemoteDataError`` means
that bytes or names which came from elsewhere are wrong, or are right but not for us;
``ConnectorError`` means that the world around the format (stores, peers, options) is wrong. Code
that handles an error looks at :attr:`KVFormatError.reason`, never at the text.

Source: spec/kvformat.md section 10, spec/registry.md "Reason codes".
"""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """Stable reason codes; a released code is never renamed, renumbered or reused."""

    # layouts (the caller's, or inside a manifest)
    LAYOUT_SCHEMA = "layout_schema"
    LAYOUT_IDENTITY = "layout_identity"
    LAYOUT_HASH = "layout_hash"
    LAYOUT_GROUP = "layout_group"
    LAYOUT_COMPONENT = "layout_component"
    LAYOUT_DTYPE = "layout_dtype"
    LAYOUT_OBJECTS = "layout_objects"
    LAYOUT_GRID = "layout_grid"
    LAYOUT_LIMIT = "layout_limit"
    # manifests
    MANIFEST_JSON = "manifest_json"
    MANIFEST_FIELD = "manifest_field"
    MANIFEST_NUMBER = "manifest_number"
    MANIFEST_CANONICAL = "manifest_canonical"
    MANIFEST_FINGERPRINT = "manifest_fingerprint"
    # keys
    KEY_FORMAT = "key_format"
    KEY_VERSION = "key_version"
    KEY_TEXT = "key_text"
    KEY_FINGERPRINT = "key_fingerprint"
    KEY_GROUPS = "key_groups"
    KEY_SHARD = "key_shard"
    KEY_HASH = "key_hash"
    KEY_LENGTH = "key_length"
    # headers, judged by themselves
    HEADER_TRUNCATED = "header_truncated"
    HEADER_MAGIC = "header_magic"
    HEADER_VERSION = "header_version"
    HEADER_SIZE = "header_size"
    HEADER_CHECKSUM = "header_checksum"
    HEADER_FEATURE = "header_feature"
    HEADER_RESERVED = "header_reserved"
    HEADER_HASH = "header_hash"
    HEADER_TOKENS = "header_tokens"
    HEADER_GROUPS = "header_groups"
    HEADER_COMPLETENESS = "header_completeness"
    HEADER_RANGES = "header_ranges"
    # headers and payloads, judged against the object that was asked for
    WRONG_FINGERPRINT = "wrong_fingerprint"
    WRONG_BLOCK = "wrong_block"
    WRONG_SHARD = "wrong_shard"
    WRONG_GROUPS = "wrong_groups"
    WRONG_SIZE = "wrong_size"
    WRONG_TOKENS = "wrong_tokens"
    INCOMPLETE = "incomplete"
    REPLACED = "replaced"
    CHECKSUM_ABSENT = "checksum_absent"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    # plans
    PLAN_COVERAGE = "plan_coverage"
    PLAN_BOUNDS = "plan_bounds"
    PLAN_PLACEMENT = "plan_placement"
    PLAN_LIMIT = "plan_limit"
    # stores, peers and options
    STORE_UNAVAILABLE = "store_unavailable"
    STORE_UNSUPPORTED = "store_unsupported"
    HANDSHAKE_REFUSED = "handshake_refused"
    TRANSFER_FAILED = "transfer_failed"
    CONFIG_UNKNOWN = "config_unknown"
    CONFIG_VALUE = "config_value"
    CONFIG_CONFLICT = "config_conflict"
    CONFIG_MISSING = "config_missing"
    CONFIG_UNSUPPORTED = "config_unsupported"


class KVFormatError(Exception):
    """Base of every error. ``reason`` is the stable code, ``detail`` a sentence for people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.detail} [{self.reason.value}]"


class LayoutError(KVFormatError):
    """A layout that its author described wrongly."""


class PlanError(KVFormatError):
    """A plan that can't be made, or a bind whose block ids leave the memory."""


class RemoteDataError(KVFormatError):
    """Bytes or names from elsewhere that are wrong, or not for us. To a reader: a miss."""


class ManifestError(RemoteDataError):
    """Bytes that are not a canonical manifest, or not the one that was asked for."""


class KeyFormatError(RemoteDataError):
    """Text that is not a key of this format."""


class HeaderError(RemoteDataError):
    """Bytes that are not a valid object header, or not that of the object asked for."""


class UnsupportedVersionError(RemoteDataError):
    """A schema or format major version this library doesn't know."""


class UnsupportedFeatureError(RemoteDataError):
    """A required feature bit this library doesn't know."""


class FingerprintMismatchError(RemoteDataError):
    """Data of another layout than the one asked for."""


class ChecksumMismatchError(RemoteDataError):
    """Payload bytes that are not the ones the writer described, or that it gave no checksums of.

    ``group`` and ``layer`` (its index in the group) say which; None where it is the whole object.
    """

    def __init__(
        self, reason: Reason, detail: str, *, group: int | None = None, layer: int | None = None
    ) -> None:
        super().__init__(reason, detail)
        self.group = group
        self.layer = layer


class ConnectorError(KVFormatError):
    """The world around the format: stores, peers, options."""


class StoreUnavailableError(ConnectorError):
    """A store that can't be opened or reached."""


class HandshakeError(ConnectorError):
    """Two processes that must agree on a layout and don't."""


class TransferError(ConnectorError):
    """A transfer that failed as a whole."""


class ConfigError(ConnectorError):
    """An option that is unknown, has a wrong value, or contradicts another."""

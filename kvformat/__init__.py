"""A schema-versioned format for KV-cache objects. Source: spec/kvformat.md."""

__version__ = "0.1.0"

"""Store URIs."""

from __future__ import annotations

import pytest

from kvformat.errors import ConfigError, Reason
from kvformat.stores import open_store
from kvformat.stores.uri import parse_nbytes, parse_store_uri


def test_unknown_scheme_names_the_known_ones() -> None:
    """A scheme that no store has is refused, with the option, the scheme and the known schemes."""
    with pytest.raises(ConfigError) as caught:
        open_store("s3://bucket")
    assert caught.value.reason is Reason.CONFIG_VALUE
    for word in ("store", "'s3'", "file", "memory", "mooncake"):
        assert word in caught.value.detail


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("", Reason.CONFIG_VALUE),
        ("/var/cache", Reason.CONFIG_VALUE),
        ("file:/var/cache", Reason.CONFIG_VALUE),
        ("file:///a?max_nbytes", Reason.CONFIG_VALUE),
        ("file:///a#b", Reason.CONFIG_VALUE),
        ("file:///a?max_nbytes=1&max_nbytes=2", Reason.CONFIG_CONFLICT),
        ("file://[bad/a", Reason.CONFIG_VALUE),
    ],
)
def test_bad_uris(uri: str, reason: Reason) -> None:
    """Text that isn't a store URI is refused with a reason."""
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert caught.value.reason is reason


def test_parts_are_decoded() -> None:
    """Path and options are percent-decoded; the path stays absolute."""
    parsed = parse_store_uri("file:///var/a%20b%3F?max_nbytes=10%47")
    assert parsed == ("file", "", "/var/a b?", {"max_nbytes": "10G"})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("1K", 1024),
        ("2k", 2048),
        ("3KiB", 3072),
        ("5 MB", 5 << 20),
        ("10GiB", 10 << 30),
        ("2T", 2 << 40),
    ],
)
def test_nbytes(text: str, nbytes: int) -> None:
    """Sizes take the usual suffixes, all of them powers of 1024."""
    assert parse_nbytes("max_nbytes", text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1", "1.5G", "1X", "1GG", "0x10", "1e3", "9" * 30])
def test_bad_nbytes(text: str) -> None:
    """Anything else is refused, and the option is named."""
    with pytest.raises(ConfigError) as caught:
        parse_nbytes("max_nbytes", text)
    assert caught.value.reason is Reason.CONFIG_VALUE
    assert "max_nbytes" in caught.value.detail

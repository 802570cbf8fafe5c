"""Paths of keys in a file store."""

from __future__ import annotations

import pytest
from conformance import HOSTILE_KEYS
from hypothesis import example, given
from hypothesis import strategies as st

from kvformat.stores.file_paths import format_directory, format_path, parse_path

# Characters that mean something to a path, an escape, or the store's own names.
SHARP = st.sampled_from(list("./+%~a%20kv\0\n\u00fc"))
KEYS = st.one_of(
    st.text(SHARP, min_size=1, max_size=40),
    st.text(st.characters(codec="utf-8"), min_size=1),
    st.lists(
        st.sampled_from([".", "..", "x" * 239, "+", "%", "\u00fc" * 79, "+kv", "/"]), min_size=1
    ).map("".join),
    st.lists(st.text(SHARP, max_size=3), min_size=1, max_size=40).map("/".join).filter(bool),
)


@given(KEYS)
@example("x" * 240 + "..")
@example("x" * 240 + "../y")
@example("x" * 240 + "/..")
@example("/" * 40)
def test_path_gives_the_key_back(key: str) -> None:
    """Each key has a path that gives it back, and no name of it leads elsewhere or is hidden."""
    path = format_path(key)
    assert parse_path(path) == key
    for name in path.split("/"):
        assert 1 <= len(name.encode()) <= 255
        assert not name.startswith(".")
        assert "\0" not in name


@given(st.sets(KEYS, min_size=2, max_size=8))
def test_paths_can_live_together(keys: set[str]) -> None:
    """No two keys share a path, and no key's file is another one's directory."""
    paths = [format_path(key) for key in keys]
    assert len(set(paths)) == len(paths)
    directories = {path[:cut] for path in paths for cut, char in enumerate(path) if char == "/"}
    assert not directories & set(paths)


@given(KEYS, st.integers(0, 200))
def test_directory_of_a_prefix_holds_the_key(key: str, cut: int) -> None:
    """A key's path lies below the directory of each prefix of the key."""
    directory = format_directory(key[:cut])
    assert not directory or format_path(key).startswith(directory + "/")


def test_listing_a_namespace_starts_in_its_directory() -> None:
    """A prefix that ends with a slash is a directory of its own."""
    assert format_directory("kvformat1/acme/m/00ff/") == "kvformat1/acme/m/00ff"
    assert format_directory("kvformat1/acme/m/00") == "kvformat1/acme/m"
    assert format_directory("") == ""


@pytest.mark.parametrize(
    "path", ["", "a", "a/b", "a%2fb+kv", "a%41+kv", "a b+kv", ".a+kv", "a//b+kv", "%FF+kv", "+kv"]
)
def test_foreign_files_are_no_objects(path: str) -> None:
    """A path that no key is written to isn't read as one."""
    assert parse_path(path) is None


@pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=HOSTILE_KEYS.keys())
def test_depth_is_bounded(key: str) -> None:
    """A key can't ask for more directories than its length needs."""
    assert format_path(key).count("/") <= 16 + 3 * len(key.encode()) // 240

"""The tests that every store passes. Source: spec/kvformat.md section 8.

For a store of your own: subclass :class:`StoreConformance` (or :class:`ProcessConformance`, where
two processes can meet in the store) in a test module and give it a ``uri`` fixture. Keys are fresh
in each test, so that one running service can serve them all.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy
import pytest

from kvformat.errors import ConfigError, Reason
from kvformat.stores import Code, Store, open_store

#: A miss by any name: nothing is there, or what is there isn't committed.
MISSES = (Code.NOT_FOUND, Code.NOT_READY)

HOSTILE_KEYS = {
    "parent": "../../../../../tmp/kvformat-escaped",
    "dots": "./.././a/..",
    "absolute": "/etc/kvformat-escaped",
    "nul": "a\0b\0",
    "newline": "a\nb\r\n",
    "unicode": "\u6a21\u578b/\U0001f600/e\u0301/\u202e",
    "separators": "//a///b/",
    "percent": "%2e%2e%2F%00%",
    "hidden": ".tmp/.writing/x",
    "shell": "$(touch x); rm -rf * | '\"\\ ~ :@?#&=+",
    "part of 255 bytes": "p" * 255,
    "part of 256 bytes": "p" * 256,
    "part of 3000 bytes, escaped": "/".join(["\u00fc" * 1500, "x"]),
    "1000 parts": "/".join(["d"] * 1000),
    "128 KiB in one part": "k" * (128 * 1024),
    "128 KiB in many parts": "a/" * (64 * 1024),
    "128 KiB in parts of 255": "/".join(["q" * 255] * 512),
}


class Memory:
    """Bytes with an address."""

    def __init__(self, content: bytes | int) -> None:
        data = bytes(content)
        self.array = numpy.frombuffer(data, dtype=numpy.uint8).copy()
        self.address: int = self.array.ctypes.data
        self.nbytes = len(data)

    def bytes(self) -> bytes:
        return self.array.tobytes()


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def write_whole(store: Store, keys: Sequence[str], contents: Sequence[bytes]) -> list[int]:
    """Put sessions from start to commit; the codes of the commit."""
    sources = [Memory(content) for content in contents]
    assert store.put_start(keys, [source.nbytes for source in sources]) == [Code.OK] * len(keys)
    written = store.put_ranges(
        keys,
        [[source.address] for source in sources],
        [[source.nbytes] for source in sources],
        [[0]] * len(keys),
    )
    assert written == [source.nbytes for source in sources]
    return store.put_commit(keys)


def read_whole(store: Store, key: str, nbytes: int) -> bytes:
    """A get session from start to end."""
    target = Memory(nbytes)
    assert store.get_start([key]) == [Code.OK]
    assert store.get_ranges([key], [[target.address]], [[nbytes]], [[0]]) == [nbytes]
    assert store.get_end([key]) == [Code.OK]
    return target.bytes()


def is_miss(store: Store, key: str) -> bool:
    """Whether no way of asking finds an object."""
    return (
        store.exists([key]) == [0]
        and store.get(key) is None
        and store.get_start([key])[0] in MISSES
        and store.object_nbytes(key) in MISSES
    )


def remove_unread(store: Store, keys: Sequence[str]) -> list[int]:
    """Remove keys that no one reads; where looking at a key leaves a lease, wait for its end."""
    deadline = time.monotonic() + 15
    codes = store.remove(keys)
    while Code.NOT_READY in codes and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = [
            store.remove([key])[0] if code == Code.NOT_READY else code
            for key, code in zip(keys, codes, strict=True)
        ]
    return codes


class StoreConformance:
    """What holds for every store, within one process."""

    #: Characters of keys that the store can put and get, but not list.
    UNLISTABLE = ""

    @pytest.fixture
    def uri(self) -> str:
        """A URI under which two stores see the same objects."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, uri: str) -> Iterator[Store]:
        store = open_store(uri)
        yield store
        store.close()

    @pytest.fixture
    def other(self, uri: str) -> Iterator[Store]:
        """A second store over the same objects."""
        store = open_store(uri)
        yield store
        store.close()

    @pytest.fixture
    def name(self) -> str:
        """The start of every key of the test."""
        return f"conformance/{uuid.uuid4().hex}"

    def test_is_a_store(self, store: Store, uri: str) -> None:
        """The protocol is there, and the store tells its URI."""
        assert isinstance(store, Store)
        assert store.uri == uri

    def test_unknown_option_is_refused(self, uri: str) -> None:
        """An option that the store doesn't know stops the start."""
        joint = "&" if "?" in uri else "?"
        with pytest.raises(ConfigError) as caught:
            open_store(f"{uri}{joint}no_such_option=7")
        assert caught.value.reason is Reason.CONFIG_UNKNOWN

    def test_whole_object(self, store: Store, other: Store, name: str) -> None:
        """A put object is there for every store over the same objects, byte for byte."""
        content = random_bytes(70_001)
        assert store.put(name, content) == Code.OK
        for reader in (store, other):
            assert reader.exists([name, f"{name}x"]) == [1, 0]
            assert reader.object_nbytes(name) == len(content)
            assert reader.get(name) == content
            assert read_whole(reader, name, len(content)) == content

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_takes_buffers(self, store: Store, name: str, kind: type) -> None:
        """put takes each kind of buffer."""
        assert store.put(name, kind(b"content")) == Code.OK
        assert store.get(name) == b"content"

    def test_ranges_between_scattered_memory(self, store: Store, other: Store, name: str) -> None:
        """Ranges land at their offsets in any order, and are read back under another cut."""
        generator = random.Random(5)
        sizes = [4096, 10_000, 65_536 + 7]
        keys = [f"{name}/{index}" for index in range(3)]
        sources = [Memory(random_bytes(size, seed=size)) for size in sizes]
        assert store.put_start(keys, sizes) == [0, 0, 0]
        rows = []
        for source in sources:
            cuts = sorted({0, source.nbytes, *generator.choices(range(source.nbytes), k=20)})
            spans = list(pairwise(cuts))
            generator.shuffle(spans)
            rows.append(spans)
        for half in (0, 1):
            part = [spans[half::2] for spans in rows]
            assert store.put_ranges(
                keys,
                [[s.address + a for a, _ in p] for s, p in zip(sources, part, strict=True)],
                [[b - a for a, b in p] for p in part],
                [[a for a, _ in p] for p in part],
            ) == [sum(b - a for a, b in p) for p in part]
        assert store.put_commit(keys) == [0, 0, 0]
        assert other.get_start(keys) == [0, 0, 0]
        for key, source in zip(keys, sources, strict=True):
            middle = source.nbytes // 3
            target = Memory(source.nbytes)
            spans = [(middle, source.nbytes), (0, middle)]
            read = other.get_ranges(
                [key],
                [[target.address + a for a, _ in spans]],
                [[b - a for a, b in spans]],
                [[a for a, _ in spans]],
            )
            assert read == [source.nbytes]
            assert target.bytes() == source.bytes()
        assert other.get_end(keys) == [0, 0, 0]

    def test_many_ranges(self, store: Store, name: str) -> None:
        """3000 ranges of one key in one call, each apart in memory, joined in the object."""
        size, count = 512, 3000
        source = Memory(random_bytes(2 * size * count))
        addresses = [[source.address + 2 * size * index for index in range(count)]]
        offsets = [[size * index for index in range(count)]]
        assert store.put_start([name], [size * count]) == [0]
        assert store.put_ranges([name], addresses, [[size] * count], offsets) == [size * count]
        assert store.put_commit([name]) == [0]
        expected = source.array.reshape(count, 2, size)[:, 0].tobytes()
        assert store.get(name) == expected
        target = Memory(2 * size * count)
        into = [[target.address + 2 * size * index for index in range(count)]]
        assert store.get_start([name]) == [0]
        assert store.get_ranges([name], into, [[size] * count], offsets) == [size * count]
        assert store.get_end([name]) == [0]
        found = target.array.reshape(count, 2, size)
        assert found[:, 0].tobytes() == expected
        assert not found[:, 1].any()

    def test_no_ranges_are_no_error(self, store: Store, name: str) -> None:
        """A key without ranges in a call answers 0 bytes."""
        assert store.put_start([name], [1]) == [0]
        assert store.put_ranges([name], [[]], [[]], [[]]) == [0]
        source = Memory(b"x")
        assert store.put_ranges([name], [[source.address]], [[1]], [[0]]) == [1]
        assert store.put_commit([name]) == [0]
        assert store.get_start([name]) == [0]
        assert store.get_ranges([name], [[]], [[]], [[]]) == [0]

    def test_empty_batch(self, store: Store) -> None:
        """No keys, no answers."""
        assert store.exists([]) == []
        assert store.put_start([], []) == []
        assert store.put_ranges([], [], [], []) == []
        assert store.put_commit([]) == []
        assert store.put_revoke([]) == []
        assert store.get_start([]) == []
        assert store.get_ranges([], [], [], []) == []
        assert store.get_end([]) == []
        assert store.put_objects([], [], []) == []
        assert store.get_objects([], [], []) == []
        assert store.remove([]) == []

    def test_invisible_before_commit(self, store: Store, other: Store, name: str) -> None:
        """Whole bytes without a commit are a miss to everyone; with it, a hit to everyone."""
        source = Memory(b"0123456789")
        assert store.put_start([name], [10]) == [0]
        for reader in (store, other):
            assert is_miss(reader, name)
        assert store.put_ranges([name], [[source.address]], [[10]], [[0]]) == [10]
        for reader in (store, other):
            assert is_miss(reader, name)
            assert list(reader.list(name)) == []
        assert store.put_commit([name]) == [0]
        for reader in (store, other):
            assert reader.get(name) == b"0123456789"
            assert list(reader.list(name)) == [name]

    @pytest.mark.parametrize(
        "spans",
        [[], [(0, 99)], [(1, 100)], [(0, 50), (51, 100)], [(0, 50), (0, 50)], [(40, 100), (0, 39)]],
        ids=str,
    )
    def test_holes_are_never_committed(
        self, store: Store, other: Store, name: str, spans: list[tuple[int, int]]
    ) -> None:
        """A commit before every byte was written is refused, revokes, and leaves a miss."""
        source = Memory(random_bytes(100))
        assert store.put_start([name], [100]) == [0]
        for start, end in spans:
            assert store.put_ranges(
                [name], [[source.address + start]], [[end - start]], [[start]]
            ) == [end - start]
        assert store.put_commit([name]) == [Code.INVALID]
        assert is_miss(other, name)
        assert store.put_commit([name]) == [Code.INVALID]
        assert write_whole(store, [name], [source.bytes()]) == [0]
        assert other.get(name) == source.bytes()

    def test_overlapping_writes(self, store: Store, name: str) -> None:
        """Where writes overlap, the last one stays; coverage counts bytes, not calls."""
        source = Memory(b"aaaaaaaabbbbcc")
        assert store.put_start([name], [8]) == [0]
        written = store.put_ranges(
            [name],
            [[source.address, source.address + 8, source.address + 12]],
            [[8, 4, 2]],
            [[0, 2, 3]],
        )
        assert written == [14]
        assert store.put_commit([name]) == [0]
        assert store.get(name) == b"aabccbaa"

    def test_bad_put_ranges_touch_one_key(self, store: Store, name: str) -> None:
        """A range that makes no sense is refused for its key; its neighbour is written."""
        source = Memory(b"x" * 64)
        start = source.address
        bad_rows = [
            ([start], [11], [0]),
            ([start], [1], [10]),
            ([start], [4], [-1]),
            ([start], [0], [0]),
            ([start], [-3], [5]),
            ([0], [4], [0]),
            ([start], [4], [2**62]),
            ([start], [2**62], [2**62]),
            ([start, start], [4], [0]),
            ([start], [4, 4], [0]),
            ([start], [4], [0, 4]),
            ([start, start], [5, 6], [0, 5]),
        ]
        for index, (addresses, sizes, offsets) in enumerate(bad_rows):
            good, bad = f"{name}/{index}/good", f"{name}/{index}/bad"
            assert store.put_start([bad, good], [10, 10]) == [0, 0]
            assert store.put_ranges(
                [bad, good], [addresses, [start]], [sizes, [10]], [offsets, [0]]
            ) == [Code.INVALID, 10], (addresses, sizes, offsets)
            assert store.put_commit([bad, good]) == [Code.INVALID, 0]
            assert store.exists([bad, good]) == [0, 1]

    def test_bad_get_ranges_touch_one_key(self, store: Store, name: str) -> None:
        """A range that makes no sense is refused for its key; its neighbour is read."""
        keys = [f"{name}/bad", f"{name}/good"]
        assert write_whole(store, keys, [b"y" * 10, b"0123456789"]) == [0, 0]
        target, untouched = Memory(10), Memory(64)
        start = untouched.address
        bad_rows = [
            ([start], [11], [0]),
            ([start], [1], [10]),
            ([start], [4], [-1]),
            ([start], [0], [0]),
            ([start], [-3], [5]),
            ([start], [4], [2**62]),
            ([start, start], [4], [0]),
            ([start], [4, 4], [0]),
            ([start], [4], [0, 4]),
        ]
        assert store.get_start(keys) == [0, 0]
        for addresses, sizes, offsets in bad_rows:
            target.array[:] = 0
            assert store.get_ranges(
                keys, [addresses, [target.address]], [sizes, [10]], [offsets, [0]]
            ) == [Code.INVALID, 10], (addresses, sizes, offsets)
            assert target.bytes() == b"0123456789"
        assert untouched.bytes() == bytes(64)
        assert store.get_end(keys) == [0, 0]

    def test_calls_without_a_session(self, store: Store, name: str) -> None:
        """Range, commit, revoke and end calls need a session of this store."""
        memory = Memory(4)
        ranges = ([name], [[memory.address]], [[4]], [[0]])
        assert store.put_ranges(*ranges) == [Code.INVALID]
        assert store.put_commit([name]) == [Code.INVALID]
        assert store.put_revoke([name]) == [Code.INVALID]
        assert store.get_ranges(*ranges) == [Code.INVALID]
        assert store.get_end([name]) == [Code.INVALID]

    def test_sessions_belong_to_their_store(self, store: Store, other: Store, name: str) -> None:
        """Another store over the same objects can't write to, commit or revoke a session."""
        source = Memory(b"mine")
        assert store.put_start([name], [4]) == [0]
        assert other.put_ranges([name], [[source.address]], [[4]], [[0]]) == [Code.INVALID]
        assert other.put_commit([name]) == [Code.INVALID]
        assert other.put_revoke([name]) == [Code.INVALID]
        assert store.put_ranges([name], [[source.address]], [[4]], [[0]]) == [4]
        assert store.put_commit([name]) == [0]

    def test_sizes_that_make_no_sense(self, store: Store, name: str) -> None:
        """An object has at least one byte; a batch has one size per key."""
        keys = [f"{name}/{index}" for index in range(3)]
        assert store.put_start(keys, [0, -1, 4]) == [Code.INVALID, Code.INVALID, 0]
        assert store.put_revoke(keys) == [Code.INVALID, Code.INVALID, 0]
        assert store.put_start(keys, [4, 4]) == [Code.INVALID] * 3
        assert store.put_ranges(keys, [[]], [[]], [[]]) == [Code.INVALID] * 3
        assert store.get_ranges(keys, [[]], [[]], [[]]) == [Code.INVALID] * 3
        assert store.put(keys[0], b"") == Code.INVALID
        assert store.exists(keys) == [0, 0, 0]

    @pytest.mark.parametrize("nbytes", [2**62, 2**63 - 1, 2**63, 2**70])
    def test_too_big(self, store: Store, name: str, nbytes: int) -> None:
        """An object larger than any machine is refused for want of space; its neighbour isn't."""
        keys = [f"{name}/big", f"{name}/small"]
        assert store.put_start(keys, [nbytes, 4]) == [Code.NO_SPACE, 0]
        assert store.put_revoke(keys) == [Code.INVALID, 0]

    def test_committed_objects_stay(self, store: Store, other: Store, name: str) -> None:
        """A committed object is never replaced: each way to put answers EXISTS."""
        source = Memory(b"second")
        assert store.put(name, b"first") == Code.OK
        for writer in (store, other):
            assert writer.put(name, b"second") == Code.EXISTS
            assert writer.put_start([name], [6]) == [Code.EXISTS]
            assert writer.put_objects([name], [[source.address]], [[6]]) == [Code.EXISTS]
            assert writer.get(name) == b"first"

    def test_one_put_session_a_key(self, store: Store, name: str) -> None:
        """A key that this store is writing already answers EXISTS, and the session goes on."""
        source = Memory(b"once")
        assert store.put_start([name, name], [4, 4]) == [0, Code.EXISTS]
        assert store.put_start([name], [4]) == [Code.EXISTS]
        assert store.put_ranges([name], [[source.address]], [[4]], [[0]]) == [4]
        assert store.put_commit([name, name]) == [0, Code.INVALID]
        assert store.get(name) == b"once"

    def test_revoke(self, store: Store, other: Store, name: str) -> None:
        """A revoked session leaves a miss, and the key can be put again."""
        assert store.put_start([name], [4]) == [0]
        source = Memory(b"gone")
        assert store.put_ranges([name], [[source.address]], [[4]], [[0]]) == [4]
        assert store.put_revoke([name]) == [0]
        assert store.put_revoke([name]) == [Code.INVALID]
        assert is_miss(store, name)
        assert is_miss(other, name)
        assert other.put(name, b"back") == Code.OK
        assert store.get(name) == b"back"

    def test_two_writers(self, store: Store, other: Store, name: str) -> None:
        """Case 22: two writers put one key at once: one object, whole bytes of one of them."""
        contents = {store: b"A" * 100_000, other: b"B" * 100_000}
        sources = {writer: Memory(content) for writer, content in contents.items()}
        writers = []
        for writer in (store, other):
            [code] = writer.put_start([name], [100_000])
            assert code in (Code.OK, Code.EXISTS)
            if code == Code.OK:
                writers.append(writer)
        assert writers
        for half in (0, 50_000):
            for writer in writers:
                assert writer.put_ranges(
                    [name], [[sources[writer].address + half]], [[50_000]], [[half]]
                ) == [50_000]
        codes = [writer.put_commit([name])[0] for writer in writers]
        assert sorted(codes, reverse=True) == [Code.OK] + [Code.EXISTS] * (len(writers) - 1)
        winner = writers[codes.index(Code.OK)]
        assert store.get(name) == other.get(name) == contents[winner]

    def test_whole_put_beside_a_session(self, store: Store, other: Store, name: str) -> None:
        """A whole put says OK only if its object is there, whoever else is at the key."""
        assert store.put_start([name], [5]) == [0]
        code = other.put(name, b"whole")
        assert code in (Code.OK, Code.EXISTS)
        assert other.exists([name]) == [int(code == Code.OK)]
        source = Memory(b"parts")
        assert store.put_ranges([name], [[source.address]], [[5]], [[0]]) == [5]
        assert store.put_commit([name]) == [Code.EXISTS if code == Code.OK else Code.OK]
        assert other.get(name) == (b"whole" if code == Code.OK else b"parts")

    @pytest.mark.parametrize("hostile", HOSTILE_KEYS.values(), ids=HOSTILE_KEYS.keys())
    def test_hostile_keys(self, store: Store, other: Store, name: str, hostile: str) -> None:
        """Any text of 1 byte to 128 KiB names an object of its own, and is listed as it was put."""
        # The name stands behind the key, so that the key's start stays hostile, and inside it
        # where there is no room behind.
        room = 128 * 1024 - len(hostile.encode())
        key = hostile + name if room >= len(name) else name + hostile[len(name) :]
        assert write_whole(store, [key], [key.encode()[-500:]]) == [0]
        assert other.exists([key]) == [1]
        assert other.get(key) == key.encode()[-500:]
        if not set(key) & set(self.UNLISTABLE):
            assert key in set(other.list(key[:-1]))
        assert other.exists([key[:-1], key[1:], key.swapcase()]) == [0, 0, 0]

    @pytest.mark.parametrize("key", ["", "x" * (128 * 1024 + 1), "\ud800"], ids=len)
    def test_keys_that_are_none(self, store: Store, name: str, key: str) -> None:
        """The empty key, a longer one than 128 KiB and text that isn't Unicode are refused."""
        memory = Memory(4)
        assert store.put_start([key, name], [4, 4]) == [Code.INVALID, 0]
        assert store.put(key, b"data") == Code.INVALID
        assert store.put_objects([key], [[memory.address]], [[4]]) == [Code.INVALID]
        assert store.get_objects([key], [[memory.address]], [[4]]) == [Code.INVALID]
        assert store.get_start([key]) == [Code.INVALID]
        assert store.exists([key, name]) == [Code.INVALID, 0]
        assert store.object_nbytes(key) == Code.INVALID
        assert store.remove([key]) == [Code.INVALID]
        assert store.get(key) is None

    def test_alike_keys_are_distinct(self, store: Store, name: str) -> None:
        """Keys that a careless escape would fold into one hold their own bytes."""
        endings = ["", "/", "//", "/a", "/a/", "/A", "%2Fa", "/%61", "/.", "/..", "/a+", "+", "+/a"]
        endings += ["/a+kv", "+kv", "/a b", "/a%20b", "/\0", "\0", " ", "%", "%%", "/%", "/%/"]
        keys = [name + ending for ending in endings]
        for key in keys:
            assert store.put(key, key.encode()) == Code.OK
        for key in keys:
            assert store.get(key) == key.encode()

    def test_list(self, store: Store, name: str) -> None:
        """Listing gives the committed keys of a prefix, once each; a prefix may end anywhere."""
        keys = [f"{name}/{a}/{b}" for a in ("one", "on", "two") for b in ("x", "y", "yy")]
        for key in keys:
            assert store.put(key, b"data") == Code.OK
        assert store.put_start([f"{name}/one/z"], [4]) == [0]
        for prefix in ("", "/", "/o", "/on", "/on/", "/one", "/one/y", "/none", "/one/x/"):
            expected = [key for key in keys if key.startswith(name + prefix)]
            assert sorted(store.list(name + prefix)) == sorted(expected), prefix
        assert set(keys) <= set(store.list())
        assert list(store.list("\ud800/x")) == []

    def test_remove(self, store: Store, other: Store, name: str) -> None:
        """A removed object is a miss to everyone; its neighbours stay."""
        keys = [f"{name}/a", f"{name}/b", f"{name}/c"]
        assert [store.put(key, b"data") for key in keys] == [0, 0, 0]
        absent = f"{name}/none"
        assert remove_unread(other, [keys[0], absent, keys[1]]) == [0, Code.NOT_FOUND, 0]
        assert store.exists(keys) == [0, 0, 1]
        assert is_miss(store, keys[0])
        assert store.put(keys[0], b"again") == Code.OK
        assert other.get(keys[0]) == b"again"

    def test_remove_while_reading(self, store: Store, other: Store, name: str) -> None:
        """An object that is being read can't be removed, and the reader reads on."""
        content = random_bytes(5000)
        assert store.put(name, content) == Code.OK
        assert store.get_start([name]) == [0]
        assert other.remove([name]) == [Code.NOT_READY]
        assert store.remove([name]) == [Code.NOT_READY]
        target = Memory(5000)
        assert store.get_ranges([name], [[target.address]], [[5000]], [[0]]) == [5000]
        assert target.bytes() == content
        assert store.get_end([name]) == [0]
        assert store.exists([name]) == [1]

    def test_one_get_session_a_key(self, store: Store, name: str) -> None:
        """A second start renews the session; one end ends it."""
        assert store.put(name, b"data") == Code.OK
        assert store.get_start([name, name]) == [0, 0]
        target = Memory(4)
        ranges = ([name], [[target.address]], [[4]], [[0]])
        assert store.get_ranges(*ranges) == [4]
        assert store.get_start([name]) == [0]
        assert store.get_ranges(*ranges) == [4]
        assert store.get_end([name, name]) == [0, Code.INVALID]
        assert store.get_ranges(*ranges) == [Code.INVALID]

    def test_get_start_of_a_batch(self, store: Store, name: str) -> None:
        """A missing key doesn't touch its neighbours."""
        assert store.put(name, b"data") == Code.OK
        codes = store.get_start([f"{name}/none", name])
        assert codes == [Code.NOT_FOUND, 0]
        target = Memory(4)
        assert store.get_ranges(
            [f"{name}/none", name], [[target.address]] * 2, [[4]] * 2, [[0]] * 2
        ) == [Code.INVALID, 4]
        assert target.bytes() == b"data"

    def test_whole_objects_of_pieces(self, store: Store, other: Store, name: str) -> None:
        """Whole objects come from memory pieces and go to other pieces."""
        source = Memory(random_bytes(1000))
        keys = [f"{name}/a", f"{name}/b"]
        addresses = [[source.address + 500, source.address], [source.address + 1]]
        assert store.put_objects(keys, addresses, [[500, 500], [7]]) == [0, 0]
        assert other.get(keys[0]) == source.bytes()[500:] + source.bytes()[:500]
        assert other.get(keys[1]) == source.bytes()[1:8]
        target = Memory(1000)
        into = [[target.address + 500, target.address], [target.address]]
        assert other.get_objects(keys[:1], into[:1], [[500, 500]]) == [1000]
        assert target.bytes() == source.bytes()

    def test_bad_whole_objects_touch_one_key(self, store: Store, name: str) -> None:
        """Pieces that don't fit the object, or make no sense, are refused for their key."""
        memory = Memory(b"x" * 64)
        start = memory.address
        good, bad = f"{name}/good", f"{name}/bad"
        for index, (addresses, sizes) in enumerate(
            [([start], [0]), ([], []), ([start], [4, 4]), ([0], [4]), ([start], [-4])]
        ):
            assert store.put_objects(
                [bad, f"{good}/{index}"], [addresses, [start]], [sizes, [4]]
            ) == [Code.INVALID, 0]
        assert store.exists([bad]) == [0]
        assert store.put(good, b"good") == Code.OK
        assert store.put(bad, b"four") == Code.OK
        untouched = Memory(64)
        start = untouched.address
        for addresses, sizes in [
            ([start], [3]),
            ([start], [5]),
            ([start, start + 10], [2, 3]),
            ([], []),
            ([start], [0]),
            ([start, start], [4]),
        ]:
            target = Memory(4)
            assert store.get_objects([bad, good], [addresses, [target.address]], [sizes, [4]]) == [
                Code.INVALID,
                4,
            ]
            assert target.bytes() == b"good"
        assert untouched.bytes() == bytes(64)
        assert store.get_objects([f"{name}/none"], [[start]], [[4]]) == [Code.NOT_FOUND]
        assert store.put_objects([bad], [], []) == [Code.INVALID]
        assert store.get_objects([bad], [], []) == [Code.INVALID]

    def test_registration(self, store: Store) -> None:
        """Memory can be announced and taken back, also where the store needs none of it."""
        memory = Memory(4096)
        assert store.register_memory(memory.address, memory.nbytes) == Code.OK
        assert store.unregister_memory(memory.address) == Code.OK

    def test_close(self, store: Store, other: Store, name: str) -> None:
        """Closing gives sessions up; every call after it answers UNAVAILABLE."""
        memory = Memory(4)
        assert other.put(f"{name}/there", b"data") == Code.OK
        assert store.put_start([name], [4]) == [0]
        assert store.put_ranges([name], [[memory.address]], [[4]], [[0]]) == [4]
        assert store.get_start([f"{name}/there"]) == [0]
        store.close()
        store.close()
        ranges = ([name], [[memory.address]], [[4]], [[0]])
        gone = [Code.UNAVAILABLE]
        assert store.exists([name]) == gone
        assert store.put_start([name], [4]) == gone
        assert store.put_ranges(*ranges) == gone
        assert store.put_commit([name]) == gone
        assert store.put_revoke([name]) == gone
        assert store.get_start([name]) == gone
        assert store.get_ranges(*ranges) == gone
        assert store.get_end([name]) == gone
        assert store.put_objects(*ranges[:3]) == gone
        assert store.get_objects(*ranges[:3]) == gone
        assert store.remove([name]) == gone
        assert store.put(name, b"data") == Code.UNAVAILABLE
        assert store.object_nbytes(name) == Code.UNAVAILABLE
        assert store.get(f"{name}/there") is None
        assert is_miss(other, name)
        assert other.put(name, b"free") == Code.OK

    def test_threads(self, store: Store, name: str) -> None:
        """Threads share one store: their keys don't mix, and one key has one writer."""
        wins: list[int] = []
        faults: list[str] = []
        barrier = threading.Barrier(4)

        def work(number: int) -> None:
            content = bytes([number]) * 50_000
            for round_number in range(10):
                own, shared = f"{name}/{number}/{round_number}", f"{name}/all/{round_number}"
                barrier.wait()
                source = Memory(content)
                codes = store.put_start([own, shared], [50_000, 50_000])
                keys = [key for key, code in zip([own, shared], codes, strict=True) if code == 0]
                count = len(keys)
                moved = store.put_ranges(
                    keys, [[source.address]] * count, [[50_000]] * count, [[0]] * count
                )
                if moved != [50_000] * count or store.put_commit(keys) != [0] * count:
                    faults.append(f"{number} {round_number} {codes} {moved}")
                if shared in keys:
                    wins.append(round_number)
                if store.get(own) != content:
                    faults.append(f"{number} {round_number}: other bytes")

        threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert sorted(wins) == list(range(10))


WRITER = """
import sys, time
import numpy
from kvformat.stores import open_store
uri, key, nbytes, written = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = open_store(uri)
source = numpy.full(nbytes, 7, dtype=numpy.uint8)
assert store.put_start([key], [nbytes]) == [0]
if written:
    assert store.put_ranges([key], [[source.ctypes.data]], [[written]], [[0]]) == [written]
print("written", flush=True)
time.sleep(600)
"""


def kill_a_writer(uri: str, key: str, nbytes: int, written: int) -> None:
    """Run a writer in a process of its own and kill it after ``written`` of ``nbytes``."""
    command = [sys.executable, "-c", WRITER, uri, key, str(nbytes), str(written)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            assert any(line == "written\n" for line in writer.stdout)
        finally:
            writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL


class ProcessConformance(StoreConformance):
    """What holds where two processes can meet in the store."""

    @pytest.mark.parametrize("written", [0, 1, 65_536, 99_999, 100_000])
    def test_killed_writer(self, store: Store, uri: str, name: str, written: int) -> None:
        """Case 19: a writer killed after k of n bytes leaves a miss."""
        kill_a_writer(uri, name, 100_000, written)
        assert is_miss(store, name)
        assert list(store.list(name)) == []

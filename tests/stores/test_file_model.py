"""Random lives of objects in two file stores on one folder, against a model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from conformance import Memory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvformat.stores import Code, open_store

KEYS = st.sampled_from(["a", "a/b", "a/b/c", "../a", "a%2Fb", ""])
SIZES = st.integers(-1, 12)
WHO = st.integers(0, 1)


class FileStoreLives(RuleBasedStateMachine):
    """The model: committed bytes, and per store the bytes of its put and get sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.stores = [open_store(f"file://{self.folder}/store") for _ in range(2)]
        self.objects: dict[str, bytes] = {}
        self.writes: list[dict[str, list[int | None]]] = [{}, {}]  # None: a hole
        self.reads: list[dict[str, bytes]] = [{}, {}]

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)

    def is_read(self, key: str) -> bool:
        return any(self.reads[who].get(key) is not None for who in (0, 1))

    @rule(who=WHO, key=KEYS, nbytes=SIZES)
    def put_start(self, who: int, key: str, nbytes: int) -> None:
        [code] = self.stores[who].put_start([key], [nbytes])
        if not key:
            assert code == Code.INVALID
        elif key in self.objects or key in self.writes[who]:
            assert code == Code.EXISTS
        elif nbytes < 1:
            assert code == Code.INVALID
        else:
            assert code == Code.OK
            self.writes[who][key] = [None] * nbytes

    @rule(who=WHO, key=KEYS, offset=SIZES, data=st.binary(max_size=12))
    def put_ranges(self, who: int, key: str, offset: int, data: bytes) -> None:
        source = Memory(data)
        [code] = self.stores[who].put_ranges([key], [[source.address]], [[len(data)]], [[offset]])
        written = self.writes[who].get(key)
        if written is None or not data or offset < 0 or offset + len(data) > len(written):
            assert code == Code.INVALID
        else:
            assert code == len(data)
            written[offset : offset + len(data)] = data

    @rule(who=WHO, key=KEYS)
    def put_commit(self, who: int, key: str) -> None:
        [code] = self.stores[who].put_commit([key])
        written = self.writes[who].pop(key, None)
        if written is None or None in written:
            assert code == Code.INVALID
        elif key in self.objects:
            assert code == Code.EXISTS
        else:
            assert code == Code.OK
            self.objects[key] = bytes(value for value in written if value is not None)

    @rule(who=WHO, key=KEYS)
    def put_revoke(self, who: int, key: str) -> None:
        [code] = self.stores[who].put_revoke([key])
        known = self.writes[who].pop(key, None) is not None
        assert code == (Code.OK if known else Code.INVALID)

    @rule(who=WHO, key=KEYS, data=st.binary(max_size=12))
    def put(self, who: int, key: str, data: bytes) -> None:
        code = self.stores[who].put(key, data)
        if not key or not data:
            assert code == Code.INVALID
        elif key in self.objects:
            assert code == Code.EXISTS
        else:
            assert code == Code.OK
            self.objects[key] = data

    @rule(who=WHO, key=KEYS)
    def get_start(self, who: int, key: str) -> None:
        [code] = self.stores[who].get_start([key])
        if not key:
            assert code == Code.INVALID
        elif key in self.objects:
            assert code == Code.OK
            self.reads[who][key] = self.objects[key]
        else:
            assert code == Code.NOT_FOUND

    @rule(who=WHO, key=KEYS, offset=SIZES, size=SIZES)
    def get_ranges(self, who: int, key: str, offset: int, size: int) -> None:
        target = Memory(16)
        [code] = self.stores[who].get_ranges([key], [[target.address]], [[size]], [[offset]])
        content = self.reads[who].get(key)
        if content is None or offset < 0 or size < 1 or offset + size > len(content):
            assert code == Code.INVALID
            assert target.bytes() == bytes(16)
        else:
            assert code == size
            assert target.bytes() == content[offset : offset + size] + bytes(16 - size)

    @rule(who=WHO, key=KEYS)
    def get_end(self, who: int, key: str) -> None:
        [code] = self.stores[who].get_end([key])
        known = self.reads[who].pop(key, None) is not None
        assert code == (Code.OK if known else Code.INVALID)

    @rule(who=WHO, key=KEYS)
    def remove(self, who: int, key: str) -> None:
        [code] = self.stores[who].remove([key])
        if not key:
            assert code == Code.INVALID
        elif key not in self.objects:
            assert code == Code.NOT_FOUND
        elif self.is_read(key):
            assert code == Code.NOT_READY
        else:
            assert code == Code.OK
            del self.objects[key]

    @rule(who=WHO)
    def reopen(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = open_store(f"file://{self.folder}/store")
        self.writes[who].clear()
        self.reads[who].clear()

    @invariant()
    def both_stores_show_the_model(self) -> None:
        for store in self.stores:
            assert sorted(store.list()) == sorted(self.objects)
            assert sorted(store.list("a/")) == sorted(k for k in self.objects if k[:2] == "a/")
            for key in ("a", "a/b", "a/b/c", "../a", "a%2Fb"):
                content = self.objects.get(key)
                assert store.exists([key]) == [int(content is not None)]
                assert store.object_nbytes(key) == (
                    Code.NOT_FOUND if content is None else len(content)
                )

    @invariant()
    def the_count_is_right(self) -> None:
        usage = self.folder / "store" / ".store" / "usage"
        held = sum(len(content) for content in self.objects.values())
        held += sum(len(written) for writes in self.writes for written in writes.values())
        assert int.from_bytes(usage.read_bytes(), "little") == held


FileStoreLives.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestFileStoreLives = FileStoreLives.TestCase

"""The JavaScript implementation, written from spec/ alone, against the vectors and the library.

It proves that the document says enough: nobody who wrote it has read the Python library.
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvformat as kf
from kvformat.checksum import checksum
from kvformat.components import split_attention
from kvformat.stores import open_store

ROOT = Path(__file__).parents[2]
JAVASCRIPT = Path(__file__).parent / "javascript"
CLASSES = ["keyer", "reader", "layer_reader", "writer", "resharder", "explainer"]


@pytest.fixture(scope="module")
def node() -> str:
    """The interpreter, once it and the packages are there."""
    path = shutil.which("node")
    if path is None or not (JAVASCRIPT / "node_modules").is_dir():
        pytest.fail(f"needs Node and `npm ci --prefix {JAVASCRIPT}`; `make test` installs both")
    return path


def make_layout(config: dict[str, str | int | bool]) -> kf.Layout:
    """Two groups in objects of their own; three KV heads in two head shards; two layer shards."""
    full = split_attention(num_kv_heads=3, head_size=8, block_size=16, dtype="bfloat16")
    window = split_attention(num_kv_heads=1, head_size=4, block_size=8, dtype="float8_e4m3fn")
    return kf.Layout(
        identity=kf.Identity(tenant="acmé", model="org/model", weights="3f9c1e", config=config),
        hash=kf.HashRecipe(algorithm="sha256", seed="", block_size=8, digest_nbytes=32),
        groups=(
            kf.Group(
                kind="full_attention",
                block_size=16,
                layers=tuple(kf.Layer(name=f"layers.{i}", components=full) for i in range(3)),
            ),
            kf.Group(
                kind="sliding_window",
                block_size=8,
                window=24,
                layers=tuple(kf.Layer(name=f"layers.{i}", components=window) for i in range(3, 5)),
            ),
        ),
        objects=((0,), (1,)),
        grid=kf.ShardGrid(
            head_shards=2, context_shards=2, context_interleave=3, layer_starts=((0, 2), (0, 1))
        ),
    )


def only_file(root: Path, name: str) -> Path:
    """The one file of a store whose name begins like the last part of a key."""
    (path,) = root.rglob(f"{name}*")
    return path


class Stored:
    """Every object of one block of a layout, in a file store, as the library writes it."""

    def __init__(self, root: Path) -> None:
        rng = random.Random(7)
        layout = make_layout({"rope.theta": "1e6", "enforce_eager": True, "__proto__": 1})
        namespace = kf.layout_namespace(layout)
        store = open_store(root.as_uri())
        store.put(kf.format_key(kf.ManifestKey(namespace)), kf.manifest(layout))
        self.manifest = only_file(root, "manifest")
        self.objects: list[tuple[kf.ObjectMap, bytes, Path]] = []
        for object_map in kf.object_maps(layout):
            block_hash = rng.randbytes(32)
            payload = [rng.randbytes(layer.nbytes) for layer in object_map.layers]
            sums = [checksum(part) for part in payload]
            write_id = rng.randbytes(16)
            header = kf.new_header(object_map, namespace.fingerprint, block_hash, write_id, sums)
            data = kf.encode_header(header) + b"".join(payload)
            key = kf.BlockKey(namespace, object_map.group_bitmap, object_map.shard, block_hash)
            store.put(kf.format_key(key), data)
            path = only_file(root, block_hash.hex())
            self.objects.append((object_map, data, path))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(tmp_path_factory.mktemp("store"))


def read(node: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [node, JAVASCRIPT / "read.js", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_passes_every_vector(node: str) -> None:
    """Proves that the specification alone is enough to pass the vectors of every class."""
    command = [sys.executable, "-m", "tests.vectors.run", "--", node, JAVASCRIPT / "conformance.js"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # The runner sends the vectors of claimed classes and counts those, so a class not claimed, or
    # without vectors, isn't in its last line.
    assert [name for name in CLASSES if f"'{name}'" not in run.stdout] == []


def test_reads_every_object_of_the_library(node: str, stored: Stored) -> None:
    """Proves that both sides find the same bytes at the same place, whatever the shard."""
    assert len({(m.group_bitmap, m.shard) for m, _, _ in stored.objects}) == 12
    for object_map, data, path in stored.objects:
        run = read(node, stored.manifest, path, "--json")
        assert run.returncode == 0, run.stdout + run.stderr
        found = json.loads(run.stdout)
        assert found["header"]["object_nbytes"] == len(data)
        assert found["components"] == [
            {
                "group": part.group,
                "layer": part.layer,
                "component": part.component.name,
                "nbytes": part.nbytes,
                "sha256": hashlib.sha256(data[part.offset : part.offset + part.nbytes]).hexdigest(),
            }
            for part in object_map.components
        ]


def test_names_the_damaged_layer(node: str, stored: Stored, tmp_path: Path) -> None:
    """Proves that one flipped bit of the payload is found, and in which layer."""
    object_map, data, _ = stored.objects[0]
    layer = object_map.layers[1]
    damaged = bytearray(data)
    damaged[layer.offset + layer.nbytes - 1] ^= 1
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    run = read(node, stored.manifest, path, "--json")
    assert run.returncode == 1
    assert json.loads(run.stdout) == {
        "reason": "checksum_mismatch",
        "group": layer.group,
        "layer": layer.layer,
    }


def test_refuses_an_object_of_another_layout(node: str, stored: Stored, tmp_path: Path) -> None:
    """Proves that one changed setting is enough for a refusal before a byte is used."""
    path = tmp_path / "manifest"
    path.write_bytes(kf.manifest(make_layout({"rope.theta": "5e5"})))
    run = read(node, path, stored.objects[0][2], "--json")
    assert (run.returncode, json.loads(run.stdout)) == (1, {"reason": "wrong_fingerprint"})


def test_usage_is_not_a_refusal(node: str, stored: Stored, tmp_path: Path) -> None:
    """Proves that missing arguments and files end with 2, not with a reason code."""
    assert read(node, stored.manifest).returncode == 2
    assert read(node, stored.manifest, tmp_path / "absent").returncode == 2

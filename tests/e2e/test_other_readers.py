"""What the connector stored is what the document says: another implementation reads all of it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import kvformat as kf
from kvformat.stores import open_store

pytestmark = pytest.mark.vllm

READER = Path(__file__).parents[1] / "interop" / "javascript" / "read.js"


def read(manifest: Path, stored: Path) -> subprocess.CompletedProcess[str]:
    node = shutil.which("node")
    assert node is not None
    assert (READER.parent / "node_modules").is_dir(), "`make test` installs the reader's packages"
    return subprocess.run(
        [node, str(READER), str(manifest), str(stored), "--json"], capture_output=True, text=True
    )


def test_the_javascript_reader_reads_every_object_of_real_vllm(
    filled: tuple[str, object], tmp_path: Path
) -> None:
    """Proves that objects which a real engine wrote verify in a program that knows only the
    specification, down to the bytes of every component; and that it refuses one flipped bit."""
    store = open_store(filled[0])
    keys = {key: kf.parse_key(key) for key in store.list()}
    (manifest_key,) = [text for text, key in keys.items() if isinstance(key, kf.ManifestKey)]
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(store.get(manifest_key) or b"")
    layout = kf.parse_manifest(manifest.read_bytes())
    (object_map,) = kf.object_maps(layout)
    blocks = [text for text, key in keys.items() if isinstance(key, kf.BlockKey)]
    assert len(blocks) > 3

    stored = tmp_path / "object"
    for text in blocks:
        data = store.get(text) or b""
        stored.write_bytes(data)
        result = read(manifest, stored)
        assert result.returncode == 0, result.stdout + result.stderr
        found = {
            (c["group"], c["layer"], c["component"]): c["sha256"]
            for c in json.loads(result.stdout)["components"]
        }
        assert found == {
            (r.group, r.layer, r.component.name): hashlib.sha256(
                data[r.offset : r.offset + r.nbytes]
            ).hexdigest()
            for r in object_map.components
        }

    spoiled = bytearray(data)
    spoiled[object_map.layers[-1].offset] ^= 1
    stored.write_bytes(spoiled)
    result = read(manifest, stored)
    assert result.returncode == 1
    assert json.loads(result.stdout)["reason"] == "checksum_mismatch"

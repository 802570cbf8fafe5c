"""Weights identity: same weights, same text, on every node; other weights, another text."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvformat.errors import ConfigError, Reason
from kvformat_connector.identity import model_name, weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def save_checkpoint(folder: Path, nbytes: int = 1 << 20) -> Path:
    """A checkpoint of one safetensors file of ``nbytes`` payload bytes."""
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    payload = bytes(index * 7 % 251 for index in range(nbytes))
    data = len(header).to_bytes(8, "little") + header.encode() + payload
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "README.md").write_text("not a weight")
    return folder


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_the_path_does_not_matter(tmp_path: Path) -> None:
    """Two nodes with the same files in other places agree."""
    first = save_checkpoint(tmp_path / "a" / "model")
    second = tmp_path / "elsewhere"
    shutil.copytree(first, second)
    (second / "README.md").write_text("another text that is no weight")
    assert weights_identity(str(first)) == weights_identity(str(second))
    assert weights_identity(str(first)).startswith("digest:")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: flip(folder / "config.json", 3),
        lambda folder: flip(folder / "model.safetensors.index.json", 3),
        lambda folder: flip(folder / "model.safetensors", 10),
        lambda folder: flip(folder / "model.safetensors", 300),
        lambda folder: flip(folder / "model.safetensors", -1),
        lambda folder: (folder / "model.safetensors").open("ab").write(b"x"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
        lambda folder: (folder / "more.bin").write_bytes(b"x"),
        lambda folder: (folder / "modeling_own.py").write_text("x = 1"),
    ],
    ids=[
        "config",
        "index",
        "header",
        "first page",
        "last page",
        "size",
        "name",
        "one more file",
        "code",
    ],
)
def test_another_checkpoint_has_another_identity(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """Each thing that the digest covers changes it: case 4 of same name, other weights."""
    folder = save_checkpoint(tmp_path / "model")
    before = weights_identity(str(folder))
    change(folder)
    assert weights_identity(str(folder)) != before


def test_a_fine_tune_that_changes_every_weight_a_little_is_another_checkpoint(
    tmp_path: Path,
) -> None:
    """Same shapes and sizes, every byte other: sampled pages are enough to see it."""
    folder = save_checkpoint(tmp_path / "model")
    before = weights_identity(str(folder))
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = len(data) - (1 << 20)
    data[start:] = bytes(byte ^ 1 for byte in data[start:])
    path.write_bytes(data)
    assert weights_identity(str(folder)) != before


@pytest.mark.parametrize("changed", range(40))
def test_one_changed_tensor_is_another_checkpoint(tmp_path: Path, changed: int) -> None:
    """Case 4: a merge that touched one tensor of many, wherever it lies, and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.safetensors"
    sizes = [2_000_000 if index % 2 else 1_000 for index in range(40)]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for index, nbytes in enumerate(sizes):
        offsets = [start, start + nbytes]
        header[f"t{index}"] = {"dtype": "U8", "shape": [nbytes], "data_offsets": offsets}
        start += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + start)
    before = weights_identity(str(folder))
    with path.open("r+b") as file:
        file.seek(8 + len(text) + sum(sizes[:changed]))
        file.write(b"\1" * sizes[changed])
    assert weights_identity(str(folder)) != before


@pytest.mark.parametrize("changed", [0, 77, 150, 299])
def test_one_changed_tensor_of_an_archive_is_another_checkpoint(
    tmp_path: Path, changed: int
) -> None:
    """The same for the archives that torch writes, which keep a checksum of each tensor."""
    found = []
    for name in ("before", "after"):
        folder = tmp_path / name / "model"
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "model.bin", "w") as archive:
            for index in range(300):
                fill = b"\1" if name == "after" and index == changed else b"\0"
                archive.writestr(zipfile.ZipInfo(f"archive/data/{index}"), fill * 3_000)
        found.append(weights_identity(str(folder)))
    assert found[0] != found[1]


def test_of_700_gb_some_megabytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """163 files of 92 000 tensors, as the largest open models have, and nearly all of it holes: as
    much is read as there are tensors, however large they are, and a changed one is still seen."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    num_tensors, nbytes = 565, 7_600_000
    header = json.dumps(
        {
            f"model.layers.{index}.weight": {
                "dtype": "U8",
                "shape": [nbytes],
                "data_offsets": [index * nbytes, (index + 1) * nbytes],
            }
            for index in range(num_tensors)
        }
    ).encode()
    files = [folder / f"model-{index:05}-of-00163.safetensors" for index in range(163)]
    for file in files:
        with file.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.truncate(8 + len(header) + num_tensors * nbytes)
    assert sum(file.stat().st_size for file in files) > 700e9 - 1e9
    num_read = []
    pread = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        num_read.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    before = weights_identity(str(folder))
    assert sum(num_read) < 150e6
    with files[77].open("r+b") as stream:
        stream.seek(8 + len(header) + 300 * nbytes + nbytes // 2)
        stream.write(b"x")
    assert weights_identity(str(folder)) != before


def test_a_header_that_lies_is_still_identified(tmp_path: Path) -> None:
    """Offsets that are no offsets, or lie outside the file, stop nothing."""
    folder = tmp_path / "model"
    folder.mkdir()
    for header in ('{"a": {"data_offsets": ["x", null]}}', '{"a": 1}', "[1]", "{",
                   '{"a": {"data_offsets": [0, 999999999999]}}'):  # fmt: skip
        data = len(header).to_bytes(8, "little") + header.encode() + b"payload"
        (folder / "model.safetensors").write_bytes(data)
        assert weights_identity(str(folder)).startswith("digest:")


def test_a_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    """The commit in a snapshot's path is the identity, also through a link to the folder."""
    folder = save_checkpoint(tmp_path / "models--org--name" / "snapshots" / COMMIT)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert weights_identity(str(folder)) == f"commit:{COMMIT}"
    assert weights_identity(str(link)) == f"commit:{COMMIT}"


def test_the_operators_word_decides(tmp_path: Path) -> None:
    """A given identity is taken, and can't be mistaken for one that was found out."""
    folder = save_checkpoint(tmp_path / "model")
    assert weights_identity(str(folder), given=f"commit:{COMMIT}") == f"given:commit:{COMMIT}"
    assert weights_identity("made-up", given="v1", load_format="dummy") == "given:v1"


@pytest.mark.parametrize(
    ("model", "load_format"), [("made/up", "auto"), ("made-up", "auto"), ("s3://bucket/m", "auto")]
)
def test_weights_that_cannot_be_found_stop_the_start(model: str, load_format: str) -> None:
    """Case 9: no revision and no weights to look at names the option that supplies an identity."""
    with pytest.raises(ConfigError) as caught:
        weights_identity(model, load_format=load_format)
    assert caught.value.reason is Reason.CONFIG_MISSING
    assert "'model_identity'" in caught.value.detail


def test_dummy_weights_and_a_folder_without_weights_stop_the_start(tmp_path: Path) -> None:
    """Case 9: files that aren't there, or aren't used, identify nothing."""
    folder = save_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        weights_identity(str(folder), load_format="dummy")
    assert caught.value.reason is Reason.CONFIG_MISSING
    assert "'model_identity'" in caught.value.detail
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        weights_identity(str(folder))
    assert caught.value.reason is Reason.CONFIG_MISSING
    assert "'model_identity'" in caught.value.detail


def test_the_model_name_is_the_same_on_every_node(tmp_path: Path) -> None:
    """A hub folder gives the hub name, another folder its last part, a hub name itself."""
    folder = save_checkpoint(tmp_path / "models--org--name" / "snapshots" / COMMIT)
    assert model_name(str(folder)) == "org/name"
    assert model_name(str(save_checkpoint(tmp_path / "llama"))) == "llama"
    assert model_name("org/name") == "org/name"
    assert model_name(str(folder), given="served") == "served"

"""Coverage-guided search for bytes that give anything but a value or a RemoteDataError.

Run: ``python tests/hostile/fuzz.py TARGET [SECONDS]``, TARGET one of header, key, manifest. Ends
with status 0 when nothing was found; prints the input and the exception otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvformat"]):
    from kvformat import (
        RemoteDataError,
        decode_header,
        encode_header,
        format_key,
        manifest,
        parse_key,
        parse_manifest,
    )

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from headers import MAPS, encoded, sealed  # noqa: E402
from model_layouts import MODELS, model  # noqa: E402

GOOD_KEY = "kvformat1/a%2Fb/m/" + "0f" * 16 + "/g0000000000000001/l0000h0000c0000/" + "ab" * 32


def header(data: bytes) -> None:
    """As they are, and with a right checksum, so that the search reaches every rule."""
    for hostile in (data, sealed(data)):
        try:
            found = decode_header(hostile)
        except RemoteDataError:
            continue
        assert encode_header(found) == hostile[: found.header_nbytes] or found.minor > 0


def key(data: bytes) -> None:
    """Any text parses to a key that is spelt so, or is refused."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        found = parse_key(text)
    except RemoteDataError:
        return
    assert format_key(found) == text


def manifest_of(data: bytes) -> None:
    """Any bytes are the manifest of a layout that is written so, or are refused."""
    try:
        found = parse_manifest(data)
    except RemoteDataError:
        return
    assert manifest(found) == data


TARGETS = {"header": header, "key": key, "manifest": manifest_of}
SEEDS = {
    "header": [encoded(name) for name in MAPS],
    "key": [GOOD_KEY.encode(), (GOOD_KEY[: GOOD_KEY.index("/g")] + "/manifest").encode()],
    "manifest": [manifest(model(name)) for name in MODELS],
}


def main() -> None:
    """Search for the given time, from valid inputs on."""
    target, seconds = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "60"
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(SEEDS[target]):
            Path(folder, f"{number}").write_bytes(seed)
        options = ["-max_len=8192", "-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]
        atheris.Setup(
            [sys.argv[0], *options, f"-max_total_time={seconds}", folder], TARGETS[target]
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()

"""The Markdown of the spec says what the code does: tables, codes, versions, grammar, example."""

from __future__ import annotations

import hashlib
import re
from itertools import accumulate
from pathlib import Path
from struct import calcsize

import pytest
import xxhash

import kvformat as kv
from kvformat import errors as errors_module
from kvformat import registry, wire
from kvformat.layout import SCHEMA

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "spec" / "kvformat.md").read_text("utf-8")
REGISTRY = (ROOT / "spec" / "registry.md").read_text("utf-8")
CONFORMANCE = (ROOT / "spec" / "CONFORMANCE.md").read_text("utf-8")


def section(text: str, heading: str) -> str:
    """The text below a heading, up to the next one of any level."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if re.fullmatch(rf"#+ {heading}", line))
    rest = lines[start + 1 :]
    end = next((i for i, line in enumerate(rest) if re.match(r"#+ ", line)), len(rest))
    return "\n".join(rest[:end])


def tables(text: str) -> list[list[list[str]]]:
    """The tables of some Markdown: rows of cells without backticks, heads left out."""
    found: list[list[list[str]]] = []
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
        elif rows:
            found.append(rows[2:])
            rows = []
    return found


def test_versions() -> None:
    """The version stands alike in the title, the registry, the contract and the code."""
    version = f"{registry.FORMAT_MAJOR}.{registry.FORMAT_MINOR}"
    assert SPEC.startswith(f"# kvformat {version}\n")
    assert f"format version **{version}**" in SPEC
    assert f"* **{version}**:" in section(SPEC, r"14\. Change log")
    assert REGISTRY.startswith(f"# Registry of kvformat {version}\n")
    assert f'"format": "{version}"' in CONFORMANCE
    assert dict(tables(section(REGISTRY, "Versions"))[0]) == {
        "format major": str(registry.FORMAT_MAJOR),
        "format minor": str(registry.FORMAT_MINOR),
        "schema": SCHEMA,
        "key format part": f"kvformat{registry.FORMAT_MAJOR}",
        "magic": wire.MAGIC.hex(),
    }


def test_dtypes() -> None:
    """The registry's dtypes, in order, with their bits."""
    rows = tables(section(REGISTRY, "dtypes"))[0]
    assert [(row[0], int(row[1])) for row in rows] == list(registry.DTYPE_BITS.items())


def test_group_kinds() -> None:
    """The registry's kinds, and which of them have a window."""
    rows = tables(section(REGISTRY, "Group kinds"))[0]
    assert {row[0] for row in rows if row[1] == "> 0"} == registry.WINDOWED_KINDS
    assert {row[0] for row in rows if row[1] == "0"} == registry.UNWINDOWED_KINDS
    assert len(rows) == len(registry.GROUP_KINDS)


def test_axes() -> None:
    """The axes that are cut."""
    rows = tables(section(REGISTRY, "Axes"))[0]
    assert [row[0] for row in rows] == [registry.HEAD_AXIS, registry.TOKEN_AXIS]


def test_component_names() -> None:
    """The registry's component names, in order, with their meanings."""
    rows = tables(section(REGISTRY, "Component names"))[0]
    # The code quotes axis names where the text has them in backticks, which tables() drops.
    meanings = [
        [name, re.sub(r"'(\w+)'", r"\1", text)] for name, text in registry.COMPONENT_NAMES.items()
    ]
    assert rows == meanings


def test_feature_bits() -> None:
    """Each bit of the registry is the code's constant, and known where the registry says so."""
    rows = tables(section(REGISTRY, "Feature bits"))[0]
    bits = {(field, name): 1 << int(bit) for field, bit, name, *_ in rows}
    assert bits == {
        ("required_features", "partial_block"): registry.REQUIRED_PARTIAL_BLOCK,
        ("optional_features", "payload_xxh3"): registry.OPTIONAL_PAYLOAD_XXH3,
    }
    known = {"required_features": 0, "optional_features": 0}
    for field, bit, _name, since, *_ in rows:
        known[field] |= 0 if since == "reserved" else 1 << int(bit)
    assert known == {
        "required_features": registry.KNOWN_REQUIRED_FEATURES,
        "optional_features": registry.KNOWN_OPTIONAL_FEATURES,
    }


def test_reason_codes() -> None:
    """Every code of the library in the registry, in order, with error classes that exist."""
    rows = tables(section(REGISTRY, "Reason codes"))[0]
    assert [row[0] for row in rows] == [reason.value for reason in kv.Reason]
    for code, classes, rule, _ in rows:
        for name in classes.split(", "):
            assert issubclass(getattr(errors_module, name), kv.KVFormatError), (code, name)
        is_world = (
            issubclass(getattr(errors_module, classes), kv.ConnectorError)
            if ("," not in classes)
            else False
        )
        assert (rule == "*library*") == is_world, code


def test_codes_in_the_text() -> None:
    """The text names no code that isn't in the registry, and each code of the format somewhere."""
    rows = tables(section(REGISTRY, "Reason codes"))[0]
    of_format = {row[0] for row in rows if row[2] != "*library*"}
    families = {code.split("_")[0] for code in of_format}
    named = {
        word
        for word in re.findall(r"`([a-z]+(?:_[a-z]+)*)`", SPEC)
        if word.split("_")[0] in families
    }
    fields = {
        # header fields and component names that begin like a family
        "header_nbytes",
        # the last part of a manifest key
        "manifest",
    }
    assert named - fields == of_format


@pytest.mark.parametrize("row", range(15))
def test_limits(row: int) -> None:
    """Each limit of the text is the code's constant of that name, and there are no others."""
    rows = tables(section(SPEC, r"11\. Limits"))[0]
    assert len(rows) == 15
    _, value, constant, reasons = rows[row]
    assert int(value) == getattr(
        wire if constant.endswith("_HEADER_NBYTES") else registry, constant
    )
    for reason in reasons.split(", "):
        kv.Reason(reason)
    limits = {name for name in vars(registry) if name.startswith("MAX_")}
    assert {found[2] for found in rows} - {"MIN_HEADER_NBYTES", "MAX_HEADER_NBYTES"} == limits


def test_fixed_header_table() -> None:
    """Offsets and widths of the fixed part are those of the struct that reads it."""
    rows = tables(section(SPEC, r"6\.1 Fixed part of the header"))[0]
    formats = re.findall(r"\d*[a-zA-Z]", str(wire.FIXED.format).lstrip("<"))
    position = 0
    expected = []
    for code in formats:
        expected.append((position, calcsize(f"<{code}")))
        position += calcsize(f"<{code}")
    # The struct has two codes "HHH" and "QQ" where the text has a row for each.
    assert [(int(row[0]), int(row[1])) for row in rows] == expected
    assert position == wire.FIXED.size == 192
    assert bytes.fromhex(rows[0][3].replace(" ", "")) == wire.MAGIC
    assert wire.FIXED.format.startswith(wire.PREAMBLE.format)


def test_group_entry_table() -> None:
    """Offsets and widths of a directory entry are those of the struct that reads it."""
    rows = tables(section(SPEC, r"6\.2 Tables of the header"))[1]
    position = 0
    for row, code in zip(rows, str(wire.GROUP.format).lstrip("<"), strict=True):
        assert (int(row[0]), int(row[1])) == (position, calcsize(code))
        position += calcsize(code)
    assert position == wire.GROUP.size


@pytest.mark.parametrize("num_layers", [(1,), (0, 1), (64,), (65, 1), (61, 61, 3), (16384,)])
def test_header_size(num_layers: tuple[int, ...]) -> None:
    """The formula of the text gives the code's header size."""
    assert "H = 192 + 16G + 8W + 24N + 8, rounded up to a multiple of 64" in SPEC
    words = sum((layers + 63) // 64 for layers in num_layers)
    nbytes = 192 + 16 * len(num_layers) + 8 * words + 24 * sum(num_layers) + 8
    assert wire.header_nbytes(num_layers) == (nbytes + 63) // 64 * 64


def grammar() -> re.Pattern[str]:
    """The ABNF of the text as one regular expression."""
    block = re.search(r"```abnf\n(.*?)```", SPEC, re.DOTALL)
    assert block is not None
    rules = dict(re.findall(r"^(\S+) += (.*)$", block[1], re.MULTILINE))

    def expression(text: str) -> str:
        out, rest = "", text
        while rest := rest.strip():
            repeat = re.match(r"(\d*)(\*?)(\d*)", rest)
            assert repeat is not None
            rest = rest[repeat.end() :]
            low, star, high = repeat.groups()
            if rest.startswith("("):
                depths = accumulate({"(": 1, ")": -1}.get(char, 0) for char in rest)
                end = list(depths).index(0)
                item, rest = expression(rest[1:end]), rest[end + 1 :]
            elif match := re.match(r'(?:%s)?"([^"]*)"', rest):
                item, rest = re.escape(match[1]), rest[match.end() :]
            elif match := re.match(r"%x(..)-(..)", rest):
                item, rest = rf"[\x{match[1]}-\x{match[2]}]", rest[match.end() :]
            elif match := re.match(r"/", rest):
                out, rest = out + "|", rest[1:]
                continue
            else:
                match = re.match(r"[A-Za-z-]+", rest)
                assert match is not None, rest
                item, rest = expression(rules[match[0]]), rest[match.end() :]
            if star:
                item = f"(?:{item}){{{low or 0},{high}}}"
            elif low:
                item = f"(?:{item}){{{low}}}"
            out += f"(?:{item})"
        return out

    return re.compile(expression("key"))


@pytest.mark.parametrize(
    ("tenant", "model"),
    [("", ""), ("t", "org/m"), (".", ".."), ("~", "a.b."), ("é\0\n%", "A_-9"), ("%2F", " ")],
)
def test_grammar_has_every_key(tenant: str, model: str) -> None:
    """What the code formats is a key by the ABNF of the text; a character more or less isn't."""
    namespace = kv.Namespace(tenant, model, bytes(range(16)))
    key = grammar()
    for parts in (
        kv.ManifestKey(namespace),
        kv.BlockKey(namespace, 1, kv.Shard(), b"\0"),
        kv.BlockKey(namespace, 2**64 - 1, kv.Shard(65535, 65535, 65535), b"\xff" * 64),
    ):
        text = kv.format_key(parts)
        assert key.fullmatch(text)
        assert not key.fullmatch(text + "0")
        assert not key.fullmatch(text[:-1])
        assert not key.fullmatch(text.upper())


@pytest.mark.parametrize(
    "part", ["", "%2f", ".a", "a~", "%", "%G0", "a b", "é", "a/b", "a+b", "a:b", "a\n"]
)
def test_grammar_refuses(part: str) -> None:
    """What the ABNF refuses, the code refuses."""
    text = f"kvformat1/{part}/m/{'0' * 32}/manifest"
    assert grammar().fullmatch(text) is None
    with pytest.raises(kv.KeyFormatError):
        kv.parse_key(text)


def test_worked_object() -> None:
    """The worked object of the text, read by the code: each digest, and each byte in its place."""
    text = section(SPEC, r"13\. A worked object")
    json_block = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    hex_block = re.search(r"```hex\n(.*?)```", text, re.DOTALL)
    assert json_block is not None
    assert hex_block is not None
    manifest = json_block[1].replace("\n", "").encode()
    assert (
        f"It has {len(manifest)} bytes and the SHA-256 `{hashlib.sha256(manifest).hexdigest()}`"
        in text
    )
    layout = kv.parse_manifest(manifest)
    assert f"the layout fingerprint `{kv.fingerprint(layout).hex()}`" in text
    assert f"`{kv.content_fingerprint(layout).hex()}`" in text

    data = b""
    for line in hex_block[1].splitlines():
        at, octets = line[:3], line[5:53].strip()
        assert int(at) == len(data), line
        zeros = re.fullmatch(r"00 \* (\d+)", octets)
        data += bytes(int(zeros[1])) if zeros else bytes.fromhex(octets.replace(" ", ""))
    assert f"the object of {len(data)} bytes" in text
    header = kv.decode_header(data)
    (object_map,) = kv.object_maps(layout)
    key = kv.parse_key(re.search(r"kvformat1/\S+", text)[0])  # type: ignore[index]
    assert isinstance(key, kv.BlockKey)
    assert key.namespace == kv.layout_namespace(layout)
    kv.check_header(header, object_map, kv.fingerprint(layout), key.block_hash)
    assert kv.encode_header(header) == data[: header.header_nbytes]
    payload = data[header.header_nbytes :]
    assert len(data) == object_map.nbytes
    kv.check_range(header, 0, payload)
    assert xxhash.xxh3_64_intdigest(payload) == int(header.checksums[0])


def test_empty_checksum() -> None:
    """The checksum of no bytes, as the text gives it."""
    match = re.search(r"checksum of no bytes is `([0-9a-f]{16})`", SPEC)
    assert match is not None
    assert xxhash.xxh3_64_intdigest(b"") == int(match[1], 16)


def test_citations() -> None:
    """Every section that the code cites is there."""
    headings = set(re.findall(r"^#+ (\d+(?:\.\d+)?)", SPEC, re.MULTILINE))
    cited = set()
    for source in [*ROOT.glob("kvformat/**/*.py"), *ROOT.glob("connector/**/*.py")]:
        for found in re.findall(
            r"spec/kvformat\.md\s+sections? ((?:[\d.]+\d|\d)(?:(?:, | and | to )[\d.]*\d)*)",
            source.read_text("utf-8"),
        ):
            for number in re.findall(r"\d+(?:\.\d+)?", found):
                cited.add(number)
                assert number in headings, (source, number)
    assert len(cited) > 8


def test_rules_in_the_registry() -> None:
    """Every rule that the registry names is there."""
    rules = set(re.findall(r"^\* \*\*([MKHCWR]\d+)\.\*\*", SPEC, re.MULTILINE))
    headings = set(re.findall(r"^#+ (\d+(?:\.\d+)?)", SPEC, re.MULTILINE))
    for code, _, where, _ in tables(section(REGISTRY, "Reason codes"))[0]:
        for rule in where.split(", ") if where != "*library*" else []:
            assert rule in rules | headings, (code, rule)

"""Keys of any inputs: they parse back, differ, sort and list as the grammar promises."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvformat import (
    BlockKey,
    KeyFormatError,
    KVFormatError,
    LayoutError,
    ManifestKey,
    Namespace,
    Reason,
    RemoteDataError,
    Shard,
    format_key,
    format_keys,
    key_prefix,
    namespace_prefix,
    parse_key,
)
from kvformat.registry import MAX_KEY_NBYTES, MAX_TEXT_NBYTES

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["", ".", "..", "~", "%7E", "a/b", "a:b@c%2F", "\0", "\n", "模型", "manifest", "x" * 10240]
)
INDEX = st.integers(0, 0xFFFF)
NAMESPACES = st.builds(Namespace, TEXT, TEXT, st.binary(min_size=16, max_size=16))
BLOCK_KEYS = st.builds(
    BlockKey,
    NAMESPACES,
    st.integers(1, 2**64 - 1),
    st.builds(Shard, INDEX, INDEX, INDEX),
    st.binary(min_size=1, max_size=64),
)
KEYS = BLOCK_KEYS | st.builds(ManifestKey, NAMESPACES)


@given(KEYS)
def test_a_key_parses_back(key: BlockKey | ManifestKey) -> None:
    """parse(format(x)) == x for every x, within the length limit and in plain ASCII."""
    text = format_key(key)

    assert parse_key(text) == key
    assert len(text) <= MAX_KEY_NBYTES
    assert text.isascii()
    assert text.isprintable()
    assert all(part not in ("", ".", "..") for part in text.split("/"))


@given(KEYS, KEYS)
def test_two_inputs_never_give_one_key(
    a: BlockKey | ManifestKey, b: BlockKey | ManifestKey
) -> None:
    """Case 5, in general: equal keys mean equal inputs."""
    assert (format_key(a) == format_key(b)) == (a == b)


@given(
    st.text(max_size=60)
    | st.from_regex(r"kvformat1/[a-z%2F./~]*/m/[0-9a-f]{32}/.*", fullmatch=True)
)
@example("kvformat1/%ED%A0%80/m/" + "0" * 32 + "/manifest")  # an encoded surrogate
@example("kvformat1/%C0%AF/m/" + "0" * 32 + "/manifest")  # an overlong "/"
@example("kvformat1/t/m/" + "0" * 32 + "/manifest\n")
@example("\ud800")
def test_any_text_is_a_key_or_remote_data_error(text: str) -> None:
    """Text of any origin gives a key, spelt in its one way, or a RemoteDataError."""
    try:
        key = parse_key(text)
    except RemoteDataError:
        return
    assert format_key(key) == text


@given(st.lists(KEYS, max_size=30), NAMESPACES)
def test_deleting_by_prefix_touches_no_other_namespace(
    keys: list[BlockKey | ManifestKey], namespace: Namespace
) -> None:
    """Cases 2, 3: what starts with a namespace's prefix is exactly what belongs to it."""
    keys += [ManifestKey(namespace), BlockKey(namespace, 1, Shard(), b"h")]
    prefix = namespace_prefix(namespace)
    store = {format_key(key): key for key in keys}

    deleted = {text for text in store if text.startswith(prefix)}

    assert deleted == {text for text, key in store.items() if key.namespace == namespace}


@given(st.sets(KEYS, max_size=30))
def test_sorted_keys_keep_a_namespace_together(keys: set[BlockKey | ManifestKey]) -> None:
    """Plain sorting of keys lists each namespace as one run."""
    order = [parse_key(text).namespace for text in sorted(map(format_key, keys))]
    runs = [n for i, n in enumerate(order) if i == 0 or order[i - 1] != n]

    assert len(runs) == len(set(runs))


@given(NAMESPACES, st.lists(st.binary(min_size=8, max_size=32), max_size=5))
def test_many_keys_at_once_are_the_same_keys(namespace: Namespace, hashes: list[bytes]) -> None:
    """Rows of prefix plus hash are what format_key gives one by one."""
    shards = [Shard(0, head, 0) for head in range(3)]
    prefixes = [key_prefix(namespace, 5, shard) for shard in shards]

    assert format_keys(prefixes, hashes) == [
        [format_key(BlockKey(namespace, 5, shard, h)) for h in hashes] for shard in shards
    ]


def test_where_tenant_ends_and_model_begins() -> None:
    """Case 5: two splits of one text, and every hostile value, are different keys."""
    plain = ["", "a", "bc", "ab", "c", "A", "x" * 10240]
    special = ["/", "a/bc", "@", ":", "%", "%2F", "\0", "\n", ".", "..", ".a", "~", "%7E"]
    values = [*plain, *special, "é", "e\u0301", "模型"]
    pairs = [(tenant, model) for tenant in values for model in values]
    keys = {format_key(ManifestKey(Namespace(*pair, bytes(16)))): pair for pair in pairs}

    assert len(keys) == len(pairs)
    assert all(
        (found.namespace.tenant, found.namespace.model) == pair
        for text, pair in keys.items()
        for found in [parse_key(text)]
    )


@pytest.mark.parametrize("nbytes", [8, 16, 32])
def test_hashes_that_share_64_bits_are_different_keys(nbytes: int) -> None:
    """Case 6: hashes are never shortened: equal first or last halves, and other lengths, differ."""
    same, other = b"\x01" * 8, b"\x02" * 8
    hashes = [same, same + other, other + same, same + other + other + same, same * 4, other * 4]
    keys = {
        format_key(BlockKey(Namespace("t", "m", bytes(16)), 1, Shard(), h.ljust(nbytes, b"\3")))
        for h in hashes
        if len(h) <= nbytes
    }

    assert len(keys) == len([h for h in hashes if len(h) <= nbytes])
    for text in keys:
        found = parse_key(text)
        assert isinstance(found, BlockKey)
        assert len(found.block_hash) == nbytes


GOOD = "kvformat1/t/m/" + "0f" * 16 + "/g0000000000000001/l0000h0000c0000/" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", Reason.KEY_FORMAT),
        ("other1/t/m", Reason.KEY_FORMAT),
        ("kvformat/t/m", Reason.KEY_FORMAT),
        ("kvformat01/t/m", Reason.KEY_FORMAT),
        (GOOD.replace("kvformat1", "kvformat2"), Reason.KEY_VERSION),
        (GOOD.replace("kvformat1", "KVFORMAT1"), Reason.KEY_FORMAT),
        (GOOD + "/", Reason.KEY_FORMAT),
        (GOOD.rsplit("/", 1)[0], Reason.KEY_FORMAT),
        (GOOD[: GOOD.index("/g")] + "/index", Reason.KEY_FORMAT),
        (GOOD.replace("/t/", "//"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/./"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/../"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/a b/"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/%2f/"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/%61/"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/%/"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/%FF/"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/~~/"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", f"/{'x' * (MAX_TEXT_NBYTES + 1)}/"), Reason.KEY_TEXT),
        (GOOD.replace("/t/", "/é/"), Reason.KEY_TEXT),
        (GOOD.replace("0f0f", "0F0F", 1), Reason.KEY_FINGERPRINT),
        (GOOD.replace("0f", "", 1), Reason.KEY_FINGERPRINT),
        (GOOD.replace("g0000000000000001", "g0000000000000000"), Reason.KEY_GROUPS),
        (GOOD.replace("g0000000000000001", "g1"), Reason.KEY_GROUPS),
        (GOOD.replace("g0000000000000001", "G0000000000000001"), Reason.KEY_GROUPS),
        (GOOD.replace("l0000", "l00000"), Reason.KEY_SHARD),
        (GOOD.replace("l0000h0000", "h0000l0000"), Reason.KEY_SHARD),
        (GOOD[:-64], Reason.KEY_HASH),
        (GOOD[:-1], Reason.KEY_HASH),
        (GOOD.replace("ab", "AB"), Reason.KEY_HASH),
        (GOOD + "ab" * 33, Reason.KEY_HASH),
        (GOOD + "\n", Reason.KEY_HASH),
        (GOOD + "a" * MAX_KEY_NBYTES, Reason.KEY_LENGTH),
    ],
)  # fmt: skip
def test_what_the_grammar_refuses_has_a_reason(text: str, reason: Reason) -> None:
    """Case 5: each rule of the grammar, broken alone, is refused with its own code."""
    parse_key(GOOD)
    with pytest.raises(RemoteDataError) as raised:
        parse_key(text)

    assert raised.value.reason is reason
    assert isinstance(raised.value, KeyFormatError) == (reason is not Reason.KEY_VERSION)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Shard(65536, 0, 0), Reason.KEY_SHARD),
        (lambda: Shard(0, -1, 0), Reason.KEY_SHARD),
        (lambda: Namespace("t", "m", b"short"), Reason.KEY_FINGERPRINT),
        (lambda: Namespace("\ud800", "m", bytes(16)), Reason.KEY_TEXT),
        (lambda: Namespace("t", "m" * (MAX_TEXT_NBYTES + 1), bytes(16)), Reason.KEY_TEXT),
        (lambda: BlockKey(Namespace("", "", bytes(16)), 0, Shard(), b"h"), Reason.KEY_GROUPS),
        (lambda: BlockKey(Namespace("", "", bytes(16)), 1 << 64, Shard(), b"h"), Reason.KEY_GROUPS),
        (lambda: BlockKey(Namespace("", "", bytes(16)), 1, Shard(), b""), Reason.KEY_HASH),
        (lambda: BlockKey(Namespace("", "", bytes(16)), 1, Shard(), bytes(65)), Reason.KEY_HASH),
        (lambda: key_prefix(Namespace("", "", bytes(16)), 0, Shard()), Reason.KEY_GROUPS),
    ],
)
def test_what_has_no_key_can_not_be_named(make: object, reason: Reason) -> None:
    """An input outside the grammar is the caller's error, with the same codes."""
    with pytest.raises(LayoutError) as raised:
        make()  # type: ignore[operator]

    assert raised.value.reason is reason
    assert isinstance(raised.value, KVFormatError)


def test_no_namespace_is_the_prefix_of_another() -> None:
    """Case 3: not even where one name begins with the other's."""
    texts = ["a", "ab", "a.b", "a-b", "", "~", "a/", "a%2F"]
    fingerprints = [bytes(16), b"\1" * 16]
    prefixes = [
        namespace_prefix(Namespace(tenant, model, fingerprint))
        for tenant, model, fingerprint in product(texts, texts, fingerprints)
    ]

    assert not any(a.startswith(b) or b.startswith(a) for a, b in combinations(prefixes, 2))

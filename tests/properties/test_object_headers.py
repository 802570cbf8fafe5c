"""Headers of random objects: what is encoded is decoded, and belongs to that object alone."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_strategies import layouts
from xxhash import xxh3_64_intdigest

from kvformat import (
    HeaderError,
    Layout,
    LayoutError,
    ObjectHeader,
    ObjectMap,
    Reason,
    Shard,
    check_header,
    decode_header,
    encode_header,
    fingerprint,
    new_header,
    object_maps,
)
from kvformat.acceptance import UsualHeader


@given(layouts(), st.data())
def test_the_header_of_any_object_decodes_to_itself(layout: Layout, data: st.DataObject) -> None:
    """decode(encode(h)) == h in every field; it passes for its own object and for no other of
    the layout; every range lies inside the object, one after the other."""
    maps = object_maps(layout)
    object_map = data.draw(st.sampled_from(maps))
    block_hash = data.draw(st.binary(min_size=8, max_size=8))
    checksums = data.draw(
        st.none()
        | st.lists(
            st.integers(0, 2**64 - 1),
            min_size=len(object_map.layers),
            max_size=len(object_map.layers),
        )
    )
    write_id = data.draw(st.binary(min_size=16, max_size=16))
    made = new_header(object_map, fingerprint(layout), block_hash, write_id, checksums)
    encoded = encode_header(made)
    found = decode_header(encoded)

    assert len(encoded) == object_map.header_nbytes
    assert all(
        getattr(found, name) == getattr(made, name) for name in ObjectHeader.__struct_fields__
    )
    ends = found.offsets + found.sizes
    assert found.offsets.tolist() == [object_map.header_nbytes, *ends.tolist()[:-1]]
    assert int(ends[-1]) == object_map.nbytes
    np.testing.assert_array_equal(found.checksums, checksums or [0] * found.num_ranges)

    for other in maps:
        if other is object_map:
            check_header(found, other, fingerprint(layout), block_hash, require_checksums=False)
        else:
            with pytest.raises(HeaderError):
                check_header(found, other, fingerprint(layout), block_hash)
    with pytest.raises(HeaderError) as raised:
        check_header(found, object_map, fingerprint(layout), block_hash[::-1] + b"\0")
    assert raised.value.reason is Reason.WRONG_BLOCK


@given(layouts(), st.data())
def test_objects_hold_every_byte_of_a_block_once(layout: Layout, data: st.DataObject) -> None:
    """The objects of a block together have the layout's bytes, and each its component ranges one
    after the other."""
    maps = object_maps(layout)
    whole = sum(c.nbytes for g in layout.groups for layer in g.layers for c in layer.components)

    assert sum(m.nbytes - m.header_nbytes for m in maps) == whole
    object_map = data.draw(st.sampled_from(maps))
    position = object_map.header_nbytes
    for found in object_map.components:
        assert found.offset == position
        position += found.nbytes
    assert position == object_map.nbytes


@given(layouts())
def test_objects_exist_exactly_for_shards_with_bytes(layout: Layout) -> None:
    """Every shard of the grid either has an object with bytes, or no map at all."""
    grid = layout.grid
    listed = {(m.object_index, m.shard) for m in object_maps(layout)}
    for index in range(len(layout.objects)):
        for layer, head, context in product(
            range(grid.layer_shards), range(grid.head_shards), range(grid.context_shards)
        ):
            shard = Shard(layer, head, context)
            if (index, shard) in listed:
                assert ObjectMap(layout, index, shard).nbytes > 0
            else:
                with pytest.raises(LayoutError):
                    ObjectMap(layout, index, shard)


@given(layouts(), st.data())
def test_a_usual_header_is_one_that_the_long_way_accepts(
    layout: Layout, data: st.DataObject
) -> None:
    """What the quick comparison takes is decoded and accepted with the same write id and checksums,
    whatever bytes were changed; what a writer makes is taken, without checksums it's left alone."""
    object_map = data.draw(st.sampled_from(object_maps(layout)))
    digest = fingerprint(layout)
    usual = UsualHeader(object_map, digest)
    block_hash = data.draw(st.binary(min_size=8, max_size=8))
    write_id = data.draw(st.binary(min_size=16, max_size=16))
    sums = [index * 7919 for index in range(len(object_map.layers))]
    encoded = encode_header(new_header(object_map, digest, block_hash, write_id, sums))
    assert usual.match(encoded, block_hash) == (write_id, np.array(sums, "<u8").tobytes())
    bare = encode_header(new_header(object_map, digest, block_hash, write_id, None))
    assert usual.match(bare, block_hash) is None

    changed = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):  # as a writer would, who means it
        changed[-8:] = xxh3_64_intdigest(changed[:-8]).to_bytes(8, "little")
    asked = data.draw(st.sampled_from([block_hash, bytes(8), block_hash[:7], block_hash + b"x"]))
    found = usual.match(bytes(changed), asked)
    if found is not None:
        header = decode_header(bytes(changed), object_map.header_nbytes)
        check_header(header, object_map, digest, asked)
        assert found == (header.write_id, header.checksums.tobytes())
    for part in (encoded[:-1], encoded + b"\0"):
        assert usual.match(part, block_hash) is None

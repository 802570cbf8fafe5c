"""Which object of a layout a header or a key names: for tools that were not told which one to want.

A reader knows it, and compares (:func:`~kvformat.acceptance.check_header`).

Source: spec/kvformat.md section 6.4.
"""

from __future__ import annotations

from kvformat.acceptance import check_fingerprint, check_header
from kvformat.errors import HeaderError, LayoutError, Reason
from kvformat.header import ObjectHeader
from kvformat.key import Shard
from kvformat.layout import Layout
from kvformat.objectmap import ObjectMap, group_bitmap


def find_object_map(layout: Layout, bitmap: int, shard: Shard) -> ObjectMap:
    """The object with these groups and this shard.

    Raises ``HeaderError``: ``wrong_groups`` where the layout has no object with these groups,
    ``wrong_shard`` where this one has no such shard.
    """
    bitmaps = [group_bitmap(groups) for groups in layout.objects]
    if bitmap not in bitmaps:
        raise HeaderError(
            Reason.WRONG_GROUPS,
            f"the layout has no object with the group bitmap {bitmap:#x}; it has "
            f"{', '.join(str(list(groups)) for groups in layout.objects)}",
        )
    try:
        return ObjectMap(layout, bitmaps.index(bitmap), shard)
    except LayoutError as error:
        raise HeaderError(Reason.WRONG_SHARD, error.detail) from None


def identify_object(
    header: ObjectHeader, layout: Layout, fingerprint: bytes, *, require_checksums: bool
) -> ObjectMap:
    """The object that a header says to be, after comparing all the rest with the layout.

    Args:
        header: a decoded header.
        layout: the layout that the object should be of.
        fingerprint: its fingerprint, 16 bytes.
        require_checksums: refuse objects whose writer gave none.

    Raises like :func:`~kvformat.acceptance.check_header`.
    """
    check_fingerprint(header, fingerprint)
    object_map = find_object_map(layout, header.group_bitmap, header.shard)
    check_header(
        header, object_map, fingerprint, header.block_hash, require_checksums=require_checksums
    )
    return object_map

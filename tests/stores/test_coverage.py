"""The book of written bytes, against a set of positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvformat.stores.coverage import Coverage

NBYTES = 24
RANGES = st.tuples(st.integers(0, NBYTES - 1), st.integers(1, NBYTES)).map(
    lambda pair: (pair[0], min(pair[1], NBYTES - pair[0]))
)


@given(st.lists(st.lists(RANGES, max_size=6), max_size=8))
def test_equals_a_set(calls: list[list[tuple[int, int]]]) -> None:
    """After any writes, whole means that each byte was written, and nothing else does."""
    coverage, positions = Coverage(), set[int]()
    for ranges in calls:
        coverage.add_ranges([size for _, size in ranges], [offset for offset, _ in ranges])
        for offset, size in ranges:
            positions.update(range(offset, offset + size))
        for nbytes in range(1, NBYTES + 1):
            assert coverage.is_whole(nbytes) == (positions == set(range(nbytes)))


def test_a_layer_at_a_time_stays_small() -> None:
    """Writes that fill an object from both ends leave one interval."""
    coverage = Coverage()
    for layer in range(0, 1000, 2):
        coverage.add(layer * 64, layer * 64 + 64)
    for layer in range(1, 1000, 2):
        coverage.add(layer * 64, layer * 64 + 64)
    assert coverage.is_whole(64_000)

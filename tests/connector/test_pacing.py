"""How much one call carries, and how far ahead is read."""

from __future__ import annotations

from kvformat.plan import Limits
from kvformat_connector.depth import Depth
from kvformat_connector.pacing import Pace

MIB = 1 << 20


def test_calls_grow_while_they_are_fast_and_shrink_when_they_are_slow() -> None:
    """Within what is configured, whatever is measured."""
    pace = Pace(Limits(max_rows=7, max_nbytes=64 * MIB), deadline_s=5.0)
    sizes = []
    for seconds in (0.01, 0.01, 0.01, 0.9, 0.9, 0.3):
        pace.note(pace.limits.max_nbytes, seconds, has_failed=False)
        sizes.append(pace.limits.max_nbytes // MIB)
    assert sizes == [32, 64, 64, 32, 16, 16]
    assert pace.limits.max_rows == 7


def test_a_small_call_says_nothing_about_large_ones() -> None:
    """A fast header read doesn't make payload calls larger; a slow one makes them small."""
    pace = Pace(Limits(max_nbytes=64 * MIB), deadline_s=5.0)
    pace.note(1024, 0.001, has_failed=False)
    assert pace.limits.max_nbytes == 16 * MIB
    pace.note(MIB, 1.0, has_failed=False)
    assert pace.limits.max_nbytes == MIB // 2


def test_failed_calls_get_smaller_down_to_a_floor() -> None:
    """Never to nothing."""
    pace = Pace(Limits(max_nbytes=64 * MIB), deadline_s=5.0)
    for _ in range(40):
        pace.note(pace.limits.max_nbytes, 0.01, has_failed=True)
    assert pace.limits.max_nbytes == 64 << 10


def test_a_configured_limit_below_the_floor_stays() -> None:
    """What an operator says holds."""
    pace = Pace(Limits(max_nbytes=128), deadline_s=5.0)
    pace.note(128, 9.0, has_failed=True)
    assert pace.limits.max_nbytes == 128


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def follow(
    depth: Depth,
    clock: Clock,
    compute_s: float,
    transfer_s: float,
    num_queued: int = 0,
    free_nbytes: int = 1 << 40,
) -> int:
    for _ in range(50):
        depth.waited()
        clock.now += compute_s
        depth.transferred(100, transfer_s)
        depth.computed()
        depth.adapt(num_queued, free_nbytes)
    return depth.num_layers


def test_the_depth_follows_what_is_measured() -> None:
    """Transfers that take three computations are read that far ahead; fast ones need one more than
    the layer in use; a fixed depth stays."""
    clock = Clock()
    assert follow(Depth(None, clock), clock, compute_s=0.01, transfer_s=0.0299) == 4
    assert follow(Depth(None, clock), clock, compute_s=0.01, transfer_s=0.001) == 2
    assert follow(Depth(None, clock), clock, compute_s=0.001, transfer_s=9.0) == 16
    assert follow(Depth(5, clock), clock, compute_s=0.01, transfer_s=9.0) == 5


def test_the_depth_follows_queue_and_buffers() -> None:
    """Layers that are queued take their time before what is asked for now; what can't be staged
    isn't asked for; one layer ahead stays in any case."""
    clock = Clock()
    times = {"compute_s": 0.01, "transfer_s": 0.0099}
    assert follow(Depth(None, clock), clock, **times) == 2
    assert follow(Depth(None, clock), clock, **times, num_queued=5) == 6
    assert follow(Depth(None, clock), clock, **times, num_queued=5, free_nbytes=350) == 4
    assert follow(Depth(None, clock), clock, **times, num_queued=5, free_nbytes=0) == 2
    assert follow(Depth(7, clock), clock, **times, num_queued=1, free_nbytes=0) == 7


def test_layers_are_asked_for_in_batches_where_buffers_are_free() -> None:
    """Twice as many as are needed ahead, never more than there is room for; a fixed number is
    what it says."""
    clock = Clock()
    for free_nbytes, expected in ((1 << 40, 8), (600, 6), (0, 2)):
        depth = Depth(None, clock)
        follow(depth, clock, compute_s=0.01, transfer_s=0.0299, free_nbytes=free_nbytes)
        assert depth.num_layers_at_once == expected
    fixed = Depth(3, clock)
    follow(fixed, clock, compute_s=0.01, transfer_s=9.0)
    assert fixed.num_layers_at_once == 3

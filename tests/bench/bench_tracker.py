"""Bookkeeping of sessions alone, on a store that does nothing: register, commit and release.

Linear: eight times the keys take about eight times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

from measure import best_us, report, row

from kvformat_connector.sessions import GetSessions, PutSessions, SessionBook

NUM_KEYS = 8192


class NullStore:
    """Every call works, at once."""

    def __init__(self) -> None:
        self._codes = [0] * NUM_KEYS

    def answer(self, keys: Sequence[str], *rest: object) -> list[int]:
        return self._codes[: len(keys)]

    put_start = put_commit = put_revoke = get_start = get_end = answer


if __name__ == "__main__":
    store = NullStore()
    all_keys = [f"kvformat1/t/m/{'0' * 32}/g1/l0/{index:064x}" for index in range(NUM_KEYS)]
    nbytes = [1 << 20] * NUM_KEYS

    def write(num_keys: int) -> None:
        """Open put sessions, commit all but the last, give that one up."""
        sessions = PutSessions(store)  # type: ignore[arg-type]
        sessions.open(all_keys[:num_keys], nbytes[:num_keys])
        sessions.commit(all_keys[: num_keys - 1])
        sessions.close()

    book = SessionBook()

    def read(num_keys: int) -> None:
        """Open get sessions that somebody else holds too, renew them, end them twice."""
        first = GetSessions(store, book=book)  # type: ignore[arg-type]
        second = GetSessions(store, book=book)  # type: ignore[arg-type]
        first.open(all_keys[:num_keys])
        second.open(all_keys[:num_keys])
        first.open(all_keys[:num_keys])
        first.close()
        second.close()

    few = NUM_KEYS // 8
    put, put_few, get, get_few = best_us(
        lambda: write(NUM_KEYS),
        lambda: write(few),
        lambda: read(NUM_KEYS),
        lambda: read(few),
        number=1,
    )
    assert len(book) == 0
    report(
        "tracker",
        [
            row(f"put sessions, {NUM_KEYS} keys", put / 1000, "ms", at_most=10),
            row(f"get sessions, two holders, {NUM_KEYS} keys", get / 1000, "ms", at_most=10),
            row("put sessions, 8 x the keys", put, "us", floor=put_few * 8, at_most=2),
            row("get sessions, 8 x the keys", get, "us", floor=get_few * 8, at_most=2),
        ],
    )

"""Objects that are not what their key says go, so that somebody can write them again.

An object lies under its key until the store evicts it, and until then nobody can write that key:
one with a wrong bit is promised, rejected and computed anew again and again. So an object that a
load has rejected for what it holds is read once more, whole and outside of any session, for the
fault may have been a stale session's or the network's. If it is wrong again, it is removed.

A store removes nothing that somebody has a lease on, so no reader loses memory that it reads from;
the removal is tried again when leases have ended. Should another writer have replaced the object
meanwhile, a right one goes, which costs a miss. What a writer may have meant (a required feature
that is unknown here, no checksums) is no damage and stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from kvformat.acceptance import check_object
from kvformat.errors import Reason, RemoteDataError
from kvformat.key import BlockKey, parse_key
from kvformat.stores.protocol import Code
from kvformat_connector.answers import ask, code_name
from kvformat_connector.objectcheck import Failure
from kvformat_connector.objects import Rank
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Lane

logger = logging.getLogger(__name__)

#: Reasons that only an object's own bytes give.
_DAMAGE: Final = frozenset(
    {
        Reason.HEADER_TRUNCATED,
        Reason.HEADER_MAGIC,
        Reason.HEADER_VERSION,  # the key names the major version too
        Reason.HEADER_SIZE,
        Reason.HEADER_CHECKSUM,
        Reason.HEADER_RESERVED,
        Reason.HEADER_HASH,
        Reason.HEADER_TOKENS,
        Reason.HEADER_GROUPS,
        Reason.HEADER_COMPLETENESS,
        Reason.HEADER_RANGES,
        Reason.WRONG_FINGERPRINT,
        Reason.WRONG_BLOCK,
        Reason.WRONG_SHARD,
        Reason.WRONG_GROUPS,
        Reason.WRONG_SIZE,
        Reason.WRONG_TOKENS,
        Reason.INCOMPLETE,
        Reason.CHECKSUM_MISMATCH,
    }
)
#: Also ranges that the object hasn't got: it may be shorter than it says.
_SUSPICIOUS: Final = frozenset({*(reason.value for reason in _DAMAGE), code_name(Code.INVALID)})
_MAX_SUSPECTS: Final = 64
#: For as long as several leases of Mooncake's default length, 10 s.
_RETRY_S: Final = 5.0
_MAX_TRIES: Final = 8


def suspects_among(failures: Iterable[Failure]) -> list[str]:
    """Keys of the objects that were rejected for what they hold, or may hold."""
    return [failure.rows.keys[failure.row] for failure in failures if failure.reason in _SUSPICIOUS]


class Damaged:
    """``suspect`` and ``poll`` are the engine's thread; a lane of its own calls the store, so
    that no load or save waits for it."""

    def __init__(
        self, rank: Rank, counters: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._counters = counters
        self._clock = clock
        self._lane = Lane("damaged")
        self._maps = {
            (template.object_map.group_bitmap, template.object_map.shard): template.object_map
            for template in rank.own.gets
        }
        #: By key, when to look next, how often that was, and whether the damage is proven.
        self._suspects: dict[str, _Suspect] = {}

    def suspect(self, keys: Iterable[str]) -> None:
        """Have a closer look at these objects; of too many, at the first."""
        for key in keys:
            if key not in self._suspects and len(self._suspects) < _MAX_SUSPECTS:
                self._suspects[key] = _Suspect(self._clock())

    def poll(self) -> None:
        """Go on where something is due and the store isn't being asked. Waits for nothing."""
        if not self._suspects or not self._lane.is_idle:
            return
        self._suspects = {k: each for k, each in self._suspects.items() if not each.is_over}
        now = self._clock()
        for key, suspect in self._suspects.items():
            if suspect.due_at <= now:
                self._lane.post(self._judge, key, suspect)

    @property
    def num_suspects(self) -> int:
        """Objects that nothing is decided about."""
        return sum(not suspect.is_over for suspect in self._suspects.values())

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._lane.close(timeout_s)

    def _judge(self, key: str, suspect: _Suspect) -> None:
        try:
            suspect.is_over = self._is_settled(key, suspect)
        except Exception:
            logger.exception("%s can't be judged", key)
            suspect.is_over = True

    def _is_settled(self, key: str, suspect: _Suspect) -> bool:
        """Look and act; False where the store says to try later."""
        suspect.is_proven = suspect.is_proven or self._is_damaged(key)
        if not suspect.is_proven:
            return True
        [code] = ask(self._rank.store.remove, [key])
        suspect.num_tries += 1
        if code == Code.NOT_READY and suspect.num_tries < _MAX_TRIES:
            suspect.due_at = self._clock() + _RETRY_S
            return False
        if code == Code.OK:
            self._counters.add("damaged.removed")
            logger.warning("removed %s, which was damaged", key)
        elif code != Code.NOT_FOUND:
            self._counters.add("damaged.kept")
            logger.warning("%s is damaged and can't be removed: %s", key, code_name(code))
        return True

    def _is_damaged(self, key: str) -> bool:
        name = parse_key(key)
        assert isinstance(name, BlockKey)
        object_map = self._maps[name.group_bitmap, name.shard]
        nbytes = self._rank.store.object_nbytes(key)
        if nbytes >= 0 and nbytes != object_map.nbytes:
            # Not read: nobody knows how large it is.
            return True
        data = self._rank.store.get(key)
        if data is None:
            return False
        try:
            check_object(data, object_map, name.namespace.fingerprint, name.block_hash)
        except RemoteDataError as error:
            return error.reason in _DAMAGE
        # What read it first was at fault.
        self._counters.add("damaged.right_again")
        return False


class _Suspect:
    __slots__ = ("due_at", "is_over", "is_proven", "num_tries")

    def __init__(self, due_at: float) -> None:
        self.due_at = due_at
        self.num_tries = 0
        self.is_proven = False
        self.is_over = False

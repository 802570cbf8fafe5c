"""Mooncake, really broken: the engine stays up, its bytes are right, and counters say what was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from pool import (
    LAYOUT,
    NUM_FULL,
    OPTIONS,
    TOKENS,
    fill,
    foreign_objects,
    make_engine,
    make_pool,
    reference,
    until,
    until_used_again,
)
from simulated_engine import BLOCK_SIZE, Request, SimulatedEngine

from kvformat.key import BlockKey, parse_key
from kvformat.objectmap import object_maps
from kvformat.stores import open_store
from kvformat.stores.protocol import Code
from kvformat_connector.starting import open_checked_store

pytestmark = pytest.mark.mooncake
EXPECTED = reference()
OBJECT_NBYTES = object_maps(LAYOUT)[0].nbytes


def save(uri: str) -> None:
    with make_engine(uri) as engine:
        assert engine.serve(Request("c", TOKENS)).kv == EXPECTED
        assert engine.counters.snapshot()["save.blocks"] == NUM_FULL


def expect_idle(engine: SimulatedEngine) -> None:
    """No session and no staging memory is left; calls that hung may still be coming back."""
    worker = engine.worker
    assert worker.settle(40)
    rank = worker._rank
    assert rank is not None
    until(lambda: not worker.num_open_sessions, 40)
    until(lambda: not rank.load_staging.num_taken_nbytes, 40)
    until(lambda: not rank.save_staging.num_taken_nbytes, 40)
    assert engine.scheduler.num_requests == 0


def at_layer(engine: SimulatedEngine, layer_index: int, action: object) -> None:
    """Do something once, before a layer is computed."""
    pending = [action]

    def hook(index: int) -> None:
        if index == layer_index and pending:
            pending.pop()()  # type: ignore[operator]

    engine.before_layer = hook


def test_storage_that_is_frozen_costs_one_deadline_and_is_used_again() -> None:
    """SIGSTOP between two layers of a load, then SIGCONT. The next request, while it's frozen, is
    served without the pool at once."""
    with make_pool() as pool:
        save(pool.uri)
        with make_engine(pool.uri) as engine:
            at_layer(engine, 2, lambda: pool.send("client", signal.SIGSTOP))
            served = engine.serve(Request("w", TOKENS))
            assert (served.num_hit_tokens, served.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
            counts = engine.counters.snapshot()
            assert counts["rejected.deadline"] == NUM_FULL
            assert counts["breaker.opened"] == 1
            during = engine.serve(Request("x", TOKENS))
            assert (during.num_hit_tokens, during.kv) == (0, EXPECTED)
            pool.send("client", signal.SIGCONT)
            until_used_again(engine)
            after = engine.serve(Request("y", TOKENS))
            assert (after.num_hit_tokens, after.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
            assert after.failed_block_ids == set()
            expect_idle(engine)


def test_storage_that_is_killed_is_left_alone_until_another_comes() -> None:
    """kill -9 between two layers of a load; a fresh storage client later fills again."""
    with make_pool() as pool:
        save(pool.uri)
        with make_engine(pool.uri) as engine:
            at_layer(engine, 2, lambda: pool.kill("client"))
            assert engine.serve(Request("w", TOKENS)).kv == EXPECTED
            assert engine.serve(Request("x", TOKENS)).kv == EXPECTED
            assert engine.counters.snapshot()["breaker.opened"] >= 1
            pool.start("client")
            until_used_again(engine)
            until(lambda: engine.serve(Request("y", TOKENS)).num_hit_tokens, 60)
            again = engine.serve(Request("z", TOKENS))
            assert (again.num_hit_tokens, again.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
            expect_idle(engine)


def test_storage_that_is_frozen_while_saving_holds_no_request_up() -> None:
    """SIGSTOP between two layers of a save: the step ends, later saves are left out, and after
    SIGCONT the store fills."""
    with make_pool() as pool, make_engine(pool.uri) as engine:
        at_layer(engine, 2, lambda: pool.send("client", signal.SIGSTOP))
        engine.worker.settle, settle = (lambda timeout_s: True), engine.worker.settle  # type: ignore[method-assign]
        started = time.monotonic()
        assert engine.serve(Request("c", TOKENS)).kv == EXPECTED
        assert time.monotonic() - started < 20
        until(lambda: engine.step([]) == set() and engine.worker._breaker.is_open, 20)
        assert engine.serve(Request("d", TOKENS)).kv == EXPECTED
        assert engine.counters.snapshot()["save.breaker_open"] == NUM_FULL
        pool.send("client", signal.SIGCONT)
        engine.worker.settle = settle  # type: ignore[method-assign]
        until_used_again(engine)
        expect_idle(engine)
        engine.serve(Request("e", TOKENS))
        assert engine.counters.snapshot()["save.blocks"] == NUM_FULL
        after = engine.serve(Request("f", TOKENS))
        assert (after.num_hit_tokens, after.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)


def test_storage_that_is_killed_while_saving_holds_no_request_up() -> None:
    """kill -9 between two layers of a save: nothing of it appears, and with fresh storage the next
    request saves."""
    with make_pool() as pool, make_engine(pool.uri) as engine:
        at_layer(engine, 2, lambda: pool.kill("client"))
        engine.worker.settle, settle = (lambda timeout_s: True), engine.worker.settle  # type: ignore[method-assign]
        assert engine.serve(Request("c", TOKENS)).kv == EXPECTED
        until(lambda: engine.step([]) == set() and engine.worker._breaker.is_open, 20)
        assert engine.serve(Request("d", TOKENS)).kv == EXPECTED
        assert "save.blocks" not in engine.counters.snapshot()
        pool.start("client")
        # The call that hangs takes a second for each object.
        until(lambda: not engine.worker.num_left_behind, 60)
        engine.worker.settle = settle  # type: ignore[method-assign]
        until_used_again(engine)
        expect_idle(engine)

        def is_saved() -> bool:
            assert engine.serve(Request("e", TOKENS)).kv == EXPECTED
            return engine.counters.snapshot().get("save.blocks", 0) == NUM_FULL

        until(is_saved, 60)
        after = engine.serve(Request("f", TOKENS))
        assert (after.num_hit_tokens, after.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)


def test_a_master_restarted_in_the_middle_of_a_get_gives_us_nobody_elses_bytes() -> None:
    """Our sessions point to memory that holds another client's objects by now, and Mooncake reads
    them as a success. Not one of them is accepted."""
    with make_pool() as pool:
        save(pool.uri)
        with make_engine(pool.uri) as engine:

            def restart() -> None:
                pool.kill("master")
                pool.start("master")
                until(lambda: _fills(pool.uri), 40)

            at_layer(engine, 2, restart)
            assert engine.serve(Request("w", TOKENS)).kv == EXPECTED
            assert sum(
                count
                for name, count in engine.counters.snapshot().items()
                if name.startswith("rejected.")
            ) == NUM_FULL  # fmt: skip
            until_used_again(engine)
            until(lambda: engine.serve(Request("x", TOKENS)).num_hit_tokens, 60)
            assert engine.serve(Request("y", TOKENS)).kv == EXPECTED
            expect_idle(engine)


def _fills(uri: str) -> bool:
    store, objects = fill(uri)
    is_there = store.exists(list(objects)) == [1] * len(objects)
    store.close()
    return is_there


def test_a_master_restarted_in_the_middle_of_a_put_overwrites_nobody() -> None:
    """The sessions are gone with the old master, and Mooncake would write on into memory that holds
    another client's objects by now. Not a byte of them changes, no object of ours appears, and the
    next request saves."""
    with make_pool() as pool, make_engine(pool.uri) as engine:
        foreign: dict[str, bytes] = {}

        def restart() -> None:
            # What is queued was allowed when it was queued.
            until(lambda: engine.worker._save_channels.current.is_idle, 20)
            assert engine.worker.num_open_sessions == NUM_FULL
            pool.kill("master")
            pool.start("master")
            until(lambda: _fills(pool.uri), 40)
            foreign.update(foreign_objects())

        at_layer(engine, 3, restart)
        assert engine.serve(Request("c", TOKENS)).kv == EXPECTED
        counts = engine.counters.snapshot()
        assert "save.blocks" not in counts
        # Its first question after a restart may go unanswered.
        assert counts.get("save.invalid", 0) + counts.get("save.unavailable", 0) == NUM_FULL
        store = open_store(pool.uri)
        assert [key for key, data in foreign.items() if store.get(key) != data] == []
        assert len(foreign) == 3 * NUM_FULL
        store.close()
        with make_engine(pool.uri) as other:
            assert other.scheduler.match(Request("w", TOKENS), 0) == 0
        until_used_again(engine)

        def is_saved() -> bool:
            assert engine.serve(Request("d", TOKENS)).kv == EXPECTED
            return engine.counters.snapshot().get("save.blocks") == NUM_FULL

        until(is_saved, 60)
        again = engine.serve(Request("e", TOKENS))
        assert (again.num_hit_tokens, again.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
        expect_idle(engine)


def test_a_lease_shorter_than_a_layer_is_renewed() -> None:
    """Case 25: leases of 200 ms, layers of 300 ms; everything loads."""
    with make_pool(lease_ttl_ms=200) as pool:
        save(pool.uri)
        with make_engine(pool.uri) as engine:
            engine.before_layer = lambda index: time.sleep(0.3)
            served = engine.serve(Request("w", TOKENS))
            assert (served.num_hit_tokens, served.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
            assert served.failed_block_ids == set()
            assert engine.counters.snapshot()["load.reopened"] > 0
            expect_idle(engine)


def test_a_writer_killed_between_two_layers_leaves_no_object(tmp_path: Path) -> None:
    """Case 19 for real: kill -9 with sessions open. Another engine hits nothing, computes the same,
    and isn't disturbed by the keys that the dead one holds."""
    program = tmp_path / "writer.py"
    program.write_text(
        "import os, signal, sys, time\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from pool import NUM_FULL, TOKENS, make_engine\n"
        "from simulated_engine import Request\n"
        "def die_at_layer_3(index):\n"
        "    while index == 3:\n"
        "        if engine.worker.num_open_sessions == NUM_FULL:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        time.sleep(0.01)\n"
        "with make_engine(sys.argv[1]) as engine:\n"
        "    engine.before_layer = die_at_layer_3\n"
        "    engine.serve(Request('c', TOKENS))\n"
    )
    with make_pool() as pool:
        writer = subprocess.run(
            [sys.executable, str(program), pool.uri], capture_output=True, timeout=60
        )
        assert writer.returncode == -signal.SIGKILL
        with make_engine(pool.uri) as engine:
            served = engine.serve(Request("w", TOKENS))
            assert (served.num_hit_tokens, served.kv) == (0, EXPECTED)
            assert engine.counters.snapshot()["save.exists"] == NUM_FULL
            expect_idle(engine)


def test_a_put_session_older_than_its_limit_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes so long that the master gives the keys to another writer, who commits. Nothing
    more is written to the old sessions: the other's objects are right, and stay."""
    import kvformat_connector.sessions as sessions

    monkeypatch.setattr(sessions, "MAX_PUT_SESSION_S", 2.0)
    timeouts = ("-put_start_discard_timeout_sec=3", "-put_start_release_timeout_sec=6")
    with make_pool(master_options=timeouts) as pool, make_engine(pool.uri) as engine:

        def be_slow() -> None:
            time.sleep(3.5)
            save(pool.uri)

        at_layer(engine, 3, be_slow)
        assert engine.serve(Request("c", TOKENS)).kv == EXPECTED
        counts = engine.counters.snapshot()
        assert counts["save.too_old"] == NUM_FULL
        assert "save.blocks" not in counts
        expect_idle(engine)
        with make_engine(pool.uri) as warm:
            served = warm.serve(Request("w", TOKENS))
            assert (served.num_hit_tokens, served.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
            assert warm.counters.rejections == []


def test_a_store_that_is_full_saves_what_it_can() -> None:
    """Objects without room are counted and given up; nothing else changes."""
    with make_pool(segment_nbytes=16 << 20) as pool, make_engine(pool.uri) as engine:
        store, _ = fill(pool.uri, {f"foreign/{index}": bytes(1 << 20) for index in range(40)})
        for number in range(8):
            tokens = [(number + token) % 250 for token in TOKENS]
            alone = SimulatedEngine(open_store("memory://"), LAYOUT)
            expected = alone.serve(Request("r", tokens)).kv
            assert engine.serve(Request(f"c{number}", tokens)).kv == expected
        counts = engine.counters.snapshot()
        assert counts["save.no_space"] > 0
        assert counts["save.no_space"] + counts.get("save.blocks", 0) == 8 * NUM_FULL
        expect_idle(engine)
        store.close()


def test_a_pool_without_room_starts_an_engine_and_is_read() -> None:
    """All of the pool is leased, so nothing can go: an engine that starts now knows, hits what is
    there, and gives its saves up; when leases have ended, it saves."""
    with make_pool(segment_nbytes=16 << 20, lease_ttl_ms=6000) as pool:
        save(pool.uri)
        store = open_store(pool.uri)
        ours = list(store.list())
        for nbytes in (1 << 20, 1 << 16, 1 << 12):
            # Looking at an object leases it, so that no put pushes it out.
            while min(store.exists(ours)) == 1:
                ours.append(f"foreign/{uuid.uuid4()}")
                if store.put(ours[-1], bytes(nbytes)) != Code.OK:
                    del ours[-1]
                    break
        fresh, had_room = open_checked_store(pool.uri, "worker")
        assert not had_room
        engine = SimulatedEngine(fresh, LAYOUT, **OPTIONS)  # type: ignore[arg-type]
        served = engine.serve(Request("w", TOKENS))
        assert (served.num_hit_tokens, served.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
        assert served.failed_block_ids == set()

        def is_saved() -> int:
            engine.serve(Request("x", [9, *TOKENS]))
            return engine.counters.snapshot().get("save.blocks", 0)

        until(is_saved, 60)
        assert engine.counters.snapshot()["save.no_space"] > 0
        expect_idle(engine)
        engine.worker.close()
        store.close()


def test_a_damaged_object_is_removed_when_its_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong bit in an object: rejected once, read again, removed when nobody has a lease on it,
    written by the next request, and hit by the one after that."""
    import kvformat_connector.damaged as damaged

    monkeypatch.setattr(damaged, "_RETRY_S", 0.5)
    with make_pool(lease_ttl_ms=1000) as pool:
        save(pool.uri)
        store = open_store(pool.uri)
        victim = sorted(key for key in store.list() if isinstance(parse_key(key), BlockKey))[7]
        data = bytearray(store.get(victim) or b"")
        data[-9] ^= 32
        until(lambda: store.remove([victim]) == [Code.OK], 20)
        assert store.put(victim, data) == Code.OK
        with make_engine(pool.uri) as engine:
            assert engine.serve(Request("w", TOKENS)).kv == EXPECTED
            suspects = engine.worker._damaged
            assert suspects is not None
            until(lambda: engine.step([]) == set() and not suspects.num_suspects, 30)
            counts = engine.counters.snapshot()
            assert (counts["rejected.checksum_mismatch"], counts["damaged.removed"]) == (1, 1)
            assert engine.serve(Request("x", TOKENS)).kv == EXPECTED
            assert engine.counters.snapshot()["save.blocks"] == 1
            again = engine.serve(Request("y", TOKENS))
            assert (again.num_hit_tokens, again.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
            assert again.failed_block_ids == set()
            expect_idle(engine)
        store.close()


def test_a_master_that_is_dead_costs_each_request_nothing() -> None:
    """Case 38: kill -9, and requests go on without the pool, none of them waiting for it; when a
    master is back, the pool fills again."""
    with make_pool() as pool:
        save(pool.uri)
        with make_engine(pool.uri) as engine:
            assert engine.serve(Request("w", TOKENS)).num_hit_tokens == NUM_FULL * BLOCK_SIZE
            pool.kill("master")
            engine.worker.settle, settle = (lambda timeout_s: True), engine.worker.settle  # type: ignore[method-assign]
            started = time.monotonic()
            for number in range(20):
                tokens = [(number + token) % 250 for token in TOKENS]
                assert engine.serve(Request(f"x{number}", tokens)).num_hit_tokens == 0
            # Each question to a dead master takes 4.3 s. Twenty requests ask two or three.
            assert time.monotonic() - started < 30
            engine.worker.settle = settle  # type: ignore[method-assign]
            counts = engine.counters.snapshot()
            assert counts["lookup.calls"] <= 4
            pool.start("master")
            until_used_again(engine)

            def is_saved() -> int:
                assert engine.serve(Request("y", TOKENS)).kv == EXPECTED
                return engine.scheduler.match(Request("z", TOKENS), 0)

            until(is_saved, 60)
            expect_idle(engine)


def test_a_master_that_is_frozen_costs_two_timeouts_and_is_used_again() -> None:
    """SIGSTOP: a question goes unanswered for 3 s. One is asked by the scheduler, one or so by the
    worker, and then none until the master goes on."""
    with make_pool() as pool:
        save(pool.uri)
        with make_engine(pool.uri) as engine:
            engine.worker.settle, settle = (lambda timeout_s: True), engine.worker.settle  # type: ignore[method-assign]
            pool.send("master", signal.SIGSTOP)
            served = [engine.serve(Request(f"x{number}", TOKENS)) for number in range(10)]
            assert [each.num_hit_tokens for each in served] == [0] * 10
            assert all(each.kv == EXPECTED for each in served)
            counts = engine.counters.snapshot()
            assert counts["lookup.failed"] > 0
            assert counts["lookup.calls"] <= 3
            pool.send("master", signal.SIGCONT)
            engine.worker.settle = settle  # type: ignore[method-assign]
            until_used_again(engine)
            until(lambda: engine.serve(Request("y", TOKENS)).num_hit_tokens, 60)
            after = engine.serve(Request("z", TOKENS))
            assert (after.num_hit_tokens, after.kv) == (NUM_FULL * BLOCK_SIZE, EXPECTED)
            expect_idle(engine)

"""What tests of the simulated engine begin with."""

from __future__ import annotations

import pytest
from faulty_store import FaultyStore
from simulated_engine import TOKENS, Request, SimulatedEngine


@pytest.fixture
def store() -> FaultyStore:
    """An empty store."""
    return FaultyStore()


@pytest.fixture
def filled() -> FaultyStore:
    """A store that holds the full blocks of TOKENS."""
    store = FaultyStore()
    SimulatedEngine(store).serve(Request("c", TOKENS))
    return store


@pytest.fixture
def expected() -> list[list[bytes]]:
    """KV of TOKENS, computed by an engine with a store of its own."""
    return SimulatedEngine(FaultyStore()).serve(Request("reference", TOKENS)).kv

"""Fixtures for every kind of test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvformat_connector.store.mooncake_services import MooncakeServices, mooncake_services


@pytest.fixture(scope="session")
def mooncake() -> Iterator[MooncakeServices]:
    """A real Mooncake master and client on loopback, shared by all tests of the run.

    Leases are short, because a test that removes an object waits for its lease.
    """
    with mooncake_services(lease_ttl_ms=2000) as services:
        yield services

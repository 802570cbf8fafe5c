"""Fixtures for every kind of test, and how long hypothesis searches.

``HYPOTHESIS_PROFILE=thorough`` runs twenty times as many examples. No example has a deadline: how
fast a shared machine is proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from kvformat_connector.store.mooncake_services import MooncakeServices, mooncake_services

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("bounded", max_examples=100, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "bounded"))


@pytest.fixture(scope="session")
def mooncake() -> Iterator[MooncakeServices]:
    """A real Mooncake master and client on loopback, shared by all tests of the run.

    Leases are short, because a test that removes an object waits for its lease.
    """
    with mooncake_services(lease_ttl_ms=2000) as services:
        yield services

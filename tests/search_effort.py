"""How long hypothesis searches: bounded in a run of all tests, longer when asked.

``HYPOTHESIS_PROFILE=thorough`` runs twenty times as many examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("bounded", max_examples=100, deadline=None, suppress_health_check=SLOW)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "bounded"))

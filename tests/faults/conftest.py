"""The engine of tests/connector, over a real Mooncake that can be hurt."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "connector"))

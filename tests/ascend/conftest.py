"""The contract tests run in an environment of their own; test_under_ascend.py starts it."""

from __future__ import annotations

import os

collect_ignore = [] if "KVFORMAT_VLLM_ASCEND" in os.environ else ["contract"]

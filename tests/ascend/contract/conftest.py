"""vLLM 0.30 with vllm-ascend's own modules, and an NPU that isn't there."""

from __future__ import annotations

import os
import sys

import stand_ins

os.environ.update(
    # The plugin's patches of vLLM need a CANN toolkit; the hooks don't need the plugin.
    VLLM_PLUGINS="",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
sys.path.append(str(stand_ins.SOURCES))
stand_ins.install()

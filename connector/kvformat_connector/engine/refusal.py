"""The one way in which this package says no."""

from __future__ import annotations

from typing import NoReturn

from kvformat.errors import ConfigError, Reason


def refuse(name: str, value: object, why: str) -> NoReturn:
    """Stop the start. Raises ``ConfigError`` with reason ``config_unsupported``."""
    raise ConfigError(Reason.CONFIG_UNSUPPORTED, f"{name} is {value}: {why}")

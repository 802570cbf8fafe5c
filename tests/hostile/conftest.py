"""Loads the profile for hypothesis."""

import search_effort  # noqa: F401

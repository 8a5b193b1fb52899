"""How Hypothesis runs here: without its deadline, which on a loaded machine tells nothing of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("atoll", deadline=None)
settings.load_profile("atoll")

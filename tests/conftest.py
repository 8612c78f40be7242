"""Property tests draw the same examples in every run, and are not judged by the clock of a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

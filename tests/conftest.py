"""Property tests draw the same examples in every run, and are not judged by the clock of a busy machine. One Docker
engine serves all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import dockerd

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def engine() -> Iterator[dockerd.Engine]:
    with dockerd.engine() as running:
        yield running

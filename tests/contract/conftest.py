"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.sandboxes import Daemon, require


@pytest.fixture(scope="module", params=["process", "namespace"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests that do not harm it: command lane of two, verify of one."""
    require(request.param)
    caps = {"lanes": {"command": 2, "verify": 1, "package": 2, "reset": 2}}
    with Daemon(tmp_path_factory.mktemp("daemon"), request.param, sandbox=caps) as running:
        yield running


@pytest.fixture(params=["process", "namespace"])
def daemon_backend(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)

"""Fixtures of the contract suites."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.contract.sandboxes import Daemon, require

BACKENDS = ["process", "namespace", pytest.param("docker", marks=pytest.mark.docker)]


def _works(request: pytest.FixtureRequest) -> str:
    if request.param == "docker":
        os.environ["DOCKER_HOST"] = request.getfixturevalue("engine").url  # for the daemons that are started
    else:
        require(request.param)
    return str(request.param)


@pytest.fixture(scope="module", params=BACKENDS)
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests that do not harm it: command lane of two, verify of one."""
    backend = _works(request)
    caps = {"lanes": {"command": 2, "verify": 1, "package": 2, "reset": 2}}
    with Daemon(tmp_path_factory.mktemp("daemon"), backend, sandbox=caps) as running:
        yield running


@pytest.fixture(params=BACKENDS)
def daemon_backend(request: pytest.FixtureRequest) -> str:
    return _works(request)

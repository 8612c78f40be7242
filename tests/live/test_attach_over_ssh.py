"""A run on one machine, its trainer on another: nothing between them but SSH."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.hosts.local import free_port
from tests.cli import RECIPE, left_behind, ran
from tests.hosts import Network
from tests.live.test_examples import eventually
from tests.unit.test_tui import words

pytestmark = pytest.mark.live

SMALL = ("batch.groups=1", "batch.siblings=2", "window.groups=2", "engines.slots=8", "engines.count=1")
SETTINGS = [part for key in (*SMALL, "train.embedded=false") for part in ("--set", key)]


@contextlib.contextmanager
def ssh(network: Network, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """OpenSSH's own client as that network's user, ended at the end."""
    user = ["-F", network.ssh / "config", "-i", network.ssh / "id_ed25519"]
    user += ["-o", f"UserKnownHostsFile={network.ssh / 'known_hosts'}", "-o", "ExitOnForwardFailure=yes"]
    with subprocess.Popen(
        ["ssh", *user, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.mark.slow
def test_the_trainer_here_the_run_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a tunnel of OpenSSH's the run answers; HOST:FOLDER needs none."""
    with Network() as network:
        there = network.add("h1")
        monkeypatch.setenv("HOME", network.env["HOME"])
        run = [sys.executable, "-m", "agentrl.cli.main", "run", str(RECIPE), "--run-dir", "run", "--steps", "2"]
        with ssh(network, "h1", shlex.join([*run, "--json", *SETTINGS])) as running:
            url = eventually(lambda: (there.home / "run" / "url").read_text()).strip()
            with ssh(network, "h1", "cat run/token") as copying:
                (tmp_path / "token").write_text(copying.communicate(timeout=30)[0])
            port = free_port()
            with ssh(network, "-N", "-L", f"{port}:{url.removeprefix('http://')}", "h1"):
                here = f"http://127.0.0.1:{port}"
                (tmp_path / "other").write_text("another run's\n")
                no_token, wrong = (
                    ran(tmp_path, "train", RECIPE, "--attach", here, "--token-file", file, *SETTINGS)
                    for file in (RECIPE, tmp_path / "other")
                )
            nobody = ran(tmp_path, "train", RECIPE, "--attach", "h1:elsewhere", *SETTINGS)
            seen = ran(tmp_path, "top", "h1:run", "--snapshot", "top.svg")
            assert not (tmp_path / "runs").exists()
            trained = ran(tmp_path, "train", RECIPE, "--attach", "h1:run", "--json", *SETTINGS)
            out, err = running.communicate(timeout=60)
        assert (no_token.code, wrong.code) == (2, 2), wrong.err
        assert "holds no token" in no_token.err
        assert "has another token" in wrong.err
        assert (nobody.code, "h1:elsewhere: no run is live there" in nobody.err) == (3, True), nobody.err
        assert seen.code == 0, seen.err
        assert "h1:run" in words((tmp_path / "top.svg").read_text())
        assert trained.code == 0, trained.err
        assert running.returncode == 0, err
        assert [step["version"] for step in trained.document["steps"]] == [1, 2]
        summary = json.loads(out)
        assert (summary["outcome"], summary["engines"], summary["ledger_balanced"]) == ("done", {"e0": 2}, True)
        ours, theirs = tmp_path / trained.document["run"] / "weights", there.home / "run" / "weights"
        files = [folder / "v000002" / "model.safetensors" for folder in (ours, theirs)]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert left_behind(tmp_path) == []

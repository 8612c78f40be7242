"""The sandbox daemon as a process: killed, stopped, beside another, at its door, and how it is started."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import pytest

from agentrl.errors import (
    DeadlineError,
    InfraError,
    SandboxLost,
    UnavailableError,
    UserError,
)
from agentrl.hosts.local import LocalHost, free_port
from agentrl.recipe.schema import Sandbox as Section
from agentrl.records import Lane
from agentrl.sandbox import launch
from agentrl.sandbox.client import DaemonUnreachable, RemoteSandbox, SandboxClient
from agentrl.sandbox.daemon import load_config
from tests.contract.sandboxes import PATIENCE_S, Daemon, box, gone, marked, require, rid, sh, task, until

pytestmark = pytest.mark.live


# --- the daemon as a process ------------------------------------------------------------------------------------------


def test_a_killed_daemon_means_lost_sandboxes_and_its_successor_reaps(tmp_path: Path, daemon_backend: str) -> None:
    daemon = Daemon(tmp_path, daemon_backend)
    command, marker = marked()
    with daemon:

        async def lose(client: SandboxClient) -> None:
            opened = await client.open(task(), label="a", lease_s=60, request_id=rid())
            call = asyncio.create_task(opened.exec(command, timeout_s=3_600, request_id=rid()))
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == 1)
            assert daemon.process
            daemon.process.kill()
            with pytest.raises(SandboxLost):
                await call
            with pytest.raises(SandboxLost):
                await sh(opened, "true")
            with pytest.raises(DaemonUnreachable):
                await client.status(deadline_s=PATIENCE_S)
            await opened.close()
            tmp_path.joinpath("old").write_text(opened.id)

        daemon.run(lose)
    with daemon:  # on the same folder, over the dead one's socket

        async def go_on(client: SandboxClient) -> None:
            await gone(marker)
            async with box(client) as opened:
                assert await sh(opened, "echo new") == "new\n"
            with pytest.raises(SandboxLost):
                await sh(RemoteSandbox(client, tmp_path.joinpath("old").read_text()), "true")
            assert await client.gc() == 0

        daemon.run(go_on)


def test_a_lost_launcher_loses_its_boxes_and_not_the_daemon(tmp_path: Path) -> None:
    require("namespace")
    with Daemon(tmp_path, "namespace") as daemon:
        command, marker = marked()

        async def scenario(client: SandboxClient) -> None:
            opened = await client.open(task(), label="a", lease_s=60, request_id=rid())
            call = asyncio.create_task(opened.exec(command, timeout_s=3_600, request_id=rid()))
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == 1)
            assert daemon.process
            for child in psutil.Process(daemon.process.pid).children():
                child.kill()
            with pytest.raises(SandboxLost):
                await call
            await gone(marker)
            await until(client, lambda _, live: live == 0)
            with pytest.raises(SandboxLost):
                await sh(opened, "true")
            async with box(client) as fresh:
                assert await sh(fresh, "echo again") == "again\n"

        daemon.run(scenario)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "lifeline"])
def test_told_to_stop_it_closes_everything(tmp_path: Path, how: str) -> None:
    daemon = Daemon(tmp_path, "process")
    command, marker = marked()
    with daemon:

        async def scenario(client: SandboxClient) -> None:
            opened = await client.open(task(), label="a", lease_s=60, request_id=rid())
            call = asyncio.create_task(opened.exec(command, timeout_s=3_600, request_id=rid()))
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == 1)
            assert daemon.process
            assert daemon.process.stdin
            if how == "lifeline":
                daemon.process.stdin.close()
            else:
                daemon.process.send_signal(getattr(signal, how))
            with pytest.raises(InfraError):
                await call
            assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 0
            await gone(marker)

        daemon.run(scenario)
    assert not (tmp_path / "d.sock").exists()


def test_two_runs_do_not_touch_each_other(tmp_path: Path, daemon_backend: str) -> None:
    with Daemon(tmp_path / "a", daemon_backend, label="run-a") as one:

        async def scenario(client: SandboxClient) -> None:
            async with box(client) as opened:
                await sh(opened, "echo mine > file")

                def other() -> None:
                    with Daemon(tmp_path / "b", daemon_backend, label="run-b") as two:  # reaps at its start

                        async def collect(theirs: SandboxClient) -> None:
                            assert await theirs.gc() == 0
                            assert await theirs.gc("run-a") == 0
                            with pytest.raises(SandboxLost):
                                await sh(RemoteSandbox(theirs, opened.id), "true")

                        two.run(collect)

                await asyncio.to_thread(other)
                assert await sh(opened, "cat file") == "mine\n"

        one.run(scenario)


# --- the door ---------------------------------------------------------------------------------------------------------


def test_the_token_is_asked_for_at_every_door_but_health(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with daemon.client("wrong") as client:
            assert await client.health(deadline_s=PATIENCE_S)
            for call in (
                client.status(deadline_s=PATIENCE_S),
                client.open(task(), label="a", lease_s=1, request_id=rid()),
                client.gc(),
            ):
                with pytest.raises(UnavailableError, match="refused the token"):
                    await call
        path = daemon.config["socket"]
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
            for headers in ({}, {"Authorization": "Bearer é"}):
                async with session.get("http://x/status", headers=headers) as response:
                    assert response.status == 401

    asyncio.run(scenario())
    assert Path(daemon.config["socket"]).stat().st_mode & 0o777 == 0o600
    assert (daemon.folder / "token").stat().st_mode & 0o777 == 0o600


def test_nonsense_is_refused_with_a_reason(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        for path, body in (("/boxes", b"junk"), ("/boxes", b"\x80"), ("/nowhere", b""), ("/boxes/x/dance", b"")):
            with pytest.raises(UserError, match=path):
                client._check(*await client._send("POST", path, body, PATIENCE_S))
        with pytest.raises(SandboxLost, match="not here"):
            await sh(RemoteSandbox(client, "0" * 16), "true")

    daemon.run(scenario)


def test_loopback_tcp_serves_too_and_a_taken_port_is_named(tmp_path: Path) -> None:
    port = free_port()
    with Daemon(tmp_path / "a", "process", port=port) as daemon:

        async def scenario(client: SandboxClient) -> None:
            async with box(client) as opened:
                assert await sh(opened, "echo hi") == "hi\n"

        daemon.run(scenario)
        second = Daemon(tmp_path / "b", "process", port=port)
        process = second.spawn()
        assert process.wait(PATIENCE_S) == 3
        assert process.stdin
        process.stdin.close()
        assert f"cannot listen on 127.0.0.1:{port}" in second.log.read_text()


def test_a_taken_socket_is_named_and_left_alone(daemon: Daemon) -> None:
    process = daemon.spawn()
    assert process.wait(PATIENCE_S) == 3
    assert process.stdin
    process.stdin.close()
    assert "already serves at" in daemon.log.read_text()

    async def scenario(client: SandboxClient) -> None:
        assert await client.health(deadline_s=PATIENCE_S)

    daemon.run(scenario)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"socket": "", "port": 0}, "either socket or port"),
        ({"socket": "/x" * 80}, "too long"),
        ({"socket": "", "port": 80, "host": "0.0.0.0"}, "not loopback"),
        ({"sandbox": {"backend": "vm"}}, "vm"),
        ({"sandbox": {"max_lives": 3}}, "max_lives"),
        ({"tokn_file": "x"}, "tokn_file"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = {"label": "a", "token_file": "t", "state_dir": "s", "socket": "d.sock", **changes}
    (tmp_path / "c.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_config(tmp_path / "c.json")


# --- starting it --------------------------------------------------------------------------------------------------


def test_launch_attach_and_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        running = await launch.start_daemon(
            LocalHost(), Section(backend="process", max_live=7), run_dir=str(tmp_path), label="run"
        )
        try:
            assert running.capacity == 7
            opened = await running.host.open(task(), label="a", lease_s=60, request_id=rid())
            attached = await launch.attach(LocalHost(), run_dir=str(tmp_path))
            assert (await attached.status(deadline_s=PATIENCE_S)).live == 1
            await attached.aclose()
            with pytest.raises(UnavailableError, match="already serves"):
                await launch.start_daemon(LocalHost(), Section(backend="process"), run_dir=str(tmp_path), label="run")
            assert await sh(opened, "echo hi") == "hi\n"
        finally:
            await running.stop()
        assert "exit code 0" in await running.wait_ended()
        with pytest.raises(SandboxLost):
            await sh(opened, "true")
        assert await launch.gc(Section(backend="process"), run_dir=str(tmp_path)) == 0

    asyncio.run(scenario())


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        section = Section(backend="process", serving_cpus="60000")
        with pytest.raises(UnavailableError, match="serving CPUs 60000 are not among"):
            await launch.start_daemon(LocalHost(), section, run_dir=str(tmp_path), label="run")
        with pytest.raises(UnavailableError, match="no such program"):
            await launch.start_daemon(
                LocalHost(python="/no/such/python"), Section(), run_dir=str(tmp_path), label="run"
            )

    asyncio.run(scenario())


def test_a_long_run_folder_still_gets_a_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)

    async def scenario() -> None:
        running = await launch.start_daemon(LocalHost(), Section(backend="process"), run_dir=str(long), label="run")
        try:
            assert await running.host.health(deadline_s=PATIENCE_S)
        finally:
            await running.stop()

    asyncio.run(scenario())


def test_a_silent_daemon_is_a_missed_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            client = SandboxClient(f"unix:{tmp_path / 's'}", "x")
            with pytest.raises(DeadlineError, match="gave no answer"):
                await client.status(deadline_s=0.05)
            await client.aclose()

    asyncio.run(scenario())

"""What `ports.SandboxHost` and `ports.Sandbox` promise, asked of a real daemon process over its socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import pytest

from agentrl.errors import (
    DeadlineError,
    InfraError,
    SandboxLost,
    TaskError,
    UnavailableError,
    UserError,
)
from agentrl.hosts.local import LocalHost, free_port
from agentrl.recipe.schema import Sandbox as Section
from agentrl.records import File, Lane, LaneStatus, Task, TaskId
from agentrl.sandbox import launch
from agentrl.sandbox.client import DaemonUnreachable, RemoteSandbox, SandboxClient
from agentrl.sandbox.cpusets import parse_cpus
from agentrl.sandbox.daemon import load_config
from agentrl.tasks.verifier import HarborVerifier

pytestmark = pytest.mark.live

PATIENCE_S = 30.0


class Daemon:
    """A daemon process of its own, on a fresh folder unless one is given. A context manager: SIGTERM at the end."""

    def __init__(self, folder: Path, backend: str, *, label: str = "test", **config: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        sandbox = {"backend": backend, **config.pop("sandbox", {})}
        where = {} if "port" in config else {"socket": str(folder / "d.sock")}
        self.config = {
            "label": label,
            "token_file": str(folder / "token"),
            "state_dir": str(folder / "state"),
            "sandbox": sandbox,
            "queue_timeout_s": PATIENCE_S,
            **where,
            **config,
        }
        (folder / "config.json").write_text(json.dumps(self.config))
        self.endpoint = (
            f"unix:{self.config['socket']}" if "socket" in self.config else f"http://127.0.0.1:{config['port']}"
        )
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "agentrl.sandbox.daemon", "--config-file", str(self.folder / "config.json")]
        with self.log.open("ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def __enter__(self) -> Daemon:
        self.process = self.spawn()
        asyncio.run(self._wait_ready(self.process))
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process
        assert self.process.stdin
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self.process.stdin.close()

    async def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        client = SandboxClient(self.endpoint, "")
        async with asyncio.timeout(PATIENCE_S):
            while not await client.health(deadline_s=PATIENCE_S):
                if process.poll() is not None:
                    pytest.fail(f"the daemon ended with {process.returncode}: {self.log.read_text()}")
                await asyncio.sleep(0.01)
        await client.aclose()

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text()

    @contextlib.asynccontextmanager
    async def client(self, token: str | None = None) -> AsyncIterator[SandboxClient]:
        client = SandboxClient(self.endpoint, self.token if token is None else token, queue_timeout_s=PATIENCE_S)
        try:
            yield client
        finally:
            await client.aclose()

    def run(self, scenario: Callable[[SandboxClient], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(2 * PATIENCE_S), self.client() as client:
                await scenario(client)

        asyncio.run(main())


@pytest.fixture(scope="module", params=["process", "namespace"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests that do not harm it: command lane of two, verify of one."""
    require(request.param)
    caps = {"lanes": {"command": 2, "verify": 1, "package": 2, "reset": 2}}
    with Daemon(tmp_path_factory.mktemp("daemon"), request.param, sandbox=caps) as running:
        yield running


@pytest.fixture(params=["process", "namespace"])
def backend(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return str(request.param)


def require(backend: str) -> None:
    if backend == "namespace":
        from agentrl.sandbox.backends.namespace import NamespaceBackend

        async def probe() -> None:
            made = NamespaceBackend(root="/", state_dir=os.environ.get("TMPDIR", "/tmp") + f"/probe-{os.getpid()}")
            try:
                await made.probe()
            finally:
                await made.aclose()

        try:
            asyncio.run(probe())
        except UnavailableError as error:
            pytest.skip(f"no namespace sandboxes here: {error}")


def task(**changes: Any) -> Task:
    fields: dict[str, Any] = {"id": TaskId("t"), "kind": "k", "instruction": "", "root": "/nowhere", "trusted": True}
    return Task(**{**fields, **changes})


def rid() -> str:
    return uuid.uuid4().hex


@contextlib.asynccontextmanager
async def box(client: SandboxClient, lease_s: float = 60.0, **changes: Any) -> AsyncIterator[RemoteSandbox]:
    opened = await client.open(task(**changes), label="a", lease_s=lease_s, request_id=rid())
    try:
        yield opened
    finally:
        await opened.close()


async def sh(opened: RemoteSandbox, command: str, *, lane: Lane | None = None, timeout_s: float = 20.0) -> str:
    result = await opened.exec(command, timeout_s=timeout_s, request_id=rid(), lane=lane)
    assert result.exit_code == 0, result
    return result.output


async def until(client: SandboxClient, wanted: Callable[[dict[Lane, LaneStatus], int], bool]) -> None:
    """Asks the daemon for its status until it is as wanted. A status call is a round trip, so this does not spin."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await client.status(deadline_s=PATIENCE_S)
            if wanted({s.lane: s for s in status.lanes}, status.live):
                return


async def gone(marker: str) -> None:
    """Waits until no process has `marker` in its command line."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while await asyncio.to_thread(alive, marker):
        assert asyncio.get_running_loop().time() < deadline, f"{marker} still runs"


def alive(marker: str) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and marker in " ".join(process.cmdline()):
                return True
    return False


def marked() -> tuple[str, str]:
    """A command that runs for an hour, also in the background and in another session, and how to find it."""
    marker = f"36{uuid.uuid4().int % 10**12:012d}"
    return f"setsid sleep {marker} & sleep {marker}", marker


# --- one sandbox ----------------------------------------------------------------------------------------------------


def test_a_task_is_opened_with_its_files_and_set_up_and_used(daemon: Daemon, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    (folder / "sub").mkdir(parents=True)
    (folder / "run").write_bytes(b"#!/bin/sh\necho ran\n")
    (folder / "run").chmod(0o755)
    (folder / "sub" / "raw").write_bytes(bytes(range(256)))

    async def scenario(client: SandboxClient) -> None:
        files = (("environment", "/work/in"), ("environment/run", "/work/run"))
        async with box(client, root=str(tmp_path), files=files, setup=("./run > made", "cat made >> made2")) as opened:
            assert await sh(opened, "./run; cat made made2; ls in") == "ran\nran\nran\nrun\nsub\n"
            assert await opened.get("/work/in/sub/raw") == bytes(range(256))
            result = await opened.exec("echo out; echo err >&2; exit 3", timeout_s=20, request_id=rid())
            assert (result.exit_code, sorted(result.output.split())) == (3, ["err", "out"])
            assert result.lane is Lane.COMMAND
            assert result.run_s > 0

    daemon.run(scenario)


def test_files_go_in_and_come_out_as_they_are(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        async with box(client) as opened:
            await opened.put({"/work/d/raw": File(data=b"\x00\xff" * 5_000, mode=0o640)}, request_id=rid())
            assert await opened.get("/work/d/raw") == b"\x00\xff" * 5_000
            assert await opened.get("/work/d/raw", limit=3) == b"\x00\xff\x00"
            assert (await sh(opened, "stat -c %a d/raw")).strip() == "640"
            for missing in ("/work/none", "/work/d", "/work/d/raw/below"):
                with pytest.raises(FileNotFoundError):
                    await opened.get(missing)

    daemon.run(scenario)


def test_environments_are_layered_width_task_command(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        status = {s.lane: s for s in (await client.status(deadline_s=PATIENCE_S)).lanes}
        async with box(client, env={"A": "task", "B": "task", "OMP_NUM_THREADS": "77"}) as opened:
            result = await opened.exec(
                'echo "$A $B $OMP_NUM_THREADS $CARGO_BUILD_JOBS $MAKEFLAGS"',
                timeout_s=20,
                request_id=rid(),
                env={"B": "command"},
            )
            width = len(status[Lane.COMMAND].cpus)
            assert result.output.split() == ["task", "command", "77", str(width), f"-j{width}"]

    daemon.run(scenario)


def test_a_timeout_is_data_and_takes_the_whole_tree(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        command, marker = marked()
        async with box(client) as opened:
            result = await opened.exec(command, timeout_s=0.3, request_id=rid())
            assert (result.exit_code, result.timed_out) == (None, True)
            await gone(marker)
            assert await sh(opened, "echo still here") == "still here\n"

    daemon.run(scenario)


def test_sweep_leaves_no_process_and_the_files(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        _, marker = marked()
        async with box(client) as opened:
            await sh(opened, f"echo x > kept; setsid sleep {marker} >/dev/null 2>&1 & echo started")
            assert await opened.sweep() >= 1
            await gone(marker)
            assert await sh(opened, "cat kept") == "x\n"

    daemon.run(scenario)


def test_a_cancelled_call_kills_its_command(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        command, marker = marked()
        request_id = rid()
        async with box(client) as opened:
            call = asyncio.create_task(opened.exec(command, timeout_s=3_600, request_id=request_id))
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == 1)
            call.cancel()
            await gone(marker)
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == 0)
            with pytest.raises(InfraError, match="cancelled"):  # its effects are unknown: never run a second time
                await opened.exec(command, timeout_s=3_600, request_id=request_id)

    daemon.run(scenario)


def test_a_cancelled_open_leaves_nothing(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        command, marker = marked()
        call = asyncio.create_task(
            client.open(task(setup=(command,), command_timeout_s=3_600), label="a", lease_s=60, request_id=rid())
        )
        await until(client, lambda lanes, _: lanes[Lane.RESET].running == 1)
        call.cancel()
        await until(client, lambda lanes, live: live == lanes[Lane.RESET].running == 0)
        await gone(marker)

    daemon.run(scenario)


def test_close_ends_what_runs_and_is_idempotent(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        command, marker = marked()
        opened = await client.open(task(), label="a", lease_s=60, request_id=rid())
        call = asyncio.create_task(opened.exec(command, timeout_s=3_600, request_id=rid()))
        await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == 1)
        await asyncio.gather(opened.close(), opened.close())
        with pytest.raises(InfraError):
            await call
        await gone(marker)
        with pytest.raises(SandboxLost, match="not here"):
            await sh(opened, "true")
        await opened.close()
        await until(client, lambda _, live: live == 0)

    daemon.run(scenario)


def test_a_verifier_grades_from_outside(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text(
        "#!/bin/sh\nif grep -q right answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    )

    async def scenario(client: SandboxClient) -> None:
        asked = task(root=str(tmp_path))
        for answer, reward in (("right", 1.0), ("wrong", 0.0)):
            async with box(client, root=str(tmp_path)) as opened:
                _, marker = marked()
                await sh(opened, f"echo {answer} > answer; setsid sleep {marker} >/dev/null 2>&1 & echo ok")
                assert "test.sh" not in await sh(opened, "ls /tests 2>/dev/null || true")
                verdict = await HarborVerifier().grade(asked, opened, request_id=rid())
                assert (verdict.reward, verdict.blame) == (reward, None), verdict
                await gone(marker)
        assert {s.lane: s.done for s in (await client.status(deadline_s=PATIENCE_S)).lanes}[Lane.VERIFY] >= 2

    daemon.run(scenario)


# --- idempotence ----------------------------------------------------------------------------------------------------


def test_a_repeated_id_is_done_once(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        async with box(client) as opened:
            await sh(opened, "mkfifo gate")
            command, request_id = "echo x >> count; cat gate; wc -l < count", rid()
            first = asyncio.create_task(opened.exec(command, timeout_s=20, request_id=request_id))
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == 1)
            second = asyncio.create_task(opened.exec(command, timeout_s=20, request_id=request_id))
            await sh(opened, "echo go > gate", lane=Lane.VERIFY)
            results = [await first, await second, await opened.exec(command, timeout_s=20, request_id=request_id)]
            assert results[0].output.split() == ["go", "1"]
            assert results[0] == results[1] == results[2]

    daemon.run(scenario)


def test_a_repeated_open_gives_the_same_sandbox(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        request_id = rid()
        one, two = await asyncio.gather(
            *(client.open(task(), label="a", lease_s=60, request_id=request_id) for _ in range(2))
        )
        assert one.id == two.id
        await until(client, lambda _, live: live == 1)
        await one.close()

    daemon.run(scenario)


# --- tasks that are broken ------------------------------------------------------------------------------------------


def test_a_failing_set_up_is_the_tasks_fault_and_frees_the_place(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        for setup, message in (
            (("true", "echo oh no; exit 5"), r"set-up line 2 .*exit 5.*oh no"),
            (("sleep 3600",), "timed out"),
        ):
            with pytest.raises(TaskError, match=message):
                await client.open(task(setup=setup, command_timeout_s=0.3), label="a", lease_s=60, request_id=rid())
        with pytest.raises(TaskError, match="cannot read"):
            await client.open(task(files=(("no/such", "/work/x"),)), label="a", lease_s=60, request_id=rid())
        await until(client, lambda _, live: live == 0)

    daemon.run(scenario)


# --- lanes ----------------------------------------------------------------------------------------------------------


def test_package_heavy_commands_go_to_their_lane_and_the_result_says_why(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        async with box(client) as opened:
            result = await opened.exec("false && pip install ./nowhere; true", timeout_s=60, request_id=rid())
            assert (result.lane, result.lane_reason) == (Lane.PACKAGE, "pip install")
            result = await opened.exec("true", timeout_s=20, request_id=rid(), lane=Lane.VERIFY)
            assert (result.lane, result.lane_reason) == (Lane.VERIFY, "asked for")

    daemon.run(scenario)


def test_a_lane_holds_its_cap(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        async with box(client) as opened, box(client) as other:
            await sh(opened, "mkfifo gate")
            await sh(other, "mkfifo gate")
            calls = [
                asyncio.create_task(b.exec("cat gate", timeout_s=60, request_id=rid())) for b in [opened, other] * 3
            ]
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].queued == 4)
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == 2)
            assert await sh(opened, "echo free", lane=Lane.VERIFY) == "free\n"  # the other lanes are not held up
            calls[2].cancel()  # a waiter that goes away leaves the queue
            await until(client, lambda lanes, _: lanes[Lane.COMMAND].queued == 3)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, InfraError | asyncio.CancelledError) for end in ended)
        await until(client, lambda lanes, _: lanes[Lane.COMMAND].running == lanes[Lane.COMMAND].queued == 0)

    daemon.run(scenario)


def test_a_lane_is_first_come_first_served(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        async with box(client) as opened, asyncio.TaskGroup() as group:
            await sh(opened, "mkfifo gate")
            group.create_task(sh(opened, "cat gate", lane=Lane.VERIFY))
            await until(client, lambda lanes, _: lanes[Lane.VERIFY].running == 1)
            waiting = []
            for number in range(8):
                waiting.append(group.create_task(sh(opened, f"echo {number} >> order", lane=Lane.VERIFY)))
                queued = partial(has_queued, Lane.VERIFY, number + 1)
                await until(client, queued)
            await sh(opened, "echo go > gate")
            await asyncio.wait(waiting)
            assert (await sh(opened, "cat order")).split() == [str(number) for number in range(8)]

    daemon.run(scenario)


def has_queued(lane: Lane, count: int, lanes: dict[Lane, LaneStatus], live: int) -> bool:
    return lanes[lane].queued == count


def test_lanes_cpus_are_what_a_command_sees(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        status = await client.status(deadline_s=PATIENCE_S)
        async with box(client) as opened:
            for lane in status.lanes:
                seen = await sh(opened, "grep Cpus_allowed_list /proc/self/status", lane=lane.lane)
                assert parse_cpus(seen.split(":")[1]) == lane.cpus
        groups = {lane.cpus for lane in status.lanes}
        assert len(groups) == min(5, os.cpu_count() or 1)
        for lane in status.lanes:
            assert set(lane.merged_with) == {o.lane for o in status.lanes if o.cpus == lane.cpus} - {lane.lane}

    daemon.run(scenario)


# --- leases ---------------------------------------------------------------------------------------------------------


def test_an_unused_lease_is_reaped_and_use_renews_it(daemon: Daemon) -> None:
    async def scenario(client: SandboxClient) -> None:
        _, marker = marked()
        opened = await client.open(task(), label="a", lease_s=0.3, request_id=rid())
        await sh(opened, f"setsid sleep {marker} >/dev/null 2>&1 & sleep 0.5")  # longer than the lease
        await until(client, lambda _, live: live == 0)
        await gone(marker)
        with pytest.raises(SandboxLost):
            await sh(opened, "true")
        longer = await client.open(task(), label="a", lease_s=0.3, request_id=rid())
        await longer.renew(60.0)
        await asyncio.sleep(0.5)
        await sh(longer, "true")
        await longer.close()

    daemon.run(scenario)


def test_max_live_queues_and_then_refuses(tmp_path: Path) -> None:
    with Daemon(tmp_path, "process", queue_timeout_s=1.0, sandbox={"max_live": 1}) as one_place:

        async def scenario(client: SandboxClient) -> None:
            first = await client.open(task(), label="a", lease_s=60, request_id=rid())
            with pytest.raises(UnavailableError, match="all 1 sandboxes"):
                await client.open(task(), label="a", lease_s=60, request_id=rid())
            second = asyncio.create_task(client.open(task(), label="a", lease_s=60, request_id=rid()))
            await first.close()
            await (await second).close()

        one_place.run(scenario)


def test_a_command_that_runs_long_moves_to_the_package_lane(tmp_path: Path, backend: str) -> None:
    caps = {"lanes": {"command": 1, "package": 1, "verify": 1}}
    with Daemon(tmp_path, backend, promote_after_s=0.2, sandbox=caps) as mover:

        async def scenario(client: SandboxClient) -> None:
            async with box(client) as opened:
                await sh(opened, "mkfifo gate")
                long = asyncio.create_task(opened.exec("cat gate", timeout_s=20, request_id=rid()))
                await until(client, lambda lanes, _: lanes[Lane.PACKAGE].running == 1)
                await sh(opened, "echo go > gate")  # its place in the command lane is free again
                result = await long
                assert (result.output, result.lane) == ("go\n", Lane.PACKAGE)
                assert "longer than 0.2 s" in result.lane_reason

        mover.run(scenario)


# --- the daemon as a process ------------------------------------------------------------------------------------------


def test_a_killed_daemon_means_lost_sandboxes_and_its_successor_reaps(tmp_path: Path, backend: str) -> None:
    daemon = Daemon(tmp_path, backend)
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


def test_two_runs_do_not_touch_each_other(tmp_path: Path, backend: str) -> None:
    with Daemon(tmp_path / "a", backend, label="run-a") as one:

        async def scenario(client: SandboxClient) -> None:
            async with box(client) as opened:
                await sh(opened, "echo mine > file")

                def other() -> None:
                    with Daemon(tmp_path / "b", backend, label="run-b") as two:  # reaps at its start

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
                LocalHost(), Section(), run_dir=str(tmp_path), label="run", python="/no/such/python"
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

"""What `ports.SandboxHost` and `ports.Sandbox` promise, asked of a real daemon over its socket."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from agentrl.errors import (
    InfraError,
    SandboxLost,
    TaskError,
    UnavailableError,
)
from agentrl.records import File, Lane, LaneStatus
from agentrl.sandbox.client import SandboxClient
from agentrl.sandbox.cpusets import parse_cpus
from agentrl.tasks.verifier import HarborVerifier
from tests.contract.sandboxes import PATIENCE_S, Daemon, box, gone, marked, rid, sh, task, until

pytestmark = pytest.mark.live


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


def test_a_command_that_runs_long_moves_to_the_package_lane(tmp_path: Path, daemon_backend: str) -> None:
    caps = {"lanes": {"command": 1, "package": 1, "verify": 1}}
    with Daemon(tmp_path, daemon_backend, promote_after_s=0.2, sandbox=caps) as mover:

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

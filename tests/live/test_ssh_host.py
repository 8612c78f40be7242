"""SshHost and everything that can go wrong between it and a real sshd."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import psutil
import pytest

from agentrl.errors import AgentRLError, UnavailableError, UserError
from agentrl.hosts.ssh import SshHost
from tests.contract.test_host import ECHO, FAMILY, SLEEP, ask, said
from tests.hosts import Machine, Network

pytestmark = pytest.mark.live

SILENCE_S = 1.0


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with Network() as network:
        monkeypatch.setenv("HOME", network.env["HOME"])
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        yield network


@pytest.fixture
def h1(network: Network) -> Iterator[Machine]:
    yield network.add("h1")
    assert not marked()


def marked() -> list[psutil.Process]:
    """What of MARK=h1 has not ended within a moment."""
    found = [process for process in psutil.process_iter() if mark_of(process) == "h1"]
    return psutil.wait_procs(found, timeout=10)[1]


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("MARK") if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def on(name: str, body: Callable[[SshHost], Awaitable[None]], **changes: object) -> None:
    async def scenario() -> None:
        host = SshHost(name, **{"silence_s": SILENCE_S, "connect_s": 5.0, **changes})  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(60):
                await (await host.open()).run(["true"], timeout_s=20)
                await body(host)
        finally:
            await host.aclose()

    asyncio.run(scenario())


def refused(name: str, **changes: object) -> AgentRLError:
    async def nothing(host: SshHost) -> None:
        raise AssertionError("it was let in")

    with pytest.raises(AgentRLError) as caught:
        on(name, nothing, **changes)
    assert f"host {name}" in str(caught.value)
    return caught.value


# --- what stands in the way -----------------------------------------------------------------------------------------


def test_a_key_that_the_machine_does_not_take(h1: Machine) -> None:
    (h1.folder / "authorized_keys").write_text("")
    error = refused("h1")
    assert f"user root on host {h1.address}" in str(error)
    assert "ssh-copy-id" in error.hint
    assert isinstance(error, UnavailableError)


def test_a_key_behind_a_passphrase_without_an_agent(network: Network, h1: Machine) -> None:
    key = network.ssh / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(key)], check=True)
    network.configure(f"Host h1\n  IdentityFile {key}\n  IdentitiesOnly yes")
    error = refused("h1")
    assert "ssh-add" in error.hint, (error, error.hint)


def test_an_unknown_machine(network: Network, h1: Machine) -> None:
    network.forget(h1)
    error = refused("h1")
    assert "its host key is not in ~/.ssh/known_hosts" in str(error)
    assert h1.address in str(error)
    assert f"ssh-keyscan {h1.address}" in error.hint


def test_a_changed_host_key(network: Network, h1: Machine) -> None:
    h1.end()
    h1.new_key(known=False)
    h1.start()
    error = refused("h1")
    assert "not the one" in str(error)
    assert f"ssh-keygen -R {h1.address}" in error.hint


def test_an_unknown_machine_on_another_port_by_its_address(network: Network, h1: Machine) -> None:
    (h1.folder / "sshd_config").write_text((h1.folder / "sshd_config").read_text() + "Port 22\nPort 2222\n")
    h1.end()
    h1.start()
    network.forget(h1)
    error = refused("far", address=h1.address, user="root", port=2222)
    assert f"ssh-keyscan -p 2222 {h1.address}" in error.hint
    network.know(h1)
    known = network.ssh / "known_hosts"
    known.write_text(known.read_text().replace(h1.address, f"[{h1.address}]:2222"))
    h1.end()
    h1.new_key(known=False)
    h1.start()
    error = refused("far", address=h1.address, user="root", port=2222)
    assert f"ssh-keygen -R '[{h1.address}]:2222'" in error.hint


def test_a_machine_that_is_down(h1: Machine) -> None:
    h1.end()
    error = refused("h1", connect_s=0.5)
    assert isinstance(error, UnavailableError)
    assert h1.address in str(error)
    h1.start()


def test_a_name_that_nobody_knows(network: Network) -> None:
    assert "no-such-host.invalid" in str(refused("h9", address="no-such-host.invalid"))


def test_a_damaged_configuration(network: Network, h1: Machine) -> None:
    network.configure("Host *\n  Port twenty-two")
    error = refused("h1")
    assert isinstance(error, UserError)
    assert "~/.ssh" in str(error)


def test_an_sshd_that_forbids_forwarding(h1: Machine) -> None:
    with (h1.folder / "sshd_config").open("a") as config:
        config.write("AllowStreamLocalForwarding no\nAllowTcpForwarding no\n")
    h1.end()
    h1.start()

    async def body(host: SshHost) -> None:
        with pytest.raises(UserError, match="AllowStreamLocalForwarding"):
            await host.start(["sleep", "600"], log=f"{host.home}/log", env={"MARK": "h1"})
        with pytest.raises(ConnectionError):
            await ask(await host.reach("127.0.0.1:22"), b"x")

    on("h1", body)


def test_a_file_here_that_cannot_be_read(h1: Machine, tmp_path: Path) -> None:
    (tmp_path / "pipe").symlink_to(tmp_path / "nowhere")

    async def body(host: SshHost) -> None:
        with pytest.raises(UserError, match="host h1: /home/h1/copy"):
            await host.send(str(tmp_path), "/home/h1/copy", deadline_s=20)
        assert not (h1.home / "copy").exists()

    on("h1", body)


def test_a_full_disk(network: Network) -> None:
    network.add("h1", disk="4m")

    async def body(host: SshHost) -> None:
        with pytest.raises(UserError, match="host h1: /home/h1/big") as caught:
            await host.write("/home/h1/big", b"x" * (8 << 20))
        assert "room" in caught.value.hint
        assert await host.run(["ls", "-A", "/home/h1"], timeout_s=20) == (0, "")

    on("h1", body)


# --- the user's own ssh ---------------------------------------------------------------------------------------------


def test_through_another_machine(network: Network, h1: Machine) -> None:
    h2 = network.add("h2")
    network.configure("Host far\n  HostName " + h2.address + "\n  User root\n  ProxyJump h1")

    async def body(host: SshHost) -> None:
        assert await host.run(["hostname", "-I"], timeout_s=20) == (0, f"{h2.address} \n")

    on("far", body)
    assert h2.accepted() == [h1.address]
    network.forget(h1)
    error = refused("far")
    assert h1.address in error.hint


def test_the_agent_has_the_key(network: Network, h1: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = network.folder / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        agent.stdout.readline()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", "-q", str(network.ssh / "id_ed25519")], check=True)
        (network.ssh / "id_ed25519").unlink()

        async def body(host: SshHost) -> None:
            assert host.up

        on("h1", body)
    finally:
        agent.kill()
        agent.communicate()


@pytest.mark.parametrize("shell", ["fish", "csh", "zsh", "dash"])
def test_any_login_shell(h1: Machine, shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    passwd = h1.folder / "passwd"
    passwd.write_text(passwd.read_text().replace("/bin/bash", path))
    words = ["", "a'b", 'a"b', "\\", "\\'", "$HOME", "!!", "a\nb", "*", "~", "é"]

    async def body(host: SshHost) -> None:
        assert await host.run(["printf", "%s\\0", *words], timeout_s=20) == (0, "\0".join([*words, ""]))

    on("h1", body)


# --- a link that is cut ---------------------------------------------------------------------------------------------


def test_a_cut_loses_nothing(h1: Machine) -> None:
    """Processes live on, their ends are heard of afterwards, and addresses here stay good."""

    async def body(host: SshHost) -> None:
        port = await host.free_port()
        log = f"{host.home}/log"
        server = await host.start([sys.executable, "-c", ECHO, str(port)], log=log, env={"MARK": "h1"}, label="echo")
        short = await host.start(["sh", "-c", "read -r _ < fifo; exit 7"], log=f"{host.home}/short", label="short")
        await host.run(["mkfifo", "fifo"], timeout_s=20)
        await said(host, log, "listening")
        address = await host.reach(f"127.0.0.1:{port}")
        assert await ask(address, b"before") == b"before"

        cut = asyncio.get_running_loop().time()
        h1.cut()
        held = asyncio.create_task(host.run(["sleep", "600"], timeout_s=30))
        assert str(SILENCE_S)[:1] in await host.wait_link(up=False)
        assert asyncio.get_running_loop().time() - cut < 5  # the promise is for silence_s = 4; this is a quarter of it
        assert not host.up
        with pytest.raises(UnavailableError, match="host h1"):
            await held
        with pytest.raises(UnavailableError, match="host h1"):
            await host.run(["true"], timeout_s=20)
        with pytest.raises(ConnectionError):
            await ask(address, b"during")

        h1.mend()
        assert await host.wait_link(up=True) == "connected again"
        assert await host.reach(f"127.0.0.1:{port}") == address
        assert await ask(address, b"after") == b"after"
        assert server.returncode is None
        await server.stop()
        assert await server.wait() > 128
        await short.stop()

    on("h1", body)


def test_an_end_during_the_cut_is_heard_of_afterwards(h1: Machine) -> None:
    async def body(host: SshHost) -> None:
        log = f"{host.home}/log"
        process = await host.start([sys.executable, "-c", SLEEP], log=log, env={"MARK": "h1"}, label="x")
        await said(host, log, "ready")
        h1.cut()
        await host.wait_link(up=False)
        [program] = [each for each in psutil.process_iter() if mark_of(each) == "h1" and each.cmdline()[1:2] == ["-c"]]
        program.terminate()
        program.wait(20)
        h1.mend()
        assert await process.wait() == 128 + signal.SIGTERM
        assert await host.read(log) == b"ready\n"

    on("h1", body)


def test_stop_while_out_of_reach_leaves_it_to_the_lease(h1: Machine) -> None:
    async def body(host: SshHost) -> None:
        log = f"{host.home}/log"
        process = await host.start([sys.executable, "-c", FAMILY], log=log, env={"MARK": "h1"}, label="x")
        await said(host, log, "ready")
        h1.cut()
        await host.wait_link(up=False)
        waiting = asyncio.create_task(process.wait())
        await process.stop()
        with pytest.raises(UnavailableError, match="left to its lease"):
            await waiting
        h1.mend()

    on("h1", body, lease_s=2.0)


def test_an_order_to_stop_that_was_lost_on_the_way_is_given_again(h1: Machine) -> None:
    async def body(host: SshHost) -> None:
        process = await host.start(["sleep", "600"], log=f"{host.home}/log", env={"MARK": "h1"}, label="x")
        h1.cut()
        stopping = asyncio.create_task(process.stop())  # nobody knows yet that the link is cut
        await host.wait_link(up=False)
        h1.mend()
        await stopping
        assert await process.wait() == 128 + signal.SIGTERM

    on("h1", body)


def test_what_has_no_lease_says_that_it_goes_on(h1: Machine) -> None:
    async def body(host: SshHost) -> None:
        process = await host.start(["sleep", "600"], log=f"{host.home}/log", env={"MARK": "h1"}, label="x")
        h1.cut()
        await host.wait_link(up=False)
        with pytest.raises(UnavailableError, match="goes on there"):
            await process.stop()
        h1.mend()
        await host.wait_link(up=True)
        again = await host.start(["true"], log=f"{host.home}/log", label="x")  # ends the leftover
        assert await again.wait() == 0

    on("h1", body, lease_s=0.0)


def test_a_machine_that_was_switched_off(h1: Machine) -> None:
    async def body(host: SshHost) -> None:
        process = await host.start(["sleep", "600"], log=f"{host.home}/log", env={"MARK": "h1"}, label="x")
        h1.end()
        await host.wait_link(up=False)
        h1.start()
        assert await process.wait() == 128 + signal.SIGKILL
        again = await host.start(["true"], log=f"{host.home}/log", label="x")
        assert await again.wait() == 0

    on("h1", body)


def test_a_try_to_connect_again_that_breaks_in_no_foreseen_way_is_not_the_last(
    h1: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, broken = asyncssh.connect, iter([RuntimeError("unforeseen"), TypeError("unforeseen")])

    async def sometimes(*args: Any, **kwargs: Any) -> asyncssh.SSHClientConnection:
        for exc in broken:
            raise exc
        return await connect(*args, **kwargs)

    async def body(host: SshHost) -> None:
        monkeypatch.setattr(asyncssh, "connect", sometimes)
        h1.end()
        await host.wait_link(up=False)
        h1.start()
        await host.wait_link(up=True)
        assert list(broken) == []

    on("h1", body)


# --- a controller that dies -----------------------------------------------------------------------------------------

CONTROLLER = textwrap.dedent(
    """
    import asyncio, sys
    from agentrl.hosts.ssh import SshHost
    from tests.contract.test_host import FAMILY, said
    async def main():
        host = await SshHost("h1", lease_s=float(sys.argv[1])).open()
        log = host.home + "/log"
        process = await host.start([sys.executable, "-c", FAMILY], log=log, env={"MARK": "h1"}, label="family")
        await said(host, log, "ready")
        print("started", flush=True)
        await process.wait()
    asyncio.run(main())
    """
)


def killed_controller(lease_s: float) -> None:
    with subprocess.Popen([sys.executable, "-c", CONTROLLER, str(lease_s)], stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"started\n"
        controller.kill()


def test_kill_9_of_the_controller_leaves_nothing_after_the_lease(h1: Machine) -> None:
    killed_controller(1.0)
    assert not marked()  # a second of lease, five of grace for the one that ignores SIGTERM


def test_the_next_controller_ends_what_the_last_one_left(h1: Machine) -> None:
    killed_controller(0.0)

    async def body(host: SshHost) -> None:
        left = {each.pid for each in psutil.process_iter() if mark_of(each) == "h1"}
        assert len(left) >= 4
        process = await host.start(["sleep", "600"], log=f"{host.home}/log", env={"MARK": "h1"}, label="family")
        assert not left & {each.pid for each in psutil.process_iter() if mark_of(each) == "h1"}
        other = await host.start(["sleep", "600"], log=f"{host.home}/other", env={"MARK": "h1"}, label="family")
        assert process.returncode is None  # another log: another run's
        await asyncio.gather(process.stop(), other.stop())

    on("h1", body)


def test_no_secret_is_on_a_command_line(h1: Machine) -> None:
    """Neither what is written nor a program's environment."""

    async def body(host: SshHost) -> None:
        await host.write(f"{host.home}/token", b"s3cret")
        log = f"{host.home}/log"
        process = await host.start(
            [sys.executable, "-c", SLEEP], log=log, env={"MARK": "h1", "TOKEN": "s3cret"}, label="x"
        )
        await said(host, log, "ready")
        lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
        assert not [line for line in lines if "s3cret" in line]
        await process.stop()

    on("h1", body)


def test_nothing_is_left_here(h1: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def body(host: SshHost) -> None:
        address = await host.reach("unix:/tmp/x")
        folder = Path(address.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700

    on("h1", body)
    assert not os.listdir(tmp_path)  # noqa: PTH208


def test_the_bench_measures_both_ways_and_leaves_nothing(h1: Machine) -> None:
    command = [sys.executable, "-m", "agentrl.cli.main", "bench", "ssh", "h1", "--rate", "50", "--seconds", "1"]
    done = subprocess.run([*command, "--json", "-"], check=True, capture_output=True, timeout=100)
    figures = json.loads(done.stdout)
    for way in ("direct", "tunnel"):
        assert 0 < figures[way]["latency_ms"]["p50"] <= figures[way]["latency_ms"]["p99"]
        assert figures[way]["cpu_ms"] > 0
    assert not (h1.home / ".agentrl" / "bench").exists()

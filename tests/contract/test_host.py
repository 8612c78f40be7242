"""What every Host promises, whatever lies between it and us."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import DeadlineError, UnavailableError, UserError
from agentrl.hosts.local import LocalHost
from agentrl.hosts.ssh import SshHost
from agentrl.ports import Host
from tests.hosts import Network, require

pytestmark = pytest.mark.live

Body = Callable[[Host], Awaitable[None]]

# An echo server on argv[1], a port or a socket's path; then says that it listens.
ECHO = """
import socket, sys
where = sys.argv[1]
server = socket.socket(socket.AF_INET if where.isdigit() else socket.AF_UNIX)
server.bind(("127.0.0.1", int(where)) if where.isdigit() else where)
server.listen()
print("listening", flush=True)
while True:
    caller, _ = server.accept()
    with caller:
        while piece := caller.recv(65536):
            caller.sendall(piece)
"""
# A child in the group, one that left the session, one that ignores SIGTERM.
FAMILY = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", stubborn])
time.sleep(600)
"""
SLEEP = "print('ready', flush=True); import time; time.sleep(600)"
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
NASTY = [
    "",
    " ",
    "'",
    '"',
    "$(touch x)",
    "`id`",
    "; exit 9",
    "a\nb",
    "-rf",
    "--",
    "~",
    "*",
    "\\",
    "é\t",
    "%s",
    "!!",
    "#",
    "&",
]


class Stand:
    """Where one test runs: its host, and a folder `there` which is seen as `here`."""

    def __init__(self, make: Callable[[], Awaitable[Host]], there: str, here: Path) -> None:
        self.make, self.there, self.here = make, there, here

    def run(self, body: Body) -> None:
        async def scenario() -> None:
            host = await self.make()
            try:
                async with asyncio.timeout(60):
                    await body(host)
            finally:
                await host.aclose()

        asyncio.run(scenario())

    def marked(self) -> list[psutil.Process]:
        """What is left of what was started with MARK=there."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK") == self.there and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as network:
        network.add("h1")
        yield network


@pytest.fixture(params=["local", "ssh"])
def stand(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    if request.param == "local":

        async def local() -> Host:
            return LocalHost()

        made = Stand(local, str(tmp_path), tmp_path)
    else:
        require()
        network: Network = request.getfixturevalue("network")
        monkeypatch.setenv("HOME", network.env["HOME"])
        machine = network.machines["h1"]

        async def ssh() -> Host:
            return await SshHost("h1").open()

        made = Stand(ssh, f"/home/h1/{tmp_path.name}", machine.home / tmp_path.name)
        made.here.mkdir()
    yield made
    _, left = psutil.wait_procs(made.marked(), timeout=5)
    for process in left:
        process.kill()
    assert not left


async def said(host: Host, log: str, word: str) -> None:
    """Until the log there holds the word. A file tells nobody that it grows."""
    async with asyncio.timeout(20):
        while True:
            try:
                if word.encode() in await host.read(log):
                    return
            except FileNotFoundError:
                pass
            await asyncio.sleep(0.02)


def test_run_gives_code_and_output_and_takes_input(stand: Stand) -> None:
    async def body(host: Host) -> None:
        assert await host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=20) == (3, "out\nerr\n")
        assert await host.run(["cat"], timeout_s=20) == (0, "")
        assert await host.run(["tr", "a", "b"], timeout_s=20, stdin=b"aXa" * 100_000) == (0, "bXb" * 100_000)
        assert (await host.run(["sh", "-c", "kill -9 $$"], timeout_s=20))[0] == 128 + 9
        with pytest.raises(UnavailableError, match="no-such-program"):
            await host.run(["no-such-program"], timeout_s=20)

    stand.run(body)


def test_a_run_past_its_time_is_over_there_too(stand: Stand) -> None:
    async def body(host: Host) -> None:
        with pytest.raises(DeadlineError, match=r"not done within 0\.5 s"):
            await host.run(["env", f"MARK={stand.there}", "sleep", "600"], timeout_s=0.5)

    stand.run(body)  # the fixture looks for what is left


def test_many_at_once(stand: Stand) -> None:
    """More than an sshd takes as sessions of one connection."""

    async def body(host: Host) -> None:
        runs = (host.run(["printf", "%s", str(number)], timeout_s=30) for number in range(40))
        assert await asyncio.gather(*runs) == [(0, str(number)) for number in range(40)]

    stand.run(body)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(TEXT, max_size=6), name=TEXT.filter(lambda text: text.strip("./") != "" and "/" not in text))
def test_no_string_is_anything_but_itself(stand: Stand, words: list[str], name: str) -> None:
    words, path = [*words, *NASTY], f"{stand.there}/{name[:20]}"

    async def body(host: Host) -> None:
        code, out = await host.run(["printf", "%s\\0", *words], timeout_s=20)
        assert (code, out.split("\0")[:-1]) == (0, words)
        await host.write(path, b"x")
        assert await host.read(path) == b"x"
        assert [each.name for each in stand.here.iterdir()] == [name[:20]]
        process = await host.start(
            ["sh", "-c", 'printf "%s\\0" "$NASTY" "$@"', "sh", *words],
            log=f"{path}.log",
            env={"NASTY": "".join(words)},
            label="".join(words),
        )
        assert await process.wait() == 0
        assert (await host.read(f"{path}.log")).decode().split("\0")[:-1] == ["".join(words), *words]
        (stand.here / name[:20]).unlink()
        (stand.here / f"{name[:20]}.log").unlink()

    stand.run(body)


def test_files_are_replaced_and_read(stand: Stand) -> None:
    async def body(host: Host) -> None:
        there, path = f"{stand.there}/a/b/file", stand.here / "a" / "b" / "file"
        await host.write(there, b"one")
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, path.parent.parent)]
        assert modes == [0o600, 0o700, 0o700]
        await host.write(there, b"two" * 100_000, mode=0o644)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert await host.read(there) == b"two" * 100_000
        assert await host.read(there, limit=2) == b"tw"
        assert [each.name for each in path.parent.iterdir()] == ["file"]
        with pytest.raises(FileNotFoundError):
            await host.read(f"{stand.there}/a/b/none")
        with pytest.raises(UserError, match="b: "):
            await host.read(f"{stand.there}/a/b")
        with pytest.raises(UserError, match="file"):
            await host.write(f"{there}/below", b"")

    stand.run(body)


def test_what_is_sent_is_all_that_is_there(stand: Stand, tmp_path: Path) -> None:
    source, target = tmp_path / "source", stand.here / "x" / "target"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "program").write_bytes(b"#!")
    (source / "deep" / "program").chmod(0o755)
    (source / "link").symlink_to("deep/program")

    async def body(host: Host) -> None:
        there, moved = f"{stand.there}/x/target", list[int]()
        await host.send(str(source), there, deadline_s=20, moved=moved.append)
        assert sum(moved) == 4  # the program, and again where the link was
        (target / "stray").touch()
        await host.send(str(source), there, deadline_s=20)
        assert sorted(str(p.relative_to(target)) for p in target.rglob("*")) == ["deep", "deep/program", "link"]
        assert (target / "link").read_bytes() == b"#!"
        assert not (target / "link").is_symlink()
        assert stat.S_IMODE((target / "deep" / "program").stat().st_mode) == 0o755
        await host.send(str(source / "link"), f"{stand.there}/x/file", deadline_s=20)
        assert (target.parent / "file").read_bytes() == b"#!"
        with pytest.raises(UserError, match="none"):
            await host.send(str(tmp_path / "none"), there, deadline_s=20)
        assert sorted(each.name for each in target.parent.iterdir()) == ["file", "target"]

    stand.run(body)


def test_a_started_program_runs_until_its_end(stand: Stand) -> None:
    async def body(host: Host) -> None:
        log = f"{stand.there}/logs/one"
        process = await host.start(["sh", "-c", "echo $X; exit 7"], log=log, env={"X": "said"}, label="one")
        assert await process.wait() == 7
        await process.stop()
        assert await host.read(log) == b"said\n"
        process = await host.start(["sh", "-c", "kill -9 $$"], log=log)
        assert await process.wait() == 128 + signal.SIGKILL
        assert await host.read(log) == b"said\n"  # appended to

    stand.run(body)


def test_what_cannot_be_started(stand: Stand) -> None:
    async def body(host: Host) -> None:
        with pytest.raises(UnavailableError, match="no-such-program: no such program"):
            await host.start(["no-such-program"], log=f"{stand.there}/log")
        await host.write(f"{stand.there}/file", b"")
        with pytest.raises(UserError, match="log: "):
            await host.start(["true"], log=f"{stand.there}/file/log")

    stand.run(body)


def test_stop_takes_the_whole_family(stand: Stand) -> None:
    async def body(host: Host) -> None:
        log = f"{stand.there}/log"
        process = await host.start([sys.executable, "-c", FAMILY], log=log, env={"MARK": stand.there}, label="family")
        await said(host, log, "ready")
        assert len(stand.marked()) >= 4
        await process.stop(grace_s=5.0)
        await process.stop()
        assert await process.wait() == 128 + signal.SIGTERM

    stand.run(body)


def test_stop_of_one_that_ignores_it(stand: Stand) -> None:
    async def body(host: Host) -> None:
        ignore = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
        log = f"{stand.there}/log"
        process = await host.start([sys.executable, "-c", ignore], log=log, env={"MARK": stand.there})
        await said(host, log, "ready")
        await process.stop(grace_s=0.1)
        assert await process.wait() in (128 + signal.SIGKILL, 128 + signal.SIGTERM)

    stand.run(body)


@pytest.mark.parametrize("victim", ["program", "guard"])
def test_when_either_is_killed_the_rest_goes_too(stand: Stand, victim: str) -> None:
    async def body(host: Host) -> None:
        log = f"{stand.there}/log"
        process = await host.start(
            [sys.executable, "-c", SLEEP], log=log, env={"MARK": stand.there, "WHO": "program"}, label="victim"
        )
        await said(host, log, "ready")
        if victim == "guard":
            await host.run(["kill", "-9", str(process.pid)], timeout_s=20)
        else:
            [program] = [each for each in stand.marked() if each.cmdline()[:2] == [sys.executable, "-c"]]
            program.kill()
        assert await process.wait() == 128 + signal.SIGKILL

    stand.run(body)


def test_a_leftover_of_the_same_label_is_ended_first(stand: Stand) -> None:
    async def body(host: Host) -> None:
        log = f"{stand.there}/log"
        start = [sys.executable, "-c", SLEEP]
        first = await host.start(start, log=log, env={"MARK": stand.there}, label="same")
        await said(host, log, "ready")
        before = {process.pid for process in stand.marked()}
        second = await host.start(start, log=log, env={"MARK": stand.there}, label="same")
        assert await first.wait() > 128
        assert not before & {process.pid for process in stand.marked()}
        await second.stop()

    stand.run(body)


def test_standard_input_lives_as_long_as_the_starter(stand: Stand) -> None:
    """So that agentrl.lifeline works for what runs on any host."""

    async def body(host: Host) -> None:
        log = f"{stand.there}/log"
        ask = (
            "import select, sys; print('ready', bool(select.select([0], [], [], 0.2)[0]), flush=True); sys.stdin.read()"
        )
        process = await host.start([sys.executable, "-c", ask], log=log, env={"MARK": stand.there})
        await said(host, log, "ready False")
        await process.stop()

    stand.run(body)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_address_there_is_reached_from_here(stand: Stand, kind: str) -> None:
    async def body(host: Host) -> None:
        where = str(await host.free_port()) if kind == "tcp" else f"{stand.there}/echo"
        server = await host.start([sys.executable, "-c", ECHO, where], log=f"{stand.there}/log", label="echo")
        await said(host, f"{stand.there}/log", "listening")
        address = await host.reach(f"127.0.0.1:{where}" if kind == "tcp" else f"unix:{where}")
        assert await host.reach(f"127.0.0.1:{where}" if kind == "tcp" else f"unix:{where}") == address
        for _ in range(3):
            assert await ask(address, b"x" * 1_000_000) == b"x" * 1_000_000
        await server.stop()
        with pytest.raises(ConnectionError):
            await ask(address, b"x")

    stand.run(body)


async def ask(address: str, data: bytes) -> bytes:
    """What an echo server answers. ConnectionError where there is none."""
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        folder = Path(address.removeprefix("unix:")).parent
        assert await asyncio.to_thread(os.access, folder, os.W_OK)
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    try:
        sent = asyncio.create_task(send(writer, data))
        got = await reader.read(len(data))
        while got and len(got) < len(data) and (more := await reader.read(len(data))):
            got += more
        await sent
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    if not got:
        raise ConnectionResetError("closed without an answer")
    return got


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(OSError):  # hung up on: then there is no answer either
        writer.write(data)
        await writer.drain()
        writer.write_eof()


def test_the_link(stand: Stand) -> None:
    async def body(host: Host) -> None:
        assert host.up
        assert await host.wait_link(up=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await host.wait_link(up=False)

    stand.run(body)

"""A machine behind SSH. See docs/decisions/0017-hosts-over-ssh.md.

One connection carries everything: commands, files, forwarded ports, and news of processes. Programs run there under a
guard of their own (detached.py), so that they outlive the connection and do not outlive us: who is not heard of for
`lease_s` is taken to be gone for good.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import posixpath
import secrets
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import asyncssh

from agentrl.errors import AgentRLError, DeadlineError, UnavailableError, UserError
from agentrl.hosts.far import SshProcess, read_json
from agentrl.hosts.forward import Forward
from agentrl.hosts.link import Link

SOCKET_PATH_MAX = 107
_START_S = 60.0
_FILE_S = 60.0
_LATE_S = 2.0  # `timeout` there ends a command that we no longer wait for
_PARTS = ("guard.py", "detached.py")
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from agentrl.hosts.detached import main; main()"
_PORT = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"
_FACTS = """printf '%s\\n' "$HOME"
for p in python3 python3.14 python3.13 python3.12 python3.11; do
    "$p" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v "$p" && exit
done
command -v python3 || true
"""
_HARMLESS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-./=:,@+")
_SESSIONS = 4  # at once. An sshd takes 10 on a connection: these, as many it has not buried yet, and SFTP
_NOT_FOUND = "timeout: failed to run command"


class SshHost:
    """`ports.Host`. `open` before use; `aclose` leaves what runs there to its lease."""

    local = False

    def __init__(
        self,
        name: str,
        *,
        address: str = "",
        user: str = "",
        port: int = 0,
        python: str = "",
        home: str = "",
        lease_s: float = 120.0,
        silence_s: float = 4.0,
        connect_s: float = 15.0,
    ) -> None:
        """address, user, port: empty means as ~/.ssh/config or ssh has it. python: empty means HOME/venv/bin/python,
        made by `agentrl hosts install`. lease_s: 0 never ends. silence_s: after which the machine counts as lost."""
        self.name = name
        self.lease_s = lease_s
        self._python, self._home = python, home
        self._link = Link(name, address or name, user, port, silence_s=silence_s, connect_s=connect_s)
        self._bare_python = ""
        self._reached: dict[str, tuple[str, Forward]] = {}
        self._opening = asyncio.Lock()
        self._sessions = asyncio.Semaphore(_SESSIONS)
        self._sockets = ""
        self._processes: set[SshProcess] = set()
        self._sftp: tuple[asyncssh.SSHClientConnection, asyncssh.SFTPClient] | None = None
        self._installed = False

    async def open(self) -> SshHost:
        """Connects. UnavailableError or UserError that says what stands in the way, and what to do."""
        code, said = await self.run(["sh", "-c", _FACTS], timeout_s=_START_S)
        lines = said.splitlines()
        if code or not lines or not lines[0].startswith("/"):
            raise UnavailableError(f"host {self.name}: `sh` does not answer as it should: {said.strip()[:300]!r}")
        self._bare_python = self._python or (lines[1] if len(lines) > 1 else "")
        home = self._home or "~/.agentrl"
        self._home = posixpath.join(lines[0], home[2:]) if home.startswith("~/") else home
        if not self._home.startswith("/"):
            raise UserError(f"host {self.name}: home {self._home} is not an absolute path", hint="correct hosts.home")
        longest = len(self._folder_of("any")) + len("/socket")
        if longest > SOCKET_PATH_MAX:
            raise UserError(
                f"host {self.name}: home {self._home} is too long for Unix sockets below it by"
                f" {longest - SOCKET_PATH_MAX} characters",
                hint="choose a shorter hosts.home",
            )
        return self

    @property
    def home(self) -> str:
        assert self._home.startswith("/"), "open() it first"
        return self._home

    @property
    def python(self) -> str:
        return self._python or f"{self.home}/venv/bin/python"

    @property
    def base_python(self) -> str:
        """The interpreter that needs nothing of ours: the recipe's, or the first on the PATH there that is new enough.
        Empty where there is none."""
        return self._bare_python

    @property
    def up(self) -> bool:
        return self._link.up

    @property
    def ssh_target(self) -> str:
        """As the user would give it to ssh."""
        return self._link.target

    async def wait_link(self, *, up: bool) -> str:
        return await self._link.wait(up=up)

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> tuple[int, str]:
        code, said = await self._run(argv, timeout_s, stdin)
        if code == 127 and said.startswith(_NOT_FOUND):
            raise UnavailableError(
                f"host {self.name}: {argv[0]}: no such program", hint="install it there, or correct its path"
            )
        return code, said

    async def start(
        self, argv: Sequence[str], *, log: str, env: Mapping[str, str] | None = None, label: str = ""
    ) -> SshProcess:
        """A leftover has the same label and the same log: of two runs on one machine each has its own. It may also be
        another SshHost's, dead or alive. Where the label is empty, nobody finds the program again."""
        folder, nonce = self._folder_of(f"{label}\0{log}" if label else secrets.token_hex(8)), secrets.token_hex(8)
        request = {
            "argv": list(argv),
            "env": dict(env or {}),
            "folder": folder,
            "log": log,
            "lease_s": self.lease_s,
            "nonce": nonce,
        }
        answer = await self._detached(request)
        match answer.get("error"):
            case None if "pid" in answer:
                process = SshProcess(self, label or argv[0], folder, int(answer["pid"]), nonce)
                self._processes.add(process)
                try:
                    await process.begin()
                except BaseException:
                    await process.forget()
                    with suppress(AgentRLError):
                        await self.sweep(folder)
                    raise
                return process
            case "program":
                hint = "install it there, or correct its path in the recipe"
                raise UnavailableError(f"host {self.name}: {answer['what']}", hint=hint)
            case "log" | "folder":
                raise UserError(f"host {self.name}: {answer['what']}", hint="it must be writable there")
        raise UnavailableError(f"host {self.name}: {label or argv[0]} was not started: {answer}")

    async def write(self, path: str, data: bytes, *, mode: int = 0o600) -> None:
        async with self._files(path) as (sftp, _):
            await self._parents(sftp, path)
            partial = f"{posixpath.dirname(path)}/.{posixpath.basename(path)}.{secrets.token_hex(4)}"
            try:
                async with sftp.open(partial, "wb", asyncssh.SFTPAttrs(permissions=mode)) as file:
                    await file.write(data)
                await sftp.chmod(partial, mode)
                await sftp.posix_rename(partial, path)
            except BaseException:
                with suppress(asyncssh.Error, OSError):
                    await sftp.remove(partial)
                raise

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        async with self._files(path) as (sftp, _):
            if await sftp.isdir(path):
                raise UserError(f"host {self.name}: {path}: it is a folder", hint="name a file")
            async with sftp.open(path, "rb") as file:
                return cast(bytes, await file.read(limit))  # asyncssh says str, whatever the mode

    async def send(
        self, source: str, path: str, *, deadline_s: float, moved: Callable[[int], None] | None = None
    ) -> None:
        if not await asyncio.to_thread(Path(source).exists):
            raise UserError(f"{source}: no such file", hint="name a file or folder of this machine")
        fresh = f"{posixpath.dirname(path)}/.{posixpath.basename(path)}.{secrets.token_hex(4)}"
        try:
            async with self._files(path, deadline_s, bulk=True) as (sftp, goes_on):
                await self._parents(sftp, path)
                told = _Told(goes_on, moved)
                await sftp.put(
                    source, fresh, preserve=True, recurse=True, follow_symlinks=True, progress_handler=told.copied
                )
            swap = 'if [ -d "$2" ] && [ ! -L "$2" ]; then mv -T -- "$2" "$1.old"; fi; mv -T -- "$1" "$2"'
            code, said = await self.run(["sh", "-c", swap, "sh", fresh, path], timeout_s=_FILE_S)
            if code:
                raise UserError(f"host {self.name}: {path}: {said.strip()}", hint="mend what mv names")
        finally:
            with suppress(AgentRLError):
                await self.run(["rm", "-rf", "--", fresh, f"{fresh}.old"], timeout_s=_FILE_S)

    async def reach(self, address: str) -> str:
        async with self._opening:
            if address not in self._reached:
                forward = Forward(self.name, address, self._link.current)
                here = await forward.listen(self._socket() if address.startswith("unix:") else None)
                self._reached[address] = here, forward
        return self._reached[address][0]

    async def free_port(self) -> int:
        code, said = await self.run([self._bare_python, "-I", "-S", "-c", _PORT], timeout_s=_START_S)
        if code:
            raise UnavailableError(f"host {self.name}: no free port: {said.strip()[-300:]}")
        return int(said)

    async def aclose(self) -> None:
        for process in tuple(self._processes):
            await process.forget()
        for _, forward in self._reached.values():
            await forward.aclose()
        self._reached.clear()
        await self._link.aclose()
        if self._sockets:
            await asyncio.to_thread(shutil.rmtree, self._sockets, True)

    # --- within the package ---------------------------------------------------------------------------------------

    async def connection(self) -> asyncssh.SSHClientConnection:
        return await self._link.connection()

    def ended(self, process: SshProcess) -> None:
        self._processes.discard(process)

    async def sweep(self, folder: str) -> None:
        await self._detached({"folder": folder})

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _run(self, argv: Sequence[str], timeout_s: float, stdin: bytes) -> tuple[int, str]:
        """Killed when we stop to wait; soon after, whatever becomes of the link."""
        connection = await self._link.connection()
        command = _line(["timeout", "-s", "KILL", f"{timeout_s + _LATE_S:.3f}", *argv])
        given = asyncssh.PIPE if stdin else asyncssh.DEVNULL
        try:
            async with asyncio.timeout(timeout_s), self._sessions:
                process = await connection.create_process(command, stdin=given, stderr=asyncssh.STDOUT, encoding=None)
                try:
                    output, _ = await process.communicate(stdin or None)
                except BaseException:
                    with suppress(OSError):
                        process.kill()
                    raise
                finally:
                    process.close()
                await process.wait_closed()
        except TimeoutError as exc:
            raise DeadlineError(f"host {self.name}: {shlex.join(argv)}: not done within {timeout_s:g} s") from exc
        except (asyncssh.Error, OSError) as exc:
            raise UnavailableError(f"host {self.name}: {argv[0]} cannot be run: {exc}") from exc
        assert isinstance(output, bytes)
        said = output.decode(errors="replace")
        if process.exit_signal is not None:
            return 128 + _SIGNALS.get(process.exit_signal[0], 0), said
        if process.exit_status is None or process.exit_status < 0:
            raise UnavailableError(f"host {self.name}: the connection was lost during: {shlex.join(argv)}")
        return process.exit_status, said

    async def _detached(self, request: dict[str, object]) -> dict[str, Any]:
        """One request to detached.py there."""
        argv = [self._bare_python, "-I", "-S", "-c", _BOOT, await self._library()]
        code, said = await self.run(argv, timeout_s=_START_S, stdin=json.dumps(request).encode())
        return read_json(said) or {"exit": code, "said": said.strip()[-500:]}

    @asynccontextmanager
    async def _files(
        self, path: str, deadline_s: float = _FILE_S, *, bulk: bool = False
    ) -> AsyncIterator[tuple[asyncssh.SFTPClient, Callable[[], None]]]:
        """An SFTP session with a deadline, its errors in the user's terms; and what puts the deadline off: a sign of
        progress."""
        where, now = f"host {self.name}: {path}", asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(deadline_s) as timeout:

                def goes_on() -> None:
                    if not timeout.expired():
                        timeout.reschedule(now() + deadline_s)

                if bulk:
                    async with self._link.another() as connection, connection.start_sftp_client() as sftp:
                        yield sftp, goes_on
                else:
                    yield await self._sftp_client(), goes_on
        except TimeoutError as exc:
            raise DeadlineError(f"{where}: no progress within {deadline_s:g} s") from exc
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath) as exc:
            raise FileNotFoundError(where) from exc
        except (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection) as exc:
            raise UnavailableError(f"{where}: the connection is lost") from exc
        except asyncssh.SFTPError as exc:
            raise UserError(f"{where}: {exc.reason}", hint="it must be writable there, with room left") from exc
        except (asyncssh.Error, ConnectionError) as exc:
            raise UnavailableError(f"{where}: {exc}") from exc
        except OSError as exc:  # of the file on this side
            raise UserError(f"{where}: {exc}", hint="mend what it names") from exc

    async def _sftp_client(self) -> asyncssh.SFTPClient:
        connection = await self._link.connection()
        async with self._opening:
            if self._sftp is None or self._sftp[0] is not connection:
                self._sftp = connection, await connection.start_sftp_client()
            return self._sftp[1]

    async def _parents(self, sftp: asyncssh.SFTPClient, path: str) -> None:
        await sftp.makedirs(posixpath.dirname(path), asyncssh.SFTPAttrs(permissions=0o700), exist_ok=True)

    async def _library(self) -> str:
        """The folder there that holds guard.py and detached.py as they are here."""
        sources = {name: (Path(__file__).parent / name).read_bytes() for name in _PARTS}
        digest = hashlib.sha256(b"".join(sources.values())).hexdigest()[:12]
        folder = f"{self.home}/guard-{digest}"
        if not self._installed:
            if not self._bare_python:
                raise UnavailableError(
                    f"host {self.name}: no python3 there", hint="install Python 3.11 or newer, or set hosts.python"
                )
            for name, source in {**sources, "__init__.py": b"", "../__init__.py": b""}.items():
                await self.write(posixpath.normpath(f"{folder}/agentrl/hosts/{name}"), source)
            self._installed = True
        return folder

    def _folder_of(self, label: str) -> str:
        return f"{self._home}/processes/{hashlib.sha256(label.encode()).hexdigest()[:12]}"

    def _socket(self) -> Path:
        self._sockets = self._sockets or tempfile.mkdtemp(prefix="agentrl-")
        return Path(self._sockets, f"{len(self._reached)}.sock")


_SIGNALS = {"HUP": 1, "INT": 2, "QUIT": 3, "ABRT": 6, "KILL": 9, "SEGV": 11, "PIPE": 13, "TERM": 15}


class _Told:
    """What asyncssh says of a transfer (each file's bytes so far), as a sign of progress and as bytes more."""

    def __init__(self, goes_on: Callable[[], None], moved: Callable[[int], None] | None) -> None:
        self._goes_on = goes_on
        self._moved = moved
        self._file: bytes = b""
        self._bytes = 0

    def copied(self, source: bytes, target: bytes, so_far: int, total: int) -> None:
        self._goes_on()
        more = so_far - (self._bytes if source == self._file else 0)
        self._file, self._bytes = source, so_far
        if self._moved is not None:
            self._moved(more)


def _line(argv: Sequence[str]) -> str:
    """One command line that every login shell (bash, zsh, fish, csh, ...) takes for just this: all but harmless
    characters are octal numbers, which only `sh` there turns back."""
    script = f"exec {shlex.join(argv)}".encode(errors="surrogateescape")
    return f"exec sh -c 'eval \"$(printf %b \"$1\")\"' sh '{''.join(map(_octal, script))}'"


def _octal(byte: int) -> str:
    return chr(byte) if byte in _HARMLESS else f"\\0{byte:03o}"

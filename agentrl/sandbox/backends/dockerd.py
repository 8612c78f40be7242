"""The Docker engine, by its SDK: blocking calls in few threads, each with a deadline, each failure typed.

An image that is absent is an UnavailableError that says how to get it; an engine that is gone or hangs is one that
names its address; anything else that it refuses is an InfraError in its own words.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentrl.errors import InfraError, UnavailableError, UserError

T = TypeVar("T")

DEFAULT_URL = "unix:///var/run/docker.sock"
_THREADS = 8  # more only queue within the engine: 4.9 starts/s with 4 threads, 5.4 with 16, on two cores
_CONFLICT = 409
_DYING = "container state improper"  # Podman's word for it
_ABSENT = "No such image"
_SLACK_S = 5.0  # beyond the SDK's own time-out, for a thread to become free


class Dockerd:
    """url: `unix://` only, as containers are reached through folders that they share with us. Close with `close`."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url or os.environ.get("DOCKER_HOST", "") or DEFAULT_URL
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dockerd")
        self._client: Any = None
        self._connecting = threading.Lock()
        if importlib.util.find_spec("docker") is None:
            raise UnavailableError("sandbox backend docker: no docker SDK here", hint="pip install 'agentrl[docker]'")
        if not self.url.startswith("unix://"):
            raise UserError(
                f"sandbox.docker.url: {self.url} is not on this machine",
                hint="Run the sandbox daemon on the engine's own host, and name its unix:// socket.",
            )

    async def call(self, what: str, act: Callable[[Any], T], *, timeout_s: float = 0.0) -> T:
        """`act` with the SDK's low-level client, in a thread. It may go on after a time-out or a cancellation: whoever
        makes something must be able to find it by name."""
        limit = timeout_s or self._timeout_s
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._act, what, act, limit)
        try:
            return await asyncio.wait_for(job, limit + _SLACK_S)
        except TimeoutError:
            raise self._silent(what, limit) from None

    def _act(self, what: str, act: Callable[[Any], T], limit: float) -> T:
        import docker.errors
        import requests

        try:
            return act(self._connected(limit))
        except docker.errors.ImageNotFound as e:
            said = str(e.explanation or e)
            raise absent_image(
                said.rpartition(_ABSENT)[2] or f": {said}", self.url
            ) from e  # Podman has the name before it
        except (requests.Timeout, TimeoutError) as e:
            raise self._silent(what, limit) from e
        except docker.errors.APIError as e:
            raise InfraError(f"docker: {what}: {e.explanation or e}", hint="Read the engine's log.") from e
        except (docker.errors.DockerException, requests.RequestException, OSError) as e:
            raise UnavailableError(
                f"docker: {what}: no engine at {self.url}: {_last_words(e)}",
                hint="Start it (or name another by sandbox.docker.url), and join its group or be root.",
            ) from e

    def _connected(self, limit: float) -> Any:
        with self._connecting:
            if self._client is None:
                import docker

                self._client = docker.APIClient(base_url=self.url, timeout=limit, max_pool_size=_THREADS)
            return self._client

    def _silent(self, what: str, limit: float) -> UnavailableError:
        return UnavailableError(
            f"docker: {what}: the engine at {self.url} said nothing for {limit:g} s",
            hint="Is it overloaded or stopped? Raise sandbox.docker.call_timeout_s on a slow disk.",
        )

    async def image_id(self, image: str) -> str:
        """UnavailableError where it is not there. Nothing is pulled: a start must not wait for a registry."""
        return str((await self.call(f"look for image {image}", lambda c: c.inspect_image(image)))["Id"])

    async def remove(self, name: str) -> None:
        """The container, running or not, with its anonymous volumes; it is gone when this returns."""
        import docker.errors

        def act(client: Any) -> None:
            with contextlib.suppress(docker.errors.NotFound):
                try:
                    client.remove_container(name, force=True, v=True)
                except docker.errors.APIError as e:
                    if e.status_code != _CONFLICT and _DYING not in str(e):
                        raise
                    client.wait(name, condition="removed")  # by itself: the engine is at it

        await self.call(f"remove {name}", act)

    async def labelled(self, label: Mapping[str, str]) -> list[dict[str, Any]]:
        """All containers with these labels (an empty value: any), running or not."""
        filters = [f"{key}={value}" if value else key for key, value in label.items()]
        found: list[dict[str, Any]] = await self.call(
            "list containers", lambda c: c.containers(all=True, filters={"label": filters})
        )
        return found

    @contextlib.asynccontextmanager
    async def started(self, exec_id: str) -> AsyncIterator[ExecStream]:
        """A command made by `exec_create` runs. Not by the SDK: it would keep a thread for as long as the command
        takes, and it may lose the first bytes, which it reads along with the answer's head."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.url.removeprefix("unix://"))
        except OSError as e:
            raise UnavailableError(f"docker: exec: no engine at {self.url}: {e}", hint="Start it.") from e
        try:
            body = b'{"Detach": false, "Tty": false}'
            writer.write(
                f"POST /exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            status = head.split(b" ", 2)[1]
            if status not in (b"101", b"200"):
                raise InfraError(f"docker: exec: {(await reader.read(2_000)).decode(errors='replace')}")
            yield ExecStream(reader, writer)
        except asyncio.IncompleteReadError as e:
            raise UnavailableError(f"docker: exec: the engine at {self.url} hung up", hint="Read its log.") from e
        finally:
            writer.close()

    def close(self) -> None:
        """Calls that still run go on to their own time-outs."""
        self._threads.shutdown(wait=False)
        if self._client is not None:
            self._client.close()


class ExecStream:
    """A command's standard streams. A frame is a byte for which, three of nothing, its length as a big-endian u32."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def write(self, data: bytes) -> None:
        """All of its standard input."""
        self._writer.write(data)
        self._writer.write_eof()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Of output and errors as they come, until the command has closed both."""
        while True:
            try:
                head = await self._reader.readexactly(8)
            except asyncio.IncompleteReadError:
                return
            left = int.from_bytes(head[4:], "big")
            while left and (chunk := await self._reader.read(min(left, 1 << 16))):
                left -= len(chunk)
                yield chunk


def absent_image(named: str, url: str) -> UnavailableError:
    return UnavailableError(
        f"docker: {_ABSENT}{named.rstrip()} (engine {url})",
        hint="`docker pull` it, `docker build` it, or `docker import` a root file system under that name; "
        "sandbox.image names the one of tasks that name none.",
    )


def _last_words(error: BaseException) -> str:
    """The SDK wraps an OSError five times; the innermost says what is wrong."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return str(error)

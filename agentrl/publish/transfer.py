"""Weights to a host, by files: a shared file system is used as it is, else what is missing there is sent over SFTP.

While an engine serves, a version is brought beside it, checked file by file against its manifest, and named only once
it is whole; the swap is from that folder. Versions that the run's store has pruned go there too.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import DataError, UnavailableError, UserError
from agentrl.ports import Host, Progress
from agentrl.records import Version, WeightsManifest

MANIFEST = "manifest.json"
_COMMAND_S = 120.0
_SLOWEST = 20e6  # bytes a second that a disk there reads: what takes longer is given up
_SILENT_S = 60.0  # without a byte on its way: it is given up
_TELL_EVERY_S = 2.0
_PROBE_S = 20.0
_AT_ONCE = 4  # files of one version on their way to one host


class HostFolders:
    """`serve.staging.Folders` of one host, for all of its engines. root: a folder there that is ours alone. near: one
    there that may hold the model already: what it has of the initial version is not sent.

    A call goes on as long as bytes move, and ends by itself where none do; where only the host knows (it reads files to
    check them), after what a very slow disk takes. A call that is cancelled leaves whole files to go on from. progress
    hears how far a version is.
    """

    def __init__(
        self, host: Host, root: str, *, shared: bool, near: str = "", progress: Progress | None = None
    ) -> None:
        self._host = host
        self._root = root
        self._shared = shared
        self._near = near
        self._progress = progress
        self._one = asyncio.Lock()  # engines of one host wait for one transfer
        self._there: dict[str, str] = {}  # folder here -> folder there, of what was brought
        self.sent_bytes = 0

    async def bring(self, path: str, version: Version) -> str:
        if self._shared:
            listed = await asyncio.to_thread(_manifest, Path(path), version)
            limit_s = _limit_s(sum(size for _, _, size in listed.files))
            await self._check("verify", _absolute(path), version, limit_s=limit_s)
            return _absolute(path)
        async with self._one:
            there = await self._copy(path, version)
            self._there[path] = there
            return there

    async def find(self, path: str, version: Version) -> str:
        if self._shared:
            return _absolute(path)
        return self._there.get(path) or await self.bring(path, version)

    async def fits(self, there: str, held: str, *, complete: bool) -> None:
        await self._check("fits", there, held, complete)

    async def vocabulary(self, there: str) -> int | None:
        found = await self._check("vocabulary", there)
        return None if found is None else int(found)

    async def _copy(self, path: str, version: Version) -> str:
        here = Path(path)
        listed = await asyncio.to_thread(_manifest, here, version)
        name = _name(here)
        order: dict[str, Any] = {"name": name, "files": listed.files}
        limit_s = _limit_s(sum(size for _, _, size in listed.files))
        missing = await self._receive(limit_s, do="missing", near="" if version else self._near, **order)
        places = asyncio.Semaphore(_AT_ONCE)
        sizes = {file: size for file, _, size in listed.files}
        pace = Pace(self._host.name, version, sum(sizes[file] for file in missing), self._progress)

        async def send(file: str) -> None:
            async with places:
                target = f"{self._root}/.part-{name}/{file}"
                await self._host.send(str(here / file), target, deadline_s=_SILENT_S, moved=pace.moved)

        try:
            async with asyncio.TaskGroup() as group:
                for file in missing:
                    group.create_task(send(file))
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
            if not isinstance(first, UserError):  # what a host says of its disk is not the user's typing
                raise first from failed
            raise UnavailableError(
                f"{self._host.name}: version {version} cannot be sent: {first}",
                hint="free space there, or name another hosts.home",
            ) from failed
        self.sent_bytes += pace.total
        keep = [_name(folder) for folder in here.parent.glob("v*") if (folder / MANIFEST).is_file()]
        manifest = (here / MANIFEST).read_text()
        await self._receive(limit_s, do="commit", **order, manifest=manifest, keep=keep)
        return f"{self._root}/{name}"

    async def _receive(self, limit_s: float, **order: Any) -> Any:
        return await self._ask(["agentrl.publish.receive", self._root], order, limit_s)

    async def _check(self, *check: Any, limit_s: float = _COMMAND_S) -> Any:
        return await self._ask(["agentrl.serve.staging"], check, limit_s)

    async def _ask(self, module: list[str], order: Any, limit_s: float) -> Any:
        host = self._host
        argv = [host.python, "-m", *module]
        code, said = await host.run(argv, timeout_s=limit_s, stdin=msgspec.json.encode(order))
        try:
            answer = msgspec.json.decode(said)
        except msgspec.MsgspecError:
            raise UnavailableError(
                f"{host.name}: {module[0]} ended with exit code {code}: {said.strip()[-500:]}",
                hint="`agentrl doctor RECIPE` looks at the host",
            ) from None
        if answer.get("error"):
            hint = answer.get("hint") or "Publish this version again."
            raise DataError(f"{host.name}: {answer['error']}", hint=hint)
        return answer["value"]


class Pace:
    """How fast a version gets to a host, for people: told now and then, and at the end."""

    def __init__(self, who: str, version: Version, total: int, progress: Progress | None) -> None:
        self.total = total
        self._who = who
        self._version = version
        self._progress = progress
        self._began = self._told = time.monotonic()
        self._bytes = 0

    def moved(self, more: int) -> None:
        self._bytes += more
        now, whole = time.monotonic(), self._bytes >= self.total
        if self._progress is None or not self.total or (now - self._told < _TELL_EVERY_S and not whole):
            return
        self._told = now
        rate = self._bytes / max(now - self._began, 1e-3)
        what = f"version {self._version}: {_said(self._bytes)} of {_said(self.total)} sent, {rate / 1e6:.0f} MB/s"
        self._progress(self._who, what, self._bytes / self.total)


async def folders_of(
    host: Host, weights: str, *, store: str, root: str, near: str = "", progress: Progress | None = None
) -> HostFolders:
    """How versions of the store in the folder `store` get to a host. weights: auto, shared or copy (`hosts.weights`).

    UserError where it shall be shared and is not.
    """
    shared = weights != "copy" and (host.local or await _sees(host, store))
    if weights == "shared" and not shared:
        raise UserError(
            f"hosts.{host.name}.weights: shared, but {store} is not the same folder there",
            hint='mount it there under the same path, or set weights = "copy"',
        )
    return HostFolders(host, root, shared=shared, near=near, progress=progress)


async def _sees(host: Host, store: str) -> bool:
    """Whether a file that is written here is there: an equal path alone proves nothing."""
    mark = Path(store) / f".seen-{secrets.token_hex(8)}"
    said = secrets.token_bytes(16)
    await asyncio.to_thread(mark.write_bytes, said)
    try:
        async with asyncio.timeout(_PROBE_S):
            return await host.read(str(mark.absolute())) == said
    except (FileNotFoundError, UserError):
        return False
    finally:
        await asyncio.to_thread(mark.unlink)


def _said(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _limit_s(size: int) -> float:
    return _COMMAND_S + size / _SLOWEST


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _name(folder: Path) -> str:
    """A version of the same number from another run is another folder there."""
    return f"{folder.name}-{hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:12]}"


def _manifest(folder: Path, version: Version) -> WeightsManifest:
    try:
        found = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=WeightsManifest)
    except (OSError, msgspec.MsgspecError) as exc:
        raise DataError(f"{folder}: no complete version {version}: {exc}", hint="Publish this version again.") from exc
    if found.version != version:
        raise DataError(f"{folder}: is of version {found.version}, not {version}")
    return found

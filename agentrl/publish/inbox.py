"""Weights that reach the run over the network: kept as they come, in the store once they are whole and proved."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from agentrl.errors import DataError, UnavailableError, UserError
from agentrl.publish.store import MANIFEST, DiskWeightStore
from agentrl.records import WeightsManifest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_OFFER = ".offer.json"


class WeightInbox:
    """One version at a time, in a folder beside the versions. What arrived stays over a restart of either side, and is
    removed by the offer of anything else. Safe within one event loop; no call blocks it."""

    def __init__(self, store: DiskWeightStore, root: str) -> None:
        """root: the store's own folder, so that a whole file needs only another name."""
        self._store = store
        self._folder = Path(root) / ".incoming"
        self._offer = self._folder / _OFFER
        self._sizes: dict[str, int] = {}
        self._sender: object = None  # whose bytes are taken; a newer one displaces one that may hang
        self._lock = asyncio.Lock()

    async def offer(self, manifest: WeightsManifest) -> dict[str, int]:
        """Bytes that are there of each file that is not whole; empty: the version is complete in the store.

        UserError for names that are none, UnavailableError where the disk has no room for the rest, DataError where a
        whole file has another checksum than was offered: then all of it is to be sent again.
        """
        for name, _, size in manifest.files:
            if not _NAME.fullmatch(name) or name == MANIFEST or size < 0:
                raise UserError(f"{name!r} ({size} bytes) cannot be a file of a version")
        async with self._lock:
            self._sender = None
            return await asyncio.to_thread(self._take_offer, manifest)

    async def receive(self, name: str, offset: int, pieces: AsyncIterator[bytes]) -> int:
        """Appends to a file that was offered, if that has `offset` bytes now; the bytes it has afterwards."""
        path, me = self._folder / name, object()
        async with self._lock:
            if name not in self._sizes:
                raise UserError(f"{name!r} was not offered", hint="offer the manifest first")
            self._sender = me
        async for piece in pieces:
            async with self._lock:
                if self._sender is not me or _size(path) != offset:
                    break
                if offset + len(piece) > self._sizes[name]:
                    raise UserError(f"{name!r} is longer than the {self._sizes[name]} bytes that were offered")
                await asyncio.to_thread(_append, path, piece)
                offset += len(piece)
        return _size(path)

    def _take_offer(self, manifest: WeightsManifest) -> dict[str, int]:
        # the store may hold more: what a version has beside its weights is linked from the one before
        if set(manifest.files) <= set(self._store.files(manifest.version) or ()):
            self._clear()
            return {}
        offered = msgspec.json.encode(manifest)
        if not self._offer.is_file() or self._offer.read_bytes() != offered:
            self._clear()
            self._folder.mkdir()
            for name, _, size in manifest.files:
                if size == 0:  # nobody will send it
                    (self._folder / name).touch()
            self._offer.write_bytes(offered)
        self._sizes = {name: size for name, _, size in manifest.files}
        have = {name: _size(self._folder / name) for name in self._sizes}
        lacking = {name: have[name] for name, size in self._sizes.items() if have[name] < size}
        if not lacking:
            self._commit(manifest)
            return {}
        wanted = sum(self._sizes.values()) - sum(have.values())
        free = shutil.disk_usage(self._folder).free
        if wanted > free:
            raise UnavailableError(
                f"{self._folder.parent}: {wanted / 1e6:,.1f} MB of version {manifest.version} are to come,"
                f" {free / 1e6:,.1f} MB are free",
                hint="free space on the run's disk, or lower publish.keep_versions",
            )
        return lacking

    def _commit(self, manifest: WeightsManifest) -> None:
        def write(folder: str) -> None:
            for name in self._sizes:
                (Path(folder) / name).hardlink_to(self._folder / name)

        try:
            self._store.put(manifest.version, write, extra=manifest.extra, expected=manifest.files)
        except DataError:
            self._clear()
            raise
        self._clear()

    def _clear(self) -> None:
        self._sizes = {}
        shutil.rmtree(self._folder, ignore_errors=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _append(path: Path, piece: bytes) -> None:
    with path.open("ab") as file:
        file.write(piece)

"""How weights get from and to the run: by a disk that both see, or over its HTTP face."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Protocol

from agentrl.records import Version
from agentrl.train.client import RunClient
from agentrl.train.config import WorkerConfig
from agentrl.train.worker.session import Start, Store

_KEPT = 2  # versions in a remote trainer's own folder


class Exchange(Protocol):
    async def start(self) -> Start | None:
        """A version that the store holds now, to begin with; None: it is to be made of the model's folder."""
        ...

    async def bring(self, version: Version) -> bool:
        """Have the run's `version` in the store; whether it was not there, or another of that number was. DataError
        where the run has it no longer."""
        ...

    async def give(self, lease: str, version: Version) -> None:
        """Have `version`, which the store holds, complete at the run. Raises LeaseLost."""
        ...


class SharedDisk:
    """The store is the run's own: there is nothing to move."""

    async def start(self) -> Start | None:
        return None

    async def bring(self, version: Version) -> bool:
        return False

    async def give(self, lease: str, version: Version) -> None:
        return


class RemoteExchange:
    """The store is a folder of ours with the newest versions only."""

    def __init__(self, config: WorkerConfig, client: RunClient, store: Store) -> None:
        self._client = client
        self._store = store
        self._root = Path(config.weights)
        self._model = config.model

    async def start(self) -> Start:
        version = await self._client.version()
        return Start(version=version, taken=await self.bring(version))

    async def bring(self, version: Version) -> bool:
        folder = self._folder(version)
        theirs, ours = await self._client.manifest(version), await asyncio.to_thread(self._store.files, version)
        if ours is not None and set(ours) <= set(theirs.files):
            return False
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await self._client.take(version, folder, seed=self._model)
        return True

    async def give(self, lease: str, version: Version) -> None:
        await self._client.give(lease, version, self._folder(version))
        await asyncio.to_thread(self._store.prune, _KEPT)

    def _folder(self, version: Version) -> str:
        """As `DiskWeightStore` names it."""
        return str(self._root / f"v{version:06d}")

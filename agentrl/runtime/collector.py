"""Batches at fixed weights: ports.Trainer that trains nothing and keeps what it is given, for `agentrl rollout`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from agentrl.records import Batch, StepReport, Version


class Collector:
    """Writes each batch to FOLDER/000001.msgpack (records.Batch) and is ready at once for the next."""

    def __init__(self, folder: Path, version: Version) -> None:
        self._folder = folder
        self._version = version
        self._ready = asyncio.Event()
        self._ready.set()

    async def wait_ready(self) -> Version:
        await self._ready.wait()
        self._ready.clear()
        return self._version

    async def step(self, batch: Batch) -> StepReport:
        await asyncio.to_thread(self._write, batch)
        self._ready.set()
        return StepReport(batch=batch.id, version=batch.version, seconds=0.0)

    def _write(self, batch: Batch) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{batch.id + 1:06d}.msgpack"
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.msgpack.encode(batch))
        partial.replace(path)

    async def aclose(self) -> None:
        """Nothing to close."""

"""Weights into a running SGLang engine without a disk between: a sender broadcasts, the engine's GPUs receive.

The sender is rank 0 of a group of its own with each engine; rank i of the engine is 1 + i. The group is made while the
engine serves, before its first broadcast, and kept for its life. Between begin and end the engine's weights are of no
version; what fails there tears them, and only a start anew mends that.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol

from agentrl.errors import AgentRLError, EngineTorn, UnavailableError
from agentrl.records import Version
from agentrl.serve.staging import Tensor, tensors

BUCKET_BYTES = 1 << 29  # of one call: the engine holds as much twice for a moment

Post = Callable[[str, dict[str, Any], float], Coroutine[Any, Any, None]]
"""POST to the engine: path, body, seconds."""


class Sender(Protocol):
    """A process that holds the versions' files and is rank 0 of every group. Its calls raise UnavailableError."""

    @property
    def address(self) -> str:
        """Of its machine, as the engines reach it."""
        ...

    @property
    def backend(self) -> str: ...

    async def open(self, group: str, *, deadline_s: float) -> int:
        """The port at which the group's members meet."""
        ...

    async def join(self, group: str, members: int, *, deadline_s: float) -> None:
        """Returns when all members are there."""
        ...

    async def send(self, group: str, path: str, names: list[str], *, deadline_s: float) -> None:
        """These tensors of the version's folder, in this order. Returns when all members have them."""
        ...

    async def leave(self, group: str) -> None: ...


class Broadcast:
    """One engine's side. `post` is the engine's; whoever has a Broadcast closes it."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._group = ""

    async def join(self, post: Post, split: int, *, deadline_s: float) -> None:
        """Make the group, unless there is one. split: processes of the engine."""
        if self._group:
            return
        group, sender = f"agentrl-{secrets.token_hex(4)}", self._sender
        port = await sender.open(group, deadline_s=deadline_s)
        body = {
            "master_address": sender.address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + split,
            "group_name": group,
            "backend": sender.backend,
        }
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(post("/init_weights_update_group", body, deadline_s), name=f"{group} engine")
                both.create_task(sender.join(group, 1 + split, deadline_s=deadline_s), name=f"{group} sender")
        except BaseExceptionGroup as failed:
            await sender.leave(group)
            raise _first(failed) from failed
        self._group = group

    async def update(self, post: Post, path: str, version: Version, *, deadline_s: float) -> None:
        """The paused engine's weights become those of the folder at `path`, here. EngineTorn where that fails."""
        end = time.monotonic() + deadline_s
        buckets = list(_buckets(await asyncio.to_thread(tensors, Path(path))))
        try:
            await post("/begin_weight_update", {}, end - time.monotonic())
            for number, bucket in enumerate(buckets, 1):
                await self._bucket(post, path, bucket, version if number == len(buckets) else None, end)
            await post("/end_weight_update", {}, end - time.monotonic())
        except AgentRLError as exc:
            await self.aclose()
            raise EngineTorn(f"version {version} arrived in part: {exc}", hint="It is started anew.") from exc

    async def _bucket(self, post: Post, path: str, bucket: list[Tensor], version: Version | None, end: float) -> None:
        """version: of the last one, whose end is the version's."""
        body = {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [tensor.dtype for tensor in bucket],
            "shapes": [list(tensor.shape) for tensor in bucket],
            "group_name": self._group,
            "flush_cache": False,
            "weight_version": None if version is None else str(version),
        }
        left_s = end - time.monotonic()
        names = [tensor.name for tensor in bucket]
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(post("/update_weights_from_distributed", body, left_s), name="receive")
                both.create_task(self._sender.send(self._group, path, names, deadline_s=left_s), name="send")
        except BaseExceptionGroup as failed:
            raise _first(failed) from failed

    async def aclose(self) -> None:
        group, self._group = self._group, ""
        if group:
            await self._sender.leave(group)


def _buckets(found: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in found:
        if bucket and size + tensor.bytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.bytes
    if bucket:
        yield bucket


def _first(failed: BaseExceptionGroup[BaseException]) -> AgentRLError:
    """What went wrong first; a failure that is no typed one is the sender's."""
    for exc in failed.exceptions:
        if isinstance(exc, AgentRLError):
            return exc
    return UnavailableError(f"{failed.exceptions[0]!r}")

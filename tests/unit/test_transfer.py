"""Weights to a host: what is missing is sent, what is damaged is refused, what is pruned here goes there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import DataError, UnavailableError, UserError
from agentrl.hosts.local import LocalHost
from agentrl.publish.store import DiskWeightStore
from agentrl.publish.transfer import HostFolders, folders_of
from agentrl.records import Version
from agentrl.serve import staging


class Counting(LocalHost):
    """Notes what is sent; `fail` may raise."""

    def __init__(self, *, fail: Callable[[str], None] = lambda source: None) -> None:
        super().__init__("far")
        self.sent: list[str] = []
        self._fail = fail

    async def send(self, source: str, path: str, **how: Any) -> None:
        self._fail(source)
        self.sent.append(Path(source).name)
        await super().send(source, path, **how)


@pytest.fixture
def store(tmp_path: Path) -> DiskWeightStore:
    """Versions 0 to 2; each has its own weights and the configuration of the first."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights 0" * 1_000)
    made = DiskWeightStore(str(tmp_path / "store"))
    made.adopt(str(model))
    for number in (1, 2):
        text = b"weights %d" % number * 1_000
        made.put(Version(number), lambda to, text=text: Path(to, "model.safetensors").write_bytes(text))  # type: ignore[misc]
    return made


def versions_at(root: Path) -> list[str]:
    return sorted(folder.name[:7] for folder in root.iterdir())


def test_only_what_is_missing_is_sent(store: DiskWeightStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        host, root = Counting(), tmp_path / "there"
        told: list[tuple[str, float | None]] = []
        folders = HostFolders(
            host, str(root), shared=False, progress=lambda who, what, share=None: told.append((who, share))
        )
        first = await folders.bring(store.path(Version(0)), Version(0))
        assert told == [("far", 1.0)]
        assert sorted(host.sent) == ["config.json", "model.safetensors"]
        assert staging.verify(first, Version(0)) > 9_000
        host.sent.clear()
        second = await folders.bring(store.path(Version(1)), Version(1))
        assert host.sent == ["model.safetensors"]
        assert (Path(second) / "config.json").samefile(Path(first) / "config.json")
        host.sent.clear()
        assert await folders.bring(store.path(Version(1)), Version(1)) == second
        assert await folders.find(store.path(Version(0)), Version(0)) == first
        assert host.sent == []

    asyncio.run(scenario())


def test_versions_are_pruned_there_too(store: DiskWeightStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        root = tmp_path / "there"
        folders = HostFolders(Counting(), str(root), shared=False)
        for number in (0, 1):
            await folders.bring(store.path(Version(number)), Version(number))
        (root / ".part-v000009-dead").mkdir()
        store.prune(1, pinned=[Version(1)])
        await folders.bring(store.path(Version(2)), Version(2))
        assert versions_at(root) == ["v000001", "v000002"]

    asyncio.run(scenario())


def test_a_transfer_that_was_cut_goes_on_where_it_was(store: DiskWeightStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        def cut(source: str) -> None:
            if source.endswith("config.json"):
                raise UnavailableError("the link is gone")

        root = tmp_path / "there"
        with pytest.raises(UnavailableError, match="the link is gone"):
            await HostFolders(Counting(fail=cut), str(root), shared=False).bring(store.path(Version(0)), Version(0))
        assert versions_at(root) == [".part-v"]
        part = next(root.iterdir())
        (part / "model.safetensors").write_bytes(b"weights 0" * 1_000)  # arrived, or not: the order is not promised
        host = Counting()
        await HostFolders(host, str(root), shared=False).bring(store.path(Version(0)), Version(0))
        assert host.sent == ["config.json"]
        assert versions_at(root) == ["v000000"]

    asyncio.run(scenario())


def test_what_arrives_damaged_is_refused_and_sent_again(store: DiskWeightStore, tmp_path: Path) -> None:
    class Damaging(Counting):
        async def send(self, source: str, path: str, **how: Any) -> None:
            await super().send(source, path, **how)
            if len(self.sent) <= 2 and path.endswith("model.safetensors"):
                await self.write(path, b"weights ?" * 1_000)

    async def scenario() -> None:
        root = tmp_path / "there"
        host = Damaging()
        folders = HostFolders(host, str(root), shared=False)
        with pytest.raises(DataError, match=r"far: .*model.safetensors: checksum differs"):
            await folders.bring(store.path(Version(0)), Version(0))
        await folders.bring(store.path(Version(0)), Version(0))
        assert host.sent[2:] == ["model.safetensors"]

    asyncio.run(scenario())


def test_what_lies_beside_is_not_sent(store: DiskWeightStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        host, model = Counting(), tmp_path / "model"
        (model / "config.json").write_text("[]")  # of the same size, and another
        folders = HostFolders(host, str(tmp_path / "there"), shared=False, near=str(model))
        there = Path(await folders.bring(store.path(Version(0)), Version(0)))
        assert host.sent == ["config.json"]
        assert (there / "model.safetensors").samefile(model / "model.safetensors")
        assert (there / "config.json").read_text() == "{}"

    asyncio.run(scenario())


def test_the_same_number_of_another_run_is_another_folder(store: DiskWeightStore, tmp_path: Path) -> None:
    async def scenario() -> None:
        other = DiskWeightStore(str(tmp_path / "other"))
        model = tmp_path / "model2"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"else")
        other.adopt(str(model))
        folders = HostFolders(Counting(), str(tmp_path / "there"), shared=False)
        mine = await folders.bring(store.path(Version(0)), Version(0))
        theirs = await folders.bring(other.path(Version(0)), Version(0))
        assert mine != theirs
        assert (Path(theirs) / "model.safetensors").read_bytes() == b"else"

    asyncio.run(scenario())


def test_a_full_disk_there_is_the_hosts_fault(store: DiskWeightStore, tmp_path: Path) -> None:
    def full(source: str) -> None:
        raise UserError(f"{source}: No space left on device")

    async def scenario() -> None:
        folders = HostFolders(Counting(fail=full), str(tmp_path / "there"), shared=False)
        with pytest.raises(UnavailableError, match=r"far: version 0 cannot be sent: .*No space left") as caught:
            await folders.bring(store.path(Version(0)), Version(0))
        assert "hosts.home" in caught.value.hint

    asyncio.run(scenario())


def test_a_shared_file_system_is_found_by_trying(store: DiskWeightStore, tmp_path: Path) -> None:
    class Far(Counting):
        """local says whether to take its word; elsewhere: its paths lead to another disk."""

        local = False

        def __init__(self, *, elsewhere: bool) -> None:
            super().__init__()
            self._elsewhere = elsewhere

        async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
            return await super().read(f"/elsewhere{path}" if self._elsewhere else path, limit=limit)

    async def scenario() -> None:
        where, root = str(tmp_path / "store"), str(tmp_path / "there")
        shared = await folders_of(Far(elsewhere=False), "auto", store=where, root=root)
        path = store.path(Version(1))
        assert await shared.bring(path, Version(1)) == await shared.find(path, Version(1)) == path
        (Path(path) / "model.safetensors").write_bytes(b"torn")
        with pytest.raises(DataError, match=r"far: .*checksum differs"):
            await shared.bring(path, Version(1))
        apart = await folders_of(Far(elsewhere=True), "auto", store=where, root=root)
        assert (await apart.bring(store.path(Version(2)), Version(2))).startswith(root)
        with pytest.raises(UserError, match=r"hosts.far.weights: shared, but .* is not the same folder there"):
            await folders_of(Far(elsewhere=True), "shared", store=where, root=root)

    asyncio.run(scenario())
    assert not list((tmp_path / "store").glob(".seen*"))

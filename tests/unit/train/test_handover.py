"""Weights between a trainer and a run that share no disk: the client against the real face."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl import wire
from agentrl.errors import DataError, UnavailableError, UserError
from agentrl.publish.inbox import WeightInbox
from agentrl.publish.store import DiskWeightStore
from agentrl.records import StepReport, Version, WeightsManifest
from agentrl.train import folders
from agentrl.train.client import LeaseLost, RunClient
from tests.faces import TOKEN, Line, Served, served
from tests.toy_policy import make_batch

BIG = 300_000  # bytes of the weights file

Use = Callable[[RunClient, Served, str], Awaitable[None]]


def model(at: Path, fill: int = 0, size: int = BIG) -> Path:
    at.mkdir(parents=True)
    (at / "config.json").write_text("{}")
    (at / "empty.txt").touch()
    (at / "model.safetensors").write_bytes(bytes([fill]) * size)
    return at


def weights(face: Served) -> bytes:
    return Path(face.store.path(Version(1)), "model.safetensors").read_bytes()


def talk(run: Path, use: Use, *, lasts: int | None = None, within_s: float = 30.0) -> None:
    """A client that holds a lease on batch 0, over a line whose connections last `lasts` bytes."""

    async def main() -> None:
        async with asyncio.timeout(within_s), served(run / "there", model(run / "model")) as face:
            line = Line(face.url, lasts if lasts is not None else 1 << 40)
            async with line.open() as url, RunClient(url, TOKEN, patience_s=10) as client:
                stepping = asyncio.ensure_future(face.desk.step(make_batch()))
                claim = await client.claim(Version(0), lease_s=60, wait_s=10)
                assert claim is not None
                await use(client, face, claim.lease)
                assert lasts is None or line.cuts > 2
                stepping.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("lasts", [None, 90_000])
def test_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasts: int | None) -> None:
    monkeypatch.setattr("agentrl.train.client._PART", 70_000)

    async def use(client: RunClient, face: Served, lease: str) -> None:
        assert await client.version() == 0
        assert await client.recipe() == 'name = "far"\n'
        here = tmp_path / "here" / "v000000"
        await client.take(Version(0), str(here))
        assert (here / "model.safetensors").read_bytes() == bytes(BIG)
        DiskWeightStore(str(tmp_path / "here")).verify(Version(0))
        made = model(tmp_path / "made", fill=1)
        await client.give(lease, Version(1), str(made), extra={"batch": 0})
        face.store.verify(Version(1))
        assert weights(face) == b"\1" * BIG
        assert face.store.manifest(Version(1)).extra == {"batch": 0}
        assert sorted(p.name for p in (tmp_path / "there" / "weights").iterdir()) == ["v000000", "v000001"]
        await client.give(lease, Version(1), str(made))  # once more: nothing to do
        await client.ack(lease, StepReport(batch=0, version=Version(1), seconds=1.0))

    talk(tmp_path, use, lasts=lasts)


def test_what_came_before_a_kill_is_not_sent_again(tmp_path: Path) -> None:
    async def use(client: RunClient, face: Served, lease: str) -> None:
        made = model(tmp_path / "made", fill=1)
        manifest = folders.manifest(str(made), Version(1), {})
        half = (made / "model.safetensors").read_bytes()[: BIG // 2]
        first = WeightInbox(face.store, str(tmp_path / "there" / "weights"))
        assert await first.offer(manifest) == {"config.json": 0, "model.safetensors": 0}
        assert await first.receive("model.safetensors", 0, pieces(half)) == BIG // 2
        line = Line(face.url, 1 << 40)
        async with line.open() as url, RunClient(url, TOKEN) as again:
            await again.give(lease, Version(1), str(made))
        assert BIG // 2 < line.bytes < BIG
        face.store.verify(Version(1))

    talk(tmp_path, use)


def test_files_that_are_here_already_are_not_taken(tmp_path: Path) -> None:
    async def use(client: RunClient, face: Served, lease: str) -> None:
        line = Line(face.url, 1 << 40)
        async with line.open() as url, RunClient(url, TOKEN) as fresh:
            await fresh.take(Version(0), str(tmp_path / "v"), seed=str(tmp_path / "model"))
        assert line.bytes < BIG // 10
        other = model(tmp_path / "other", fill=7)
        await client.take(Version(0), str(tmp_path / "w"), seed=str(other))
        assert (tmp_path / "w" / "model.safetensors").read_bytes() == bytes(BIG)

    talk(tmp_path, use)


def test_only_the_holder_of_the_lease_may_give_and_only_what_it_owes(tmp_path: Path) -> None:
    async def use(client: RunClient, face: Served, lease: str) -> None:
        made = str(model(tmp_path / "made", fill=1))
        with pytest.raises(LeaseLost, match="not in force"):
            await client.give("somebody's", Version(1), made)
        with pytest.raises(LeaseLost, match="makes version 1, not 2"):
            await client.give(lease, Version(2), made)
        with pytest.raises(LeaseLost):
            await client._send("somebody's", Path(made) / "config.json", 0, 2)
        await client.give(lease, Version(1), made)
        await client.ack(lease, StepReport(batch=0, version=Version(1), seconds=1.0))
        with pytest.raises(LeaseLost):  # engines may be loading it by now
            await client.give(lease, Version(1), str(model(tmp_path / "late", fill=2)))
        assert weights(face) == b"\1" * BIG

    talk(tmp_path, use)


def test_weights_that_are_not_what_was_offered(tmp_path: Path) -> None:
    async def use(client: RunClient, face: Served, lease: str) -> None:
        made = model(tmp_path / "made", fill=1)
        files = folders.manifest(str(made), Version(1), {}).files
        wrong = WeightsManifest(version=Version(1), files=tuple((n, "0" * 64, size) for n, _, size in files))
        (made / wire.MANIFEST).write_bytes(msgspec.json.encode(wrong))
        with pytest.raises(DataError, match="not as announced"):
            await client.give(lease, Version(1), str(made))
        long = WeightsManifest(version=Version(1), files=tuple((n, s, size + 5) for n, s, size in files))
        (made / wire.MANIFEST).write_bytes(msgspec.json.encode(long))
        with pytest.raises(DataError, match="cannot be sent whole"):
            await client.give(lease, Version(1), str(made))
        with pytest.raises(UserError, match="no weights here"):
            await client.give(lease, Version(1), str(tmp_path / "nothing"))
        with pytest.raises(DataError, match="no complete version 9"):
            await client.take(Version(9), str(tmp_path / "v9"))
        assert face.store.versions() == [0]

    talk(tmp_path, use)


@pytest.mark.parametrize("name", ["../v000000/config.json", "a/b", "", ".hidden", "manifest.json", "x" * 300, "a\0b"])
def test_a_name_that_would_lead_elsewhere(tmp_path: Path, name: str) -> None:
    async def use(client: RunClient, face: Served, lease: str) -> None:
        manifest = WeightsManifest(version=Version(1), files=((name, "0" * 64, 1),))
        with pytest.raises(DataError, match="cannot be a file"):
            await client._offer(wire.WeightsOffer(lease=lease, manifest=manifest))

    talk(tmp_path, use)


def test_no_room_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    async def use(client: RunClient, face: Served, lease: str) -> None:
        manifest = WeightsManifest(version=Version(1), files=(("model.safetensors", "0" * 64, 1 << 60),))
        with pytest.raises(UnavailableError, match="MB are free"):
            await client._offer(wire.WeightsOffer(lease=lease, manifest=manifest))

    talk(tmp_path, use)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    async def use(client: RunClient, face: Served, lease: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(UnavailableError, match="cannot be written"):
            await client.take(Version(0), str(tmp_path / "file" / "v0"))

    talk(tmp_path, use)


def test_the_newest_sender_of_a_file_has_it(tmp_path: Path) -> None:
    """One whose line hangs may wake up later: its bytes are of a place that is taken."""

    async def main() -> None:
        inbox = WeightInbox(DiskWeightStore(str(tmp_path)), str(tmp_path))
        with pytest.raises(UserError, match="was not offered"):
            await inbox.receive("w.safetensors", 0, pieces(b"x"))
        await inbox.offer(WeightsManifest(version=Version(1), files=(("w.safetensors", "0" * 64, 10),)))
        written, awake = asyncio.Event(), asyncio.Event()

        async def hanging() -> AsyncIterator[bytes]:
            yield b"abc"
            written.set()
            await awake.wait()
            yield b"OLD"

        first = asyncio.ensure_future(inbox.receive("w.safetensors", 0, hanging()))
        await written.wait()
        assert await inbox.receive("w.safetensors", 3, pieces(b"def")) == 6
        awake.set()
        assert await first == 6
        assert (tmp_path / ".incoming" / "w.safetensors").read_bytes() == b"abcdef"

    asyncio.run(main())


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@given(st.lists(st.tuples(st.integers(0, 40), st.binary(max_size=15)), max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_land_only_where_they_belong(tmp_path: Path, sends: list[tuple[int, bytes]]) -> None:
    """Whatever offsets senders believe in, the file is a prefix of what was sent at the right ones."""

    async def main() -> None:
        root = tmp_path / os.urandom(8).hex()
        inbox = WeightInbox(DiskWeightStore(str(root)), str(root))
        manifest = WeightsManifest(version=Version(1), files=(("w.safetensors", "0" * 64, 40),))
        await inbox.offer(manifest)
        held = b""
        for offset, data in sends:
            if offset == len(held) and len(held) + len(data) > 40:
                with pytest.raises(UserError, match="longer than"):
                    await inbox.receive("w.safetensors", offset, pieces(data))
            else:
                held += data if offset == len(held) else b""
                assert await inbox.receive("w.safetensors", offset, pieces(data)) == len(held)
        if len(held) < 40:
            assert await inbox.offer(manifest) == {"w.safetensors": len(held)}

    asyncio.run(main())


@pytest.mark.slow
def test_how_fast(tmp_path: Path) -> None:
    """Prints it; client and run share this process."""

    async def use(client: RunClient, face: Served, lease: str) -> None:
        made = model(tmp_path / "made")
        with (made / "model.safetensors").open("wb") as file:
            file.write(os.urandom(1 << 30))
        late = asyncio.ensure_future(lateness())
        began = time.perf_counter()
        await client.give(lease, Version(1), str(made))
        given = time.perf_counter()
        await client.take(Version(1), str(tmp_path / "taken"))
        taken = time.perf_counter()
        late.cancel()
        worst = max(await late)
        print(f"1 GiB: {given - began:.1f} s to the run, {taken - given:.1f} s from it; event loop late {worst:.3f} s")

    talk(tmp_path, use, within_s=110.0)


async def lateness() -> list[float]:
    """Of the event loop, until it is cancelled."""
    found = [0.0]
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            found.append(time.perf_counter() - due)
    return found

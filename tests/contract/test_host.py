"""What every Host promises, whatever lies between it and us."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.hosts.local import LocalHost
from agentrl.ports import Host

pytestmark = pytest.mark.live


@pytest.fixture
def host() -> Host:
    return LocalHost()


def test_run_gives_code_and_output_and_takes_input(host: Host) -> None:
    async def scenario() -> None:
        assert await host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=20) == (3, "out\nerr\n")
        assert await host.run(["cat"], timeout_s=20) == (0, "")
        assert await host.run(["tr", "a", "b"], timeout_s=20, stdin=b"aXa" * 100_000) == (0, "bXb" * 100_000)
        assert (await host.run(["sh", "-c", "kill -9 $$"], timeout_s=20))[0] == 128 + 9

    asyncio.run(scenario())


def test_files_are_replaced_and_read(host: Host, tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "a" / "b" / "file"
        await host.write(str(path), b"one")
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, path.parent.parent)] == [
            0o600,
            0o700,
            0o700,
        ]
        await host.write(str(path), b"two", mode=0o644)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert (await host.read(str(path)), await host.read(str(path), limit=2)) == (b"two", b"tw")
        assert os.listdir(path.parent) == ["file"]
        with pytest.raises(FileNotFoundError):
            await host.read(str(path.with_name("none")))
        with pytest.raises(UserError, match="b: "):
            await host.read(str(path.parent))
        with pytest.raises(UserError, match="file"):
            await host.write(str(path / "below"), b"")

    asyncio.run(scenario())


def test_what_is_sent_is_all_that_is_there(host: Host, tmp_path: Path) -> None:
    async def scenario() -> None:
        source, target = tmp_path / "source", tmp_path / "x" / "target"
        (source / "deep").mkdir(parents=True)
        (source / "deep" / "program").write_bytes(b"#!")
        (source / "deep" / "program").chmod(0o755)
        (source / "link").symlink_to("deep/program")
        await host.send(str(source), str(target), deadline_s=20)
        (target / "stray").touch()
        await host.send(str(source), str(target), deadline_s=20)
        assert sorted(str(p.relative_to(target)) for p in target.rglob("*")) == ["deep", "deep/program", "link"]
        assert (target / "link").read_bytes() == b"#!"
        assert not (target / "link").is_symlink()
        assert stat.S_IMODE((target / "deep" / "program").stat().st_mode) == 0o755
        await host.send(str(source / "link"), str(tmp_path / "x" / "file"), deadline_s=20)
        assert (tmp_path / "x" / "file").read_bytes() == b"#!"
        assert sorted(os.listdir(tmp_path / "x")) == ["file", "target"]
        with pytest.raises(UserError, match="none"):
            await host.send(str(tmp_path / "none"), str(target), deadline_s=20)
        assert sorted(os.listdir(tmp_path / "x")) == ["file", "target"]

    asyncio.run(scenario())

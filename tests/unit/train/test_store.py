import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.errors import DataError, UnavailableError, UserError
from agentrl.publish.store import DiskWeightStore
from agentrl.records import Version

V = Version


def write(data: bytes = b"weights") -> object:
    def into(folder: str) -> None:
        path = Path(folder, "model.safetensors")
        path.write_bytes(data)
        path.chmod(0o600)
        Path(folder, "config.json").write_text("{}")

    return into


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write(b"initial")(str(folder))  # type: ignore[operator]
    (folder / "tokenizer.json").write_text("tokens")
    (folder / "chat_template.jinja").write_text("template")
    return folder


@pytest.fixture
def store(tmp_path: Path, model: Path) -> DiskWeightStore:
    store = DiskWeightStore(str(tmp_path / "weights"))
    store.adopt(str(model))
    return store


def names(folder: str) -> list[str]:
    return sorted(p.name for p in Path(folder).iterdir())


def test_a_version_is_a_whole_model_folder(store: DiskWeightStore) -> None:
    path = store.put(V(1), write(b"one"), extra={"batch": 4})
    assert names(path) == ["chat_template.jinja", "config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    assert path == store.path(V(1))
    assert store.manifest(V(1)).extra == {"batch": 4}
    assert Path(path, "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert store.latest() == 1
    store.verify(V(1))


def test_version_zero_is_the_model_as_given(store: DiskWeightStore, model: Path) -> None:
    path = Path(store.path(V(0)))
    assert (path / "model.safetensors").read_bytes() == b"initial"
    assert not (path / "model.safetensors").samefile(model / "model.safetensors")  # it may be edited in place
    before = (path / "manifest.json").stat().st_ino
    assert store.adopt(str(model)) == str(path)
    assert (path / "manifest.json").stat().st_ino == before  # a second time does nothing
    with pytest.raises(UserError, match="no config"):
        store.adopt(str(model.parent))


def test_a_large_model_is_linked_and_left_as_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.publish.store._LINK_FROM", 7)
    path = Path(DiskWeightStore(str(tmp_path / "weights")).adopt(str(model)))
    assert (path / "model.safetensors").samefile(model / "model.safetensors")
    assert (model / "model.safetensors").stat().st_mode & 0o777 == 0o600


def test_nothing_is_visible_until_it_is_complete(store: DiskWeightStore, tmp_path: Path) -> None:
    def into(folder: str) -> None:
        write()(folder)  # type: ignore[operator]
        assert store.versions() == [0]
        assert DiskWeightStore(str(tmp_path / "weights")).versions() == [0]  # another process opens meanwhile
        assert Path(folder, "model.safetensors").exists()  # and leaves the live writer's files alone

    store.put(V(1), into)
    assert store.versions() == [0, 1]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ValueError("bug"), KeyboardInterrupt()])
def test_a_failed_write_leaves_nothing(store: DiskWeightStore, tmp_path: Path, error: BaseException) -> None:
    def into(folder: str) -> None:
        write()(folder)  # type: ignore[operator]
        raise error

    with pytest.raises((UnavailableError, ValueError, KeyboardInterrupt)):
        store.put(V(1), into)
    assert names(str(tmp_path / "weights")) == ["v000000"]


def test_a_killed_writer_leaves_nothing_after_the_next_open(tmp_path: Path, store: DiskWeightStore) -> None:
    root = str(tmp_path / "weights")
    code = f"""
import os, signal
from pathlib import Path
from agentrl.publish.store import DiskWeightStore
def into(folder):
    Path(folder, "model.safetensors").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
DiskWeightStore({root!r}).put(1, into)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(names(root)) == 2
    reopened = DiskWeightStore(root)
    assert names(root) == ["v000000"]
    assert reopened.latest() == 0


def test_a_version_can_be_made_again(store: DiskWeightStore, tmp_path: Path) -> None:
    store.put(V(1), write(b"one"))
    assert Path(store.put(V(1), write(b"uno")), "model.safetensors").read_bytes() == b"uno"
    store.verify(V(1))
    assert names(str(tmp_path / "weights")) == ["v000000", "v000001"]


def test_damage_is_named(store: DiskWeightStore) -> None:
    weights = Path(store.put(V(1), write(b"one")), "model.safetensors")
    weights.write_bytes(b"oen")
    store.path(V(1))
    with pytest.raises(DataError, match=r"model\.safetensors: checksum"):
        store.verify(V(1))
    weights.write_bytes(b"on")
    with pytest.raises(DataError, match=r"model\.safetensors: has 2 bytes, its manifest says 3"):
        store.path(V(1))
    weights.unlink()
    with pytest.raises(DataError, match=r"model\.safetensors: is missing"):
        store.path(V(1))
    (weights.parent / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="not a manifest"):
        store.path(V(1))
    (weights.parent / "manifest.json").unlink()
    with pytest.raises(DataError, match="no complete version 1"):
        store.path(V(1))
    assert store.latest() == 0


def test_a_write_without_weights_is_refused(store: DiskWeightStore) -> None:
    with pytest.raises(DataError, match="no weights"):
        store.put(V(1), lambda folder: None)
    assert store.versions() == [0]


def test_prune_keeps_the_newest_and_the_pinned(store: DiskWeightStore) -> None:
    for v in range(1, 7):
        store.put(V(v), write())
    store.prune(2, pinned=[V(3)])
    assert store.versions() == [3, 5, 6]
    store.prune(0)
    assert store.versions() == [6]
    store.put(V(7), write())
    assert "tokenizer.json" in names(store.path(V(7)))  # companions live on in whichever version is left


def test_several_prune_at_once(store: DiskWeightStore) -> None:
    for v in range(1, 31):
        store.put(V(v), write())
    with ThreadPoolExecutor(8) as pool:
        for pruned in [pool.submit(store.prune, 2) for _ in range(8)]:
            pruned.result()
    assert store.versions() == [29, 30]


def test_an_unwritable_place_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot hold weights"):
        DiskWeightStore(str(tmp_path / "file" / "weights"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_one_clear_error(small_disk: Path) -> None:
    store = DiskWeightStore(str(small_disk))
    store.put(V(1), write(b"x" * 400_000))
    with pytest.raises(UnavailableError, match="disk full while writing version 2"):
        store.put(V(2), write(b"x" * 800_000))
    assert names(str(small_disk)) == ["v000001"]
    store.verify(V(1))
    store.prune(1)
    store.put(V(2), write(b"x" * 400_000))


def test_a_full_disk_under_safetensors_too(small_disk: Path) -> None:
    import torch
    from safetensors.torch import save_file

    store = DiskWeightStore(str(small_disk))
    big = {"w": torch.zeros(500_000)}
    with pytest.raises(UnavailableError, match="disk full"):
        store.put(V(1), lambda folder: save_file(big, f"{folder}/model.safetensors"))
    assert names(str(small_disk)) == []

"""Model folders on a trainer's side of the network: listed with their checksums, and filled until they are whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import DataError, UnavailableError, UserError
from agentrl.records import Version, WeightsManifest
from agentrl.wire import MANIFEST

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def manifest(folder: str, version: Version, extra: Mapping[str, Any]) -> WeightsManifest:
    """What `folder` holds: its own manifest if that is of `version`, else every file, read whole. UserError where the
    folder holds none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode((Path(folder) / MANIFEST).read_bytes(), type=WeightsManifest)
        if found.version == version:
            return found
    files = sorted(p for p in Path(folder).glob("*") if p.is_file() and p.name != MANIFEST)
    if not files:
        raise UserError(f"{folder}: no weights here", hint="name the folder that save_pretrained wrote")
    listed = tuple((p.name, sha256(p), p.stat().st_size) for p in files)
    return WeightsManifest(version=version, files=listed, extra=dict(extra))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Arriving:
    """A folder beside the final one, which holds what has come so far, also over restarts."""

    def __init__(self, final: Path, manifest: WeightsManifest) -> None:
        self._final = final
        self._manifest = manifest
        self._files = {name: (digest, size) for name, digest, size in manifest.files}
        self.path = final.with_name(f".partial-{final.name}")
        for name in self._files:
            if not _NAME.fullmatch(name):
                raise DataError(f"{name!r} cannot be a file of a version")

    def use(self, seed: str) -> None:
        """Files of `seed` that are the ones wanted."""
        for name, (digest, size) in self._files.items():
            source, target = Path(seed) / name, self.path / name
            there = target.stat().st_size if target.exists() else -1
            same = seed and there < size and source.is_file() and source.stat().st_size == size
            if same and sha256(source) == digest:
                shutil.copyfile(source, target)

    def lacking(self) -> Iterator[tuple[str, int, int]]:
        """(name, bytes there, bytes wanted)."""
        for name, (_, size) in self._files.items():
            path = self.path / name
            path.touch()
            if path.stat().st_size > size:
                path.write_bytes(b"")
            yield name, path.stat().st_size, size

    def append(self, name: str, part: bytes) -> int:
        with (self.path / name).open("ab") as file:
            file.write(part)
            return file.tell()

    def complete(self) -> None:
        """Checked, and renamed into place. DataError names a file whose checksum differs; it comes anew next time."""
        for name, (digest, _) in self._files.items():
            if sha256(self.path / name) != digest:
                (self.path / name).unlink()
                raise DataError(f"{name}: its checksum differs: damaged on its way", hint="Start again.")
        (self.path / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(self._manifest)))
        self.path.rename(self._final)


@contextlib.contextmanager
def arriving(folder: str, manifest: WeightsManifest) -> Iterator[Arriving]:
    """Holds a lock, so that two processes never fill one folder. UnavailableError where another does, or the disk is
    full."""
    made = Arriving(Path(folder), manifest)
    with contextlib.ExitStack() as stack:
        try:
            made.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(made.path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield made
        except BlockingIOError:
            raise UnavailableError(f"{folder}: another process fills it", hint="End it first.") from None
        except OSError as exc:
            raise UnavailableError(f"{folder}: version {manifest.version} cannot be written: {exc.strerror}") from exc

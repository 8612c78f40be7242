"""Versioned weights on disk: a version is complete or absent.

    weights/v000003/   a model folder as transformers and SGLang load it, and manifest.json (size, sha256 of each)

A version is written under a temporary name, synced, and renamed into place. A writer holds a lock on its temporary
folder, so that opening the store can tell what a dead writer left from what a live one is writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import AgentRLError, DataError, UnavailableError, UserError
from agentrl.ports import Progress
from agentrl.records import Version, WeightsManifest

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
_LINK_FROM = 256 << 20  # bytes from which copying a user's file takes longer than it is worth
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


class DiskWeightStore:
    """Many readers and one writer per version, in any processes. No call is on an event loop's budget but `path`."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise UserError(f"{root}: cannot hold weights: {exc.strerror}", hint="Give a writable folder.") from exc
        self._sweep()

    def path(self, version: Version) -> str:
        """Folder of a complete version. DataError where it is absent, or a file is missing or has another size."""
        folder = self._folder(version)
        for name, _, size in self.manifest(version).files:
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes, its manifest says {size}"
                raise DataError(f"{folder / name}: {what}", hint=_remedy(version))
        return str(folder)

    def verify(self, version: Version) -> None:
        """Read every file. DataError names the first whose checksum differs."""
        folder = Path(self.path(version))
        for name, sha256, _ in self.manifest(version).files:
            if _sha256(folder / name) != sha256:
                raise DataError(f"{folder / name}: checksum differs from its manifest", hint=_remedy(version))

    def manifest(self, version: Version) -> WeightsManifest:
        path = self._folder(version) / MANIFEST
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=WeightsManifest)
        except FileNotFoundError:
            raise DataError(f"{path.parent}: no complete version {version}", hint=_remedy(version)) from None
        except (OSError, msgspec.MsgspecError) as exc:
            raise DataError(f"{path}: not a manifest: {exc}", hint=_remedy(version)) from exc
        if manifest.version != version:
            raise DataError(f"{path}: says version {manifest.version}, not {version}", hint=_remedy(version))
        return manifest

    def files(self, version: Version) -> tuple[tuple[str, str, int], ...] | None:
        """(name, sha256, bytes) of a complete version; None where it is not complete."""
        try:
            self.path(version)
        except DataError:
            return None
        return self.manifest(version).files

    def versions(self) -> list[Version]:
        """Complete ones, ascending."""
        names = (p.parent.name for p in self._root.glob(f"v*/{MANIFEST}"))
        return sorted(Version(int(name[1:])) for name in names if name[1:].isdecimal())

    def latest(self) -> Version | None:
        versions = self.versions()
        return versions[-1] if versions else None

    def put(
        self,
        version: Version,
        write: Callable[[str], None],
        *,
        extra: dict[str, Any] | None = None,
        expected: Sequence[tuple[str, str, int]] = (),
    ) -> str:
        """Make `version` from the files that `write` puts into the folder it is given; returns the final folder.

        expected: (name, sha256, bytes) of files that came from elsewhere. DataError names the first that differs.

        Files that the newest other version has beside its weights (tokenizer, templates) and `write` did not make are
        linked in. An earlier `version` is replaced: a trainer that went back may make it again. UnavailableError where
        the disk is full; whatever `write` raises comes through. In both cases nothing is left behind.
        """
        with self._temporary(version) as temporary:
            write(str(temporary))
            for path in temporary.iterdir():  # engines may run as another user, and some writers make 0600 files
                path.chmod(0o644)
            self._link_companions(version, temporary)
            self._commit(version, temporary, extra or {}, expected)
        return str(self._folder(version))

    def adopt(self, folder: str, progress: Progress | None = None) -> str:
        """Make version 0 from a model folder, unless there is one; returns its folder. UserError where it is no model.

        Large files are linked where the disk allows; that the model was edited in place later, `verify` would find.
        """
        if not (Path(folder) / "config.json").is_file():
            raise UserError(f"{folder}: no config.json, so not a model folder", hint="Check model.path in the recipe.")
        if (self._folder(Version(0)) / MANIFEST).exists():
            return self.path(Version(0))
        with self._temporary(Version(0)) as temporary:
            for file in sorted(p for p in Path(folder).iterdir() if p.is_file() and p.name != MANIFEST):
                _place(file, temporary / file.name, link=file.stat().st_size >= _LINK_FROM)
            self._commit(Version(0), temporary, {"source": str(Path(folder).resolve())}, progress=progress)
        return str(self._folder(Version(0)))

    def prune(self, keep: int, pinned: Sequence[Version] = ()) -> None:
        """Remove all but the newest `keep` versions and those pinned. A version disappears whole."""
        versions = self.versions()
        for version in versions[: max(0, len(versions) - max(1, keep))]:
            if version not in pinned:
                self._remove(self._folder(version))

    def _folder(self, version: Version) -> Path:
        return self._root / f"v{version:06d}"

    @contextlib.contextmanager
    def _temporary(self, version: Version) -> Iterator[Path]:
        """A locked folder, gone at the end unless it was renamed. Turns a full disk into one clear error."""
        path = lock = None
        try:
            path, lock = self._locked(version)
            yield path
        except Exception as exc:
            if _is_disk_full(exc):
                free = shutil.disk_usage(self._root).free
                raise UnavailableError(
                    f"{self._root}: disk full while writing version {version} ({free / 2**20:.1f} MiB free)",
                    hint="Free space, or lower publish.keep_versions; the version before is untouched.",
                ) from exc
            if isinstance(exc, OSError):
                raise UnavailableError(f"{self._root}: version {version} cannot be written: {exc}") from exc
            raise
        finally:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    def _locked(self, version: Version) -> tuple[Path, int]:
        path = self._root / f"{_TEMPORARY}v{version:06d}-{uuid.uuid4().hex}"
        path.mkdir(mode=0o755)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists():
                return path, fd
            os.close(fd)
        return self._locked(version)  # a sweep took it before the lock was ours

    def _link_companions(self, version: Version, temporary: Path) -> None:
        others = [v for v in self.versions() if v != version]
        if not others:
            return
        source = self._folder(others[-1])
        for name, _, _ in self.manifest(others[-1]).files:
            if not name.endswith(_WEIGHTS) and not (temporary / name).exists():
                _place(source / name, temporary / name, link=True)

    def _commit(
        self,
        version: Version,
        temporary: Path,
        extra: dict[str, Any],
        expected: Sequence[tuple[str, str, int]] = (),
        progress: Progress | None = None,
    ) -> None:
        files = sorted(p for p in temporary.iterdir() if p.is_file())
        if not any(p.name.endswith(_WEIGHTS) for p in files):
            raise DataError(f"version {version}: no weights among {[p.name for p in files]}")
        listed = _listed(files, version, progress)
        for name, sha256, size in expected:
            if (name, sha256, size) not in listed:
                raise DataError(f"version {version}: {name} is not as announced: it was damaged on its way")
        manifest = WeightsManifest(version=version, files=listed, extra=extra)
        (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        for path in [*files, temporary / MANIFEST]:
            _sync(path)
        _sync(temporary)
        final = self._folder(version)
        if final.exists():
            self._remove(final)
        temporary.rename(final)
        _sync(self._root)

    def _remove(self, folder: Path) -> None:
        """Out of sight in one rename, then off the disk. Another may be pruning too: gone is gone."""
        doomed = self._root / f"{_TEMPORARY}gone-{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove temporary folders whose owner is gone: those that nobody holds a lock on."""
        for path in self._root.glob(f"{_TEMPORARY}*"):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(fd)


def _place(source: Path, target: Path, *, link: bool) -> None:
    if link:
        with contextlib.suppress(OSError):  # another disk, or one without links
            target.hardlink_to(source.resolve())
            return
    shutil.copyfile(source, target)


def _listed(files: Sequence[Path], version: Version, progress: Progress | None) -> tuple[tuple[str, str, int], ...]:
    """(name, sha256, bytes) of each. Of a large model this is what takes long."""
    listed, done, whole = [], 0, sum(path.stat().st_size for path in files) or 1
    for path in files:
        if progress is not None:
            progress(f"weights v{version}", f"checksum of {path.name}", done / whole)
        listed.append((path.name, _sha256(path), path.stat().st_size))
        done += path.stat().st_size
    if progress is not None:
        progress(f"weights v{version}", f"{whole / 1e6:.0f} MB", 1.0)
    return tuple(listed)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_disk_full(exc: BaseException) -> bool:
    """Also where a library wrapped the system's error in its own."""
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if isinstance(exc, AgentRLError):
        return False
    return f"os error {errno.ENOSPC}" in str(exc) or os.strerror(errno.ENOSPC) in str(exc)


def _remedy(version: Version) -> str:
    return f"Remove the folder of version {version}; the trainer makes it again from its checkpoint."

"""The far end of a transfer: `python -m agentrl.publish.receive ROOT`, one order as JSON on standard input.

    ROOT/NAME/          a version: complete, checked against its manifest, or absent
    ROOT/.part-NAME/    what has arrived of one; what is whole of it is not sent again

An order that fails answers with an error, not with an exit code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
ORDER_S = 10

Files = list[tuple[str, str, int]]  # name, sha256, bytes


def missing(root: Path, name: str, files: Files, near: str = "") -> list[str]:
    """Makes the part's folder and links into it what other versions, or the folder `near`, hold; the files that must
    still be sent. Empty and no part: the version is there."""
    if (root / name / MANIFEST).is_file():
        return []
    part = _part(root, name)
    part.mkdir(parents=True, exist_ok=True, mode=0o755)
    held = dict(_held(root))
    wanted = []
    for file, sha256, size in files:
        target = part / file
        if target.is_file() and target.stat().st_size == size and _sha256(target) == sha256:
            continue
        target.unlink(missing_ok=True)
        beside = Path(near) / file
        if near and beside.is_file() and beside.stat().st_size == size and _sha256(beside) == sha256:
            held[sha256] = beside.resolve()
        if not ((source := held.get(sha256)) and _link(source, target, size)):
            wanted.append(file)
    return wanted


def _link(source: Path, target: Path, size: int) -> bool:
    """A symbolic link where the two are on different disks."""
    for link in (target.hardlink_to, target.symlink_to):
        with suppress(OSError):  # pruned meanwhile, or a file system without links
            if source.stat().st_size == size:
                link(source)
                return True
    return False


def commit(root: Path, name: str, files: Files, manifest: str, keep: list[str]) -> int:
    """Checks every file, which also brings it into the page cache, and puts the version in its place; what is not to
    be kept goes. Bytes read. ValueError names the file that differs from the manifest."""
    final, part = root / name, _part(root, name)
    folder = final if (final / MANIFEST).is_file() else part
    for file, sha256, _ in files:
        if _sha256(folder / file) != sha256:
            (part / file).unlink(missing_ok=True)
            raise ValueError(f"{folder / file}: checksum differs from its manifest")
    if folder is part:
        (part / MANIFEST).write_text(manifest)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    prune(root, [name, *keep])
    return sum(size for _, _, size in files)


def prune(root: Path, keep: list[str]) -> None:
    """All but these versions, and parts of any other."""
    for folder in root.iterdir():
        if folder.name.removeprefix(".part-") not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def _part(root: Path, name: str) -> Path:
    return root / f".part-{name}"


def _held(root: Path) -> Iterator[tuple[str, Path]]:
    """sha256 and path of every file of complete versions."""
    for manifest in root.glob(f"v*/{MANIFEST}"):
        for name, sha256, _ in json.loads(manifest.read_text())["files"]:
            yield sha256, manifest.parent / name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(root: str) -> None:
    signal.alarm(ORDER_S)  # whoever asks may be cut off before all of it is here
    order = json.load(sys.stdin)
    signal.alarm(0)
    answer: dict[str, Any]
    try:
        os.umask(0o022)
        if order.pop("do") == "missing":
            answer = {"value": missing(Path(root), **order)}
        else:
            answer = {"value": commit(Path(root), **order)}
    except (OSError, ValueError) as exc:
        answer = {"error": str(exc)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])

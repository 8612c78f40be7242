"""The names of images built from task folders: by content, so that a folder that changed is another image."""

from __future__ import annotations

import hashlib
from pathlib import Path

REPOSITORY = "agentrl-task"


def tag_of(environment: Path) -> str:
    """Of a folder with a Dockerfile and what it copies: every name, mode and byte of it counts. The image that its FROM
    names does not: pin that by its digest."""
    digest = hashlib.sha256()
    for path in sorted(environment.rglob("*")):
        name = path.relative_to(environment).as_posix()
        if path.is_symlink():
            what, data = "link", str(path.readlink()).encode()
        elif path.is_file():
            what, data = oct(path.stat().st_mode & 0o777), path.read_bytes()
        else:
            what, data = "folder", b""
        digest.update(f"{what} {name} {len(data)}\n".encode() + data)
    return f"{REPOSITORY}:{digest.hexdigest()[:24]}"

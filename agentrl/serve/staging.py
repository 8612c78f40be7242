"""Checking a version's folder before an engine is paused for it. Reading it also brings it into the page cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from agentrl.errors import DataError
from agentrl.records import Version, WeightsManifest

MANIFEST = "manifest.json"


def verify(path: str, version: Version) -> int:
    """Bytes read. DataError names the file that is absent, damaged or of another version. Blocks: call in a thread."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"{path}: no such folder", hint="Was the version published completely?")
    expected = _manifest(folder, version)
    names = sorted(expected) if expected else sorted(f.name for f in folder.glob("*.safetensors"))
    if not names:
        raise DataError(f"{path}: holds no weights", hint="Was the version published completely?")
    total = 0
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                total += file.tell()
        except OSError as exc:
            raise DataError(f"{folder / name}: {exc.strerror}", hint="Publish this version again.") from exc
        if expected and digest != expected[name]:
            raise DataError(f"{folder / name}: checksum differs from its manifest", hint="Publish this version again.")
    return total


def _manifest(folder: Path, version: Version) -> dict[str, str]:
    """File name to sha256; empty where there is no manifest."""
    file = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=WeightsManifest)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as exc:
        raise DataError(f"{file}: {exc}", hint="Publish this version again.") from exc
    if manifest.version != version:
        raise DataError(f"{file}: is of version {manifest.version}, not {version}")
    return {name: digest for name, digest, _ in manifest.files}

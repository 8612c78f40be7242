"""Checking a version's folder before an engine is paused for it. Reading it also brings it into the page cache.

SGLang cannot be left to find out: a folder that it cannot read to the end ends the whole engine (0.5.23 rolls back to
the folder it has just failed to read).

`python -m agentrl.serve.staging` does the same on the engine's own machine: a JSON list [check, argument ...] on
standard input, `Answer` on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from agentrl.errors import DataError, DeadlineError
from agentrl.records import Version, WeightsManifest

MANIFEST = "manifest.json"
ORDER_S = 10
_READ_S = 120.0
_SLOWEST = 20e6  # bytes a second that a disk reads: what takes longer is given up
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

Layout = dict[str, tuple[int, ...]]  # tensor name -> shape


class Folders(Protocol):
    """Folders of versions on an engine's machine. `path` is a folder here, `there` and `held` are folders there.

    Calls raise DataError for what is absent, damaged or does not fit, UnavailableError where that machine is gone.
    """

    async def bring(self, path: str, version: Version) -> str:
        """The folder there that holds what `path` holds, whole and read to its end. DeadlineError where nothing moves
        any more; large weights on a slow line may take their time."""
        ...

    async def find(self, path: str, version: Version) -> str:
        """Likewise; what was brought before is not read again."""
        ...

    async def fits(self, there: str, held: str, *, complete: bool) -> None: ...

    async def vocabulary(self, there: str) -> int | None: ...


class Here:
    """`Folders` of an engine on this machine."""

    async def bring(self, path: str, version: Version) -> str:
        limit_s = _READ_S + await asyncio.to_thread(_bytes, Path(path)) / _SLOWEST
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.to_thread(verify, path, version)
        except TimeoutError as exc:
            raise DeadlineError(f"{path}: not read within {limit_s:.0f} s", hint="Is the disk slow?") from exc
        return path

    async def find(self, path: str, version: Version) -> str:
        return path

    async def fits(self, there: str, held: str, *, complete: bool) -> None:
        await asyncio.to_thread(fits, there, held, complete=complete)

    async def vocabulary(self, there: str) -> int | None:
        return await asyncio.to_thread(vocabulary, there)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


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


def fits(path: str, held: str, *, complete: bool) -> None:
    """DataError where the folder at `path` is not whole, or does not go with the folder `held`, if that is still there:
    a tensor has another shape or, where it should be as `complete`, is missing. Reads headers only. Blocks.

    A tensor that is missing SGLang takes from the weights before, and says nothing.
    """
    new = layout(Path(path))
    try:
        old = layout(Path(held))
    except DataError:
        return
    if complete and (missing := sorted(old.keys() - new.keys())):
        raise DataError(f"{path}: {missing[0]} is missing, the engine holds it", hint="Is it the same model?")
    wrong = [name for name, shape in new.items() if old.get(name, shape) != shape]
    if wrong:
        was, found = old[wrong[0]], new[wrong[0]]
        raise DataError(f"{path}: {wrong[0]} has shape {found}, the engine holds {was}", hint="Is it the same model?")


def layout(folder: Path) -> Layout:
    """Of all safetensors in `folder`. DataError names a file that is absent, or shorter than its header says."""
    found: Layout = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= _header(file)
    if not found:
        raise DataError(f"{folder}: no weights", hint="Was the version published completely?")
    with contextlib.suppress(FileNotFoundError):  # a model in one file has no index
        listed = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index).weight_map
        if absent := sorted(listed.keys() - found.keys()):
            raise DataError(f"{folder}: {absent[0]} of {INDEX} is absent", hint="Publish this version again.")
    return found


def vocabulary(folder: str) -> int | None:
    """Number of tokens that the model in `folder` knows; None where its configuration does not say or is not here."""
    try:
        config = msgspec.json.decode((Path(folder) / CONFIG).read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError):
        return None
    return config.vocab_size if config.text_config is None else config.text_config.vocab_size


class _Config(msgspec.Struct):
    vocab_size: int | None = None
    text_config: _Config | None = None  # of models that also see


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    dtype: str = ""


class Tensor(msgspec.Struct, frozen=True):
    """dtype: torch's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


_TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
}


def tensors(folder: Path) -> list[Tensor]:
    """Of all safetensors in `folder`, file by file. DataError as of `layout`, or for an unknown type. Blocks."""
    layout(folder)
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        for name, held in _entries(file).items():
            if held.dtype not in _TORCH:
                raise DataError(f"{file}: {name} is of type {held.dtype}", hint="publish.transfer = disk takes it")
            size = held.data_offsets[1] - held.data_offsets[0]
            found.append(Tensor(name=name, dtype=_TORCH[held.dtype], shape=held.shape, bytes=size))
    return found


def _header(file: Path) -> Layout:
    return {name: tensor.shape for name, tensor in _entries(file).items()}


def _entries(file: Path) -> dict[str, _Tensor]:
    """A safetensors file starts with the length of its header (8 bytes, little endian) and the header, in JSON."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = os.fstat(opened.fileno()).st_size - 8 - length
            entries = msgspec.json.decode(opened.read(length) if size >= 0 else b"", type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        found = {name: msgspec.json.decode(entry, type=_Tensor) for name, entry in entries.items()}
    except (OSError, msgspec.MsgspecError) as exc:
        raise DataError(f"{file}: its header cannot be read ({exc})", hint="Publish this version again.") from exc
    if size != max((tensor.data_offsets[1] for tensor in found.values()), default=0):
        raise DataError(f"{file}: its header and its size do not agree", hint="Publish this version again.")
    return found


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


class Answer(msgspec.Struct):
    """value: what the check returned. error: of a DataError."""

    value: Any = None
    error: str = ""
    hint: str = ""


CHECKS: dict[str, Callable[..., Any]] = {
    "verify": lambda path, version: verify(path, Version(version)),
    "fits": lambda there, held, complete: fits(there, held, complete=complete),
    "vocabulary": vocabulary,
}


def main() -> None:
    signal.alarm(ORDER_S)  # whoever asks may be cut off before all of it is here
    check, *arguments = msgspec.json.decode(sys.stdin.buffer.read())
    signal.alarm(0)
    try:
        answer = Answer(value=CHECKS[check](*arguments))
    except DataError as exc:
        answer = Answer(error=str(exc), hint=exc.hint)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()

"""Whether a model folder is one, found without torch: before anything starts, in milliseconds."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from agentrl.errors import UserError

_HEADER_MAX = 100_000_000  # what the format allows


def check_model(folder: Path) -> int:
    """Bytes of the weights. UserError names the file that is missing, damaged or cut short."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model.path: {folder}: no *.safetensors here", hint="name a folder with weights")
    missing = [name for name in _indexed(folder) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"model.path: {folder / missing[0]} is missing", hint="fetch the model folder again")
    return sum(_check_tensors(file) for file in files)


def _indexed(folder: Path) -> list[str]:
    """The files that a sharded model's index speaks of."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, UnicodeDecodeError) as exc:
        raise UserError(f"model.path: {index}: not an index ({exc})", hint="fetch the model folder again") from exc


def _check_tensors(file: Path) -> int:
    """The format: an 8-byte length, a JSON header with each tensor's place, then the tensors to the end of the file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _HEADER_MAX + 1
        text = opened.read(length) if length <= _HEADER_MAX else b""
    try:
        tensors = json.loads(text)
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
        raise UserError(f"model.path: {file}: no readable header, so no weights", hint=_REMEDY) from exc
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise UserError(f"model.path: {file} has {size} bytes, its header says {wanted}", hint=_REMEDY)
    return size


_REMEDY = "the copy was cut short or is damaged: fetch it again"

"""What can go wrong with the journal's file, said once and in the reader's terms."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path

from agentrl.errors import AgentRLError, DataError, UnavailableError, UserError

_CRC_BYTES = 4


def explain(path: Path, exc: BaseException) -> AgentRLError:
    """The typed error for what SQLite or the file system raised while the journal at `path` was used."""
    if not isinstance(exc, sqlite3.Error | OSError):
        return AgentRLError(f"{path}: a record could not be journalled: {exc!r}", hint="report this as a bug")
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or "No space left" in str(exc):
        return UnavailableError(
            f"{path}: no space left to write the journal; everything acknowledged so far is safe",
            hint=f"free space under {path.parent} and start the same command again: the run resumes",
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DataError(f"{path}: the journal is damaged ({exc})", hint="restore the file from a copy, or start anew")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return UserError(f"{path}: cannot be opened for the journal ({exc})", hint="check the folder and its rights")
    return DataError(f"{path}: the journal could not be written or read ({exc})", hint="check the disk under it")


def seal(body: bytes) -> bytes:
    """The body with its CRC-32 in front, so that a flipped bit is found before it is trained on."""
    return zlib.crc32(body).to_bytes(_CRC_BYTES, "big") + body


def unseal(path: Path, what: str, blob: bytes) -> bytes:
    """DataError naming `what` where the body is not what was sealed."""
    body = blob[_CRC_BYTES:]
    if zlib.crc32(body).to_bytes(_CRC_BYTES, "big") != blob[:_CRC_BYTES]:
        raise DataError(
            f"{path}: {what} does not match its checksum", hint="restore the file from a copy, or start anew"
        )
    return body

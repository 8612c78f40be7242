"""What travels between client and daemon: msgpack bodies over HTTP, errors by class name.

    POST /boxes                Open   -> Opened        POST /boxes/ID/sweep   Sweep  -> int
    POST /boxes/ID/exec        Exec   -> ExecResult    POST /boxes/ID/renew   Renew  -> None
    POST /boxes/ID/put         Put    -> None          POST /boxes/ID/close  Close  -> None
    POST /boxes/ID/get         Get    -> bytes         POST /gc               Gc     -> int
    GET  /status (JSON)        GET /health (200 once it serves; no token needed)

Every other answer is a `Failure` with an HTTP status of 400 or more.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from agentrl import errors
from agentrl.records import File, Lane, Record, Task

T = TypeVar("T")

QUEUE_TIMEOUT_S = 120.0
"""Longest wait for a place in a lane or among the live sandboxes."""

MAX_BODY_BYTES = 256 << 20

_encoder = msgspec.msgpack.Encoder()


class Open(Record):
    request_id: str
    label: str
    lease_s: float
    task: Task
    files: dict[str, File] = {}


class Opened(Record):
    box: str
    queue_s: float = 0.0  # waited for a place among the live sandboxes and for the lane, by the daemon's clock
    run_s: float = 0.0  # start, files, set-up


class Exec(Record):
    request_id: str
    command: str
    timeout_s: float
    lane: Lane | None = None
    cwd: str = ""
    env: dict[str, str] = {}


class Put(Record):
    request_id: str
    files: dict[str, File]


class Get(Record):
    path: str
    limit: int


class Sweep(Record):
    request_id: str


class Renew(Record):
    lease_s: float


class Close(Record):
    pass


class Gc(Record):
    label: str | None = None


class Failure(Record):
    kind: str
    message: str
    hint: str = ""


_STATUS: dict[type[Exception], int] = {
    errors.SandboxLost: 410,
    errors.TaskError: 422,
    errors.UnavailableError: 503,
    errors.DeadlineError: 504,
    errors.InfraError: 502,
    errors.UserError: 400,
    errors.AgentRLError: 500,
    FileNotFoundError: 404,
}
_KINDS = {kind.__name__: kind for kind in _STATUS}


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def decode(body: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(body, type=kind)


def failure_of(error: Exception) -> tuple[int, Failure]:
    """(HTTP status, body). What is not in the tree is a bug of the daemon and says so."""
    kind = next((base for base in type(error).__mro__ if base in _STATUS), None)
    if kind is None and isinstance(error, OSError):
        return 502, Failure(kind="InfraError", message=f"the sandbox host's system refused: {error}")
    if kind is None:
        return 500, Failure(kind="AgentRLError", message=f"bug in the sandbox daemon: {error!r}")
    message = error.filename if isinstance(error, FileNotFoundError) and error.filename else str(error)
    return _STATUS[kind], Failure(kind=kind.__name__, message=message, hint=getattr(error, "hint", ""))


def error_of(failure: Failure) -> Exception:
    kind = _KINDS.get(failure.kind, errors.AgentRLError)
    if issubclass(kind, errors.AgentRLError):
        return kind(failure.message, hint=failure.hint)
    return FileNotFoundError(2, "no such file in the sandbox", failure.message)

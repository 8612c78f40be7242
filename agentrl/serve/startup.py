"""What an SGLang engine is at before it serves: read from its log, for people; and whether it is one we know."""

from __future__ import annotations

import asyncio
import re

from agentrl.errors import AgentRLError, UnavailableError
from agentrl.ports import Host, Progress
from agentrl.serve.wire import OLDEST_SGLANG, release

_EVERY_S = 2.0
_TAIL_BYTES = 65_536
_VERSION_S = 60.0
_VERSION = "from importlib.metadata import version; print(version('sglang'))"

# the last line that is one of these says what it is at; a share is taken from its first group, in percent
_PHASES = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"server_args=", "starts its processes"),
        (r"Load weight begin", "loads weights"),
        (r"Loading safetensors checkpoint shards: +(\d+)% Completed", "loads weights"),
        (r"Load weight end", "weights are loaded"),
        (r"Memory pool end", "KV cache is there"),
        (r"Capture .*graph.* begin", "captures graphs"),
        (r"Capturing [^:]*: +(\d+)%", "captures graphs"),
        (r"Capture .*graph.* end", "graphs are captured"),
        (r"Uvicorn running on", "listens"),
        (r"fired up and ready", "ready"),
    )
)


def phase(log: str) -> tuple[str, float | None] | None:
    """What the end of a log says, and how much of that is done. tqdm writes its bar's states into one line."""
    for line in reversed(re.split(r"[\r\n]", log)):
        for pattern, what in _PHASES:
            if found := pattern.search(line):
                return what, float(found[1]) / 100 if found.groups() else None
    return None


def silent(who: str, what: str, share: float | None = None) -> None:
    """A `ports.Progress` that nobody reads."""


async def follow(host: Host, log: str, who: str, progress: Progress) -> None:
    """Tells what it is at, until cancelled. A host that does not answer now may do so later."""
    said: tuple[str, float | None] | None = None
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            _, text = await host.run(["tail", "-c", str(_TAIL_BYTES), "--", log], timeout_s=_EVERY_S * 5)
        except AgentRLError:
            continue
        at = phase(text)
        if at is not None and at != said:
            progress(who, *at)
            said = at


async def require_sglang(host: Host, python: str) -> None:
    """One error where that interpreter has no SGLang that we can talk to."""
    oldest = ".".join(map(str, OLDEST_SGLANG))
    code, said = await host.run([python, "-c", _VERSION], timeout_s=_VERSION_S)
    where = f"{host.name}: {python}"
    hint = f"pip install 'sglang>={oldest}' there, or name its interpreter by engines.python"
    if code:
        raise UnavailableError(f"{where} has no sglang ({said.strip().rpartition(chr(10))[2]})", hint=hint)
    found = said.strip().rpartition("\n")[2]
    if release(found) < OLDEST_SGLANG:
        raise UnavailableError(f"{where} has sglang {found}; supported is {oldest} and later", hint=hint)

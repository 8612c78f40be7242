"""What a host is and has, told by a probe that runs there once, and how far its clock is from ours."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import AgentRLError, UnavailableError
from agentrl.hosts.claim import Holder
from agentrl.ports import Host
from agentrl.records import Record

_PROBE = Path(__file__).with_name("probe.py")
_LIMIT_S = 60.0
# whatever Python there is will do; that of agentrl may not be there
_ANY_PYTHON = 'for p in "$1" python3; do command -v "$p" >/dev/null && exec "$p" -I - "$2"; done; exit 127'
_NOW = ["python3", "-I", "-S", "-c", "import time; print(time.time())"]
_ASKED_TIME = 3


class Ask(Record):
    """What the probe looks at. python: the interpreter that has, or shall have, agentrl. engines_python: that of
    SGLang, if it is another. sandbox: the recipe's section where sandboxes are to run there."""

    python: str
    home: str
    engines_python: str = ""
    docker: str = "unix:///var/run/docker.sock"
    ports: tuple[int, ...] = ()
    sandbox: Any = None


class Said(Record, forbid_unknown_fields=False):
    """Base of what came from a probe: it may be of a newer agentrl and say more."""


class Who(Said):
    user: str
    uid: int
    machine: str
    system: str
    kernel: str


class Interpreter(Said):
    """Versions are empty where the package is not there; fault says why the interpreter does not run."""

    path: str
    version: str
    agentrl: str
    sglang: str
    torch: str
    fault: str


class Gpu(Said):
    name: str
    memory_mb: int
    used_mb: int


class Gpus(Said):
    driver: str
    gpus: tuple[Gpu, ...]
    fault: str


class Docker(Said):
    version: str
    fault: str


class Disk(Said):
    """path: the folder, on the way to the host's home, that exists. Bytes. fault: why nothing can be written there."""

    path: str
    free: int
    total: int
    fault: str


class Cpus(Said):
    """usable: (id, lowest sibling of its core, NUMA node) of each CPU that this user's processes may use."""

    usable: tuple[tuple[int, int, int], ...]
    sockets: int


class Memory(Said):
    total: int
    available: int


class Started(Holder, forbid_unknown_fields=False):
    """What runs there for a run or service. role: as in the recipe's hosts."""

    role: str


class Boxes(Said):
    isolation: str
    fault: str
    hint: str


class Facts(Said):
    """namespaces: empty where they can be had, else why not. sandbox: None where none was asked for."""

    who: Who
    python: Interpreter
    engines_python: Interpreter | None
    gpus: Gpus
    docker: Docker
    disk: Disk
    cpus: Cpus
    memory: Memory
    sudo: bool
    namespaces: str
    started: tuple[Started, ...]
    ports_taken: tuple[int, ...]
    sandbox: Boxes | None
    clock: tuple[float, float]  # its own clock when the probe began and when it ended

    @property
    def serving(self) -> Interpreter:
        """The interpreter of the engines."""
        return self.engines_python or self.python


class Clock(Record):
    """Its clock minus ours, in seconds, and how far off that may be: half of what the way there and back took."""

    offset_s: float
    error_s: float


async def survey(host: Host, ask: Ask) -> tuple[Facts, Clock]:
    """UnavailableError where it cannot be reached or has no Python, DeadlineError where it does not answer in time."""
    argv = ["sh", "-c", _ANY_PYTHON, "sh", ask.python, msgspec.json.encode(ask).decode()]
    went = time.time()
    code, said = await host.run(argv, timeout_s=_LIMIT_S, stdin=_PROBE.read_bytes())
    came = time.time()
    if code == 127:
        raise UnavailableError(
            f"{host.name}: no Python there (neither {ask.python} nor python3)", hint="install Python 3.11 or newer"
        )
    try:
        facts = msgspec.json.decode(said.strip().rpartition("\n")[2], type=Facts)
    except msgspec.MsgspecError as exc:
        raise UnavailableError(f"{host.name}: the probe ended with {code}: {said.strip()[-300:]}") from exc
    clocks = [between(went, *facts.clock, came), *[await _ask_time(host) for _ in range(_ASKED_TIME)]]
    return facts, min(clocks, key=lambda clock: clock.error_s)


def between(went: float, began: float, ended: float, came: float) -> Clock:
    """Of one question: we sent it at `went` and had the answer at `came`, they worked from `began` to `ended`.

    >>> between(100.0, 105.25, 106.25, 101.5)
    Clock(offset_s=5.0, error_s=0.25)
    """
    return Clock(offset_s=((began - went) + (ended - came)) / 2, error_s=max(0.0, (came - went) - (ended - began)) / 2)


async def _ask_time(host: Host) -> Clock:
    """A question that takes no time there, so its way is short: the best of some is close."""
    went = time.time()
    try:
        _, said = await host.run(_NOW, timeout_s=_LIMIT_S)
        then = float(said)
    except (AgentRLError, ValueError):
        return Clock(offset_s=0.0, error_s=float("inf"))
    return between(went, then, then, time.time())

"""CPU seconds that this process and all it started have spent, by what the processes are for."""

from __future__ import annotations

import contextlib
from collections import Counter

import psutil

CONTROLLER = "controller"
_ROLES = {
    "-m agentrl.serve": "engines",
    "-m sglang": "engines",
    "-m agentrl.sandbox": "sandboxes",
    "-m agentrl.train": "trainer",
}
ROLES = (*dict.fromkeys(_ROLES.values()), CONTROLLER)


def spent() -> Counter[str]:
    """A process's share holds that of its children that have ended; those that nobody waited for are missing."""
    own = psutil.Process()
    roles = {own.pid: CONTROLLER}
    found: Counter[str] = Counter()
    for process in (own, *own.children(recursive=True)):  # parents before their children
        with contextlib.suppress(psutil.Error):
            if process.pid not in roles:
                roles[process.pid] = _role(process.cmdline()) or roles.get(process.ppid(), CONTROLLER)
            found[roles[process.pid]] += sum(process.cpu_times()[:4])
    return found


def _role(command: list[str]) -> str:
    line = " ".join(command)
    return next((role for name, role in _ROLES.items() if name in line), "")

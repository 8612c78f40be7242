"""The init of a `process` box: no namespace, only a child subreaper that knows its descendants and a scratch folder
that it removes when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys

from agentrl.sandbox.backends.inside import init, kernel, supervisor, wire

SETTINGS = "AGENTRL_BOX"


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    settings = json.loads(os.environ[SETTINGS])
    scratch: str = settings["scratch"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel.adopt_orphans()

    def renew(_request: wire.Head | None = None) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        for folder in (settings["workdir"], f"{scratch}/root", f"{scratch}/tmp"):
            os.makedirs(folder, exist_ok=True)

    policy = supervisor.Policy(
        workdir=settings["workdir"],
        env=settings["env"],
        shell="/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh",
        memory_bytes=settings["memory_mb"] << 20,
        file_bytes=settings["disk_mb"] << 20,
        sampled_processes=settings["pids"],
    )
    renew()
    control.send(b"ok")
    try:
        init.serve(control, init.Box(policy, enter=lambda: None, renew=renew, handles=None))
    finally:
        init.kill_all()
        shutil.rmtree(scratch, ignore_errors=True)

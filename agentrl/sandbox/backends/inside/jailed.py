"""The init of a box that another program has built around it (bubblewrap): it is pid 1, inside already, and holds
no more privileges than its commands."""

from __future__ import annotations

import json
import os
import socket
import sys

from agentrl.sandbox.backends.inside import init, kernel, supervisor

SETTINGS = "AGENTRL_BOX"


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(os.environ[SETTINGS])
    handles = tuple(settings["handles"]) or None
    for fd in (control.fileno(), *(handles or ())):
        os.set_inheritable(fd, False)
    kernel.close_to_inspection()
    os.makedirs(settings["workdir"], exist_ok=True)
    policy = supervisor.Policy(
        workdir=settings["workdir"],
        env=settings["env"],
        oom=handles[1] if handles else -1,
        shell="/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh",
        processes=0 if handles else settings["pids"],
        memory_bytes=0 if handles else settings["memory_mb"] << 20,
        disk_bytes=settings["disk_mb"] << 20,
        file_bytes=settings["disk_mb"] << 20,
    )
    control.send(b"ok")
    init.serve(control, init.Box(policy, enter=kernel.drop_privileges, renew=None, handles=handles))

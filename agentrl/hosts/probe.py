"""What a machine is and has, as one JSON line. Standard library only, any Python since 3.8: `survey` sends this file to
an interpreter's standard input there, before anything is installed. What it tries it undoes.

    python3 -I - ASKED          ASKED: the JSON of `survey.Ask`
"""

from __future__ import annotations

import concurrent.futures
import errno
import http.client
import json
import os
import platform
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_QUICK_S = 10.0
_TRY_S = 45.0  # a sandbox of the backend that is asked for
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000

# in the interpreter that is asked about; nothing heavy is imported
_INSTALLED = """
import importlib.metadata as m, json, platform
def of(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return ""
try: import agentrl; ours = agentrl.__version__
except ImportError: ours = ""
print(json.dumps({"version": platform.python_version(), "agentrl": ours, "sglang": of("sglang"), "torch": of("torch")}))
"""


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Everything side by side: it takes as long as the slowest part."""
    began = time.time()
    python, home = (str(Path(asked[name]).expanduser()) for name in ("python", "home"))
    engines = str(Path(asked["engines_python"]).expanduser()) if asked["engines_python"] else python
    jobs = {
        "who": who,
        "python": lambda: interpreter(python),
        "engines_python": lambda: interpreter(engines) if engines != python else None,
        "gpus": gpus,
        "docker": lambda: docker(asked["docker"]),
        "disk": lambda: disk(home),
        "cpus": cpus,
        "memory": memory,
        "sudo": sudo,
        "namespaces": namespaces,
        "started": started,
        "ports_taken": lambda: [port for port in asked["ports"] if taken(port)],
        "sandbox": lambda: sandbox(python, asked["sandbox"]) if asked["sandbox"] else None,
    }
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        running = {name: pool.submit(job) for name, job in jobs.items()}
        said = {name: job.result() for name, job in running.items()}
    said["clock"] = [began, time.time()]
    return said


def who() -> dict[str, Any]:
    names = dict(line.split("=", 1) for line in read("/etc/os-release").splitlines() if "=" in line)
    system = names.get("PRETTY_NAME", "").strip('"')
    user, kernel = name_of(os.getuid()), platform.release()
    return {"user": user, "uid": os.getuid(), "machine": socket.gethostname(), "system": system, "kernel": kernel}


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def run(argv: list[str], stdin: str = "", limit_s: float = _QUICK_S) -> tuple[int, str]:
    """(exit code, what it said); 127 where there is no such program, 124 where it took too long."""
    try:
        done = subprocess.run(
            argv, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s, text=True, cwd="/"
        )
    except OSError as exc:
        return 127, exc.strerror or str(exc)
    except subprocess.TimeoutExpired:
        return 124, f"said nothing for {limit_s:g} s"
    return done.returncode, done.stdout.strip()


def interpreter(python: str) -> dict[str, Any]:
    code, said = run([python, "-I", "-W", "ignore", "-c", _INSTALLED], limit_s=30.0)
    try:
        return dict(json.loads(said.splitlines()[-1]), path=python, fault="")
    except (ValueError, IndexError):
        fault = "no such program" if code == 127 else said[-200:] or f"exit {code}"
        return {"path": python, "version": "", "agentrl": "", "sglang": "", "torch": "", "fault": fault}


def gpus() -> dict[str, Any]:
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    code, said = run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    rows = [[part.strip() for part in line.split(",")] for line in said.splitlines()] if code == 0 else []
    rows = [row for row in rows if len(row) == 4]
    if not rows:
        return {"driver": "", "gpus": [], "fault": "no nvidia-smi" if code == 127 else said[-200:] or "none"}
    held = [{"name": name, "memory_mb": number(total), "used_mb": number(used)} for name, total, used, _ in rows]
    return {"driver": rows[0][3], "gpus": held, "fault": ""}


def number(text: str) -> int:
    return int(float(text)) if text.replace(".", "", 1).isdigit() else 0


def docker(address: str) -> dict[str, Any]:
    """The engine itself is asked: a client program may be absent, and proves nothing."""
    path = address.replace("unix://", "")
    if not Path(path).exists():
        return {"version": "", "fault": "no engine at " + path}
    connection = http.client.HTTPConnection("localhost", timeout=_QUICK_S)
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(_QUICK_S)
        connection.sock.connect(path)
        connection.request("GET", "/version")
        return {"version": json.loads(connection.getresponse().read())["Version"], "fault": ""}
    except PermissionError:
        return {"version": "", "fault": "this user may not use " + path}
    except (OSError, ValueError, KeyError, http.client.HTTPException) as exc:
        return {"version": "", "fault": f"no engine answers at {path} ({exc})"}
    finally:
        connection.close()


def disk(home: str) -> dict[str, Any]:
    """Of the file system below `home`, proved by writing there."""
    at = next(folder for folder in (Path(home), *Path(home).parents) if folder.is_dir())
    sizes = os.statvfs(at)
    free, total = (blocks * sizes.f_frsize for blocks in (sizes.f_bavail, sizes.f_blocks))
    said = {"path": str(at), "free": free, "total": total, "fault": ""}
    try:
        with tempfile.TemporaryFile(dir=at) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        said["fault"] = exc.strerror or str(exc)
    return said


def cpus() -> dict[str, Any]:
    """Of those that this user's processes may use: [id, lowest sibling of its core, NUMA node]."""
    node_of: dict[int, int] = {}
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        node_of.update(dict.fromkeys(listed(f"{folder}/cpulist"), int(folder.name[4:])))
    at = "/sys/devices/system/cpu/cpu{}/topology/{}"
    allowed = sorted(os.sched_getaffinity(0))
    rows = [[n, min(listed(at.format(n, "thread_siblings_list")) or [n]), node_of.get(n, 0)] for n in allowed]
    return {"usable": rows, "sockets": len({read(at.format(n, "physical_package_id")) for n in allowed})}


def listed(path: str) -> list[int]:
    """A kernel's list of CPUs, `0-3,8`."""
    found: list[int] = []
    for part in filter(None, read(path).split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def memory() -> dict[str, Any]:
    rows = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(rows.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return {"total": total, "available": free}


def sudo() -> bool:
    """Whether this user can become root without being asked anything."""
    return os.getuid() == 0 or run(["sudo", "-n", "true"])[0] == 0


def namespaces() -> str:
    """Empty where a process of this user can have namespaces of its own, else why not. Tried in a child."""
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | (_NEWUSER if os.getuid() else 0)
    program = "import ctypes,os,sys;l=ctypes.CDLL(None,use_errno=True);sys.exit(l.unshare(%d) and ctypes.get_errno())"
    code, said = run([sys.executable, "-I", "-S", "-c", program % flags])
    if code == 0:
        return ""
    if code == errno.ENOSPC:  # the kernel's word for a limit
        return "a limit below /proc/sys/user/ is reached"
    return "unshare: " + (os.strerror(code) if 0 < code < 124 else said[-100:])


def started() -> list[dict[str, Any]]:
    """What runs here for some run or service, by the folder that it has here (`inventory.Site`): only what a detached
    guard started has that mark in its environment. Other users' processes show themselves to root only."""
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"AGENTRL_DETACHED=" not in (folder / "environ").read_bytes():
                continue
            words = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
            process = int(folder.name), name_of(folder.stat().st_uid)
        except OSError:
            continue  # another user's, or gone
        roles = ["sandbox" if "agentrl.sandbox.daemon" in words else "engines"]
        if "agentrl.hosts.claim" in words:
            roles = [word for word in words if word in ("engines", "sandbox")]
        for run in [word.rpartition("/runs/")[2].split("/")[0] for word in words if "/runs/" in word][:1]:
            for role in roles:
                found[run, role] = min(found.get((run, role), process), process)
    return [{"run": run, "role": role, "pid": pid, "user": user} for (run, role), (pid, user) in sorted(found.items())]


def taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def sandbox(python: str, section: dict[str, Any]) -> dict[str, Any]:
    """The backend tries itself, where agentrl is installed: {"isolation"} or {"fault", "hint"}."""
    code, said = run([python, "-I", "-W", "ignore", "-m", "agentrl.sandbox.tryout"], json.dumps(section), _TRY_S)
    try:
        return dict({"isolation": "", "fault": "", "hint": ""}, **json.loads(said.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"isolation": "", "fault": said[-200:] or f"exit {code}", "hint": ""}


if __name__ == "__main__":
    signal.alarm(int(2 * _TRY_S))  # whatever hangs, this process does not stay
    sys.stdout.write("\n" + json.dumps(main(json.loads(sys.argv[1]))) + "\n")

"""Memory, process and CPU limits by control groups, version 1 (and hybrid) or 2 behind one class.

Only groups below an own name are touched: `agentrl-<label>/<box>@<owner>`, made below the group this process is in, so
that limits set from outside go on holding. The owner is the launcher's pid and start time: whoever finds a group
can tell whether its owner still lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

TYPE_CHECKING = False  # importing typing would cost memory and time in every box
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PREFIX = "agentrl-"
_REMOVE_S = 2.0  # a killed process leaves its group within microseconds of being reaped; this bounds a stuck one
_TRIES = 100
_DEPTH = 5  # of groups of runs below a mount point
_SPARE_PIDS = 8  # the init and the supervisors of running commands


def _read(path: str) -> str:
    with open(path) as f:
        return f.read()


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def cpu_list(cpus: Sequence[int]) -> str:
    return ",".join(str(c) for c in cpus)


class Group:
    """One box's groups: a directory for each of cpuset, memory and pids (the same one three times in version 2)."""

    def __init__(self, version: int, cpuset: str, memory: str, pids: str) -> None:
        self.version = version
        self.cpuset, self.memory, self.pids = cpuset, memory, pids

    @property
    def directories(self) -> list[str]:
        return list(dict.fromkeys((self.cpuset, self.memory, self.pids)))

    def make(self, *, memory_bytes: int, pids: int, cpus: Sequence[int]) -> None:
        for directory in self.directories:
            for left in reversed(range(_TRIES)):
                try:
                    self._make(directory)
                    break
                except FileNotFoundError:  # the last other box of this run has just taken the parent along
                    if not left:
                        raise
        if self.version == 1:
            self._inherit_cpuset(self.cpuset)
            _write(f"{self.memory}/memory.limit_in_bytes", str(memory_bytes))
            with contextlib.suppress(OSError):  # absent where the kernel does not account swap
                _write(f"{self.memory}/memory.memsw.limit_in_bytes", str(memory_bytes))
        else:
            _write(f"{self.memory}/memory.max", str(memory_bytes))
            with contextlib.suppress(OSError):  # as above
                _write(f"{self.memory}/memory.swap.max", "0")
        _write(f"{self.pids}/pids.max", str(pids + _SPARE_PIDS))
        if cpus:
            _write(f"{self.cpuset}/cpuset.cpus", cpu_list(cpus))

    def _make(self, directory: str) -> None:
        """Whoever made the parent may not have set it up yet; to do so twice is harmless."""
        parent = os.path.dirname(directory)
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent)
        if self.version == 2:
            _write(f"{parent}/cgroup.subtree_control", "+cpuset +memory +pids")
        elif directory == self.cpuset:
            self._inherit_cpuset(parent)
        os.mkdir(directory)

    def _inherit_cpuset(self, directory: str) -> None:
        """Version 1 starts a group with empty sets, in which nothing can run."""
        parent = os.path.dirname(directory)
        for name in ("cpuset.mems", "cpuset.cpus"):
            if not _read(f"{directory}/{name}").strip():
                _write(f"{directory}/{name}", _read(f"{parent}/{name}").strip())

    def enter(self) -> None:
        """Moves the calling process. About 3 ms for each hierarchy (an RCU grace period): once per box, never per
        command."""
        for directory in self.directories:
            _write(f"{directory}/cgroup.procs", "0")

    def handles(self) -> tuple[int, int]:
        """Descriptors that work inside a box, where no control group is mounted: of the CPU set, of the OOM count."""
        return os.open(f"{self.cpuset}/cpuset.cpus", os.O_WRONLY | os.O_CLOEXEC), self.oom_handle()

    def oom_handle(self) -> int:
        oom = "memory.oom_control" if self.version == 1 else "memory.events"
        return os.open(f"{self.memory}/{oom}", os.O_RDONLY | os.O_CLOEXEC)

    def remove(self) -> None:
        deadline = time.monotonic() + _REMOVE_S
        for directory in self.directories:
            _remove(directory, deadline)
            with contextlib.suppress(OSError):  # other boxes of this run still use the parent
                os.rmdir(os.path.dirname(directory))


def move(cpuset: int, cpus: Sequence[int]) -> None:
    """Puts the whole box on `cpus`, what runs included: one write, 0.2 ms."""
    os.pwrite(cpuset, cpu_list(cpus).encode(), 0)


def oom_kills(oom: int) -> int:
    """Processes of the box that the kernel killed at the memory limit, ever."""
    for line in os.pread(oom, 4096, 0).decode().splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return 0


def _remove(directory: str, deadline: float) -> bool:
    """A group can be removed once it is empty; its processes are killed already or get killed here."""
    while True:
        try:
            os.rmdir(directory)
            return True
        except FileNotFoundError:
            return False
        except OSError:
            if time.monotonic() > deadline:
                return False
        with contextlib.suppress(OSError):
            for pid in _read(f"{directory}/cgroup.procs").split():
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.002)  # the kernel tells nobody when a version 1 group becomes empty


class Cgroups:
    """Where groups are made on this machine. `detect` says why not, where they cannot be."""

    def __init__(self, version: int, cpuset: str, memory: str, pids: str, points: Sequence[str] = ()) -> None:
        """The folders to make groups in. points: where the hierarchies are mounted, to look for what others left."""
        self.version = version
        self._bases = (cpuset, memory, pids)
        self._points = tuple(dict.fromkeys(points or self._bases))

    def group(self, label: str, box: str, owner: str) -> Group:
        paths = [f"{base}/{PREFIX}{label}/{box}@{owner}" for base in self._bases]
        return Group(self.version, *paths)

    def reap(self, label: str | None, *, ended: str = "") -> int:
        """Removes the boxes whose owner is gone, or is the one named `ended`; how many."""
        boxes: set[str] = set()
        deadline = time.monotonic() + _REMOVE_S
        for point in self._points:
            for run in list(_runs(point, label, _DEPTH)):
                for box in list(_folders(run)):
                    owner = box.rpartition("@")[2]
                    if (owner == ended or not owner_lives(owner)) and _remove(box, deadline):
                        boxes.add(os.path.basename(box))
                with contextlib.suppress(OSError):
                    os.rmdir(run)
        return len(boxes)


def _runs(folder: str, label: str | None, depth: int) -> Iterator[str]:
    """Groups of runs anywhere below: a dead owner may have been in another group than we are."""
    for path in _folders(folder):
        name = os.path.basename(path)
        if name.startswith(PREFIX):
            if label is None or name == PREFIX + label:
                yield path
        elif depth > 1:
            yield from _runs(path, label, depth - 1)


def _folders(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def start_time(pid: int) -> str:
    """Clock ticks since boot at which the process started: with its pid, a name that does not repeat."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[19]


def owner_lives(owner: str) -> bool:
    pid, _, started = owner.partition("-")
    try:
        text = _read(f"/proc/{int(pid)}/stat").rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    return text[19] == started and text[0] not in "ZX"


def detect(mountinfo: str = "/proc/self/mountinfo", membership: str = "/proc/self/cgroup") -> Cgroups | str:
    """The machine's groups, or one line that says what is missing."""
    v1, v2 = _mounted(mountinfo)
    own = _own_groups(membership)
    needed = ("cpuset", "memory", "pids")
    if all(name in v1 for name in needed):
        bases = [_below(*v1[name], own.get(name, "/")) for name in needed]
        missing = next((b for b in bases if not os.access(b, os.W_OK)), None)
        points = [v1[name][0] for name in needed]
        return (
            f"no right to make control groups in {missing}"
            if missing
            else Cgroups(1, bases[0], bases[1], bases[2], points)
        )
    if v2 is None:
        return "no control groups are mounted"
    base = _below(*v2, own.get("", "/"))
    if not os.access(base, os.W_OK):
        return f"no right to make control groups in {base}"
    try:
        absent = set(needed) - set(_read(f"{base}/cgroup.controllers").split())
        if absent:
            return f"{base} lacks the controllers {', '.join(sorted(absent))}"
        if set(needed) - set(_read(f"{base}/cgroup.subtree_control").split()):
            _write(f"{base}/cgroup.subtree_control", "+cpuset +memory +pids")
    except OSError as e:
        return f"cannot delegate controllers in {base}: {e.strerror} (a version 2 group that holds processes cannot)"
    return Cgroups(2, base, base, base, [v2[0]])


def of_container(membership: str, container: str, mountinfo: str = "/proc/self/mountinfo") -> Group | None:
    """The groups that an engine made for a container, by the `/proc/PID/cgroup` of a process in it; None where we do
    not see them under the container's id."""
    v1, v2 = _mounted(mountinfo)
    own = _own_groups(membership)
    needed = ("cpuset", "memory", "pids")
    if all(name in v1 for name in needed):
        version, paths = 1, [_below(*v1[name], own.get(name, "/")) for name in needed]
    elif v2 is not None:
        version, paths = 2, [_below(*v2, own.get("", "/"))] * 3
    else:
        return None
    return Group(version, *paths) if all(container in path for path in paths) else None


def _mounted(mountinfo: str) -> tuple[dict[str, tuple[str, str]], tuple[str, str] | None]:
    """Version 1 hierarchies by controller, and the version 2 tree: (mount point, its root within the hierarchy)."""
    v1: dict[str, tuple[str, str]] = {}
    v2: tuple[str, str] | None = None
    for line in _read(mountinfo).splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup":
            for option in options.split(","):
                v1[option] = (point, root)
        elif kind == "cgroup2":
            v2 = (point, root)
    return v1, v2


def _own_groups(membership: str) -> dict[str, str]:
    own: dict[str, str] = {}
    for line in _read(membership).splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    return own


def _below(point: str, root: str, path: str) -> str:
    """The directory of group `path`, where the hierarchy's `root` is mounted at `point`."""
    if root != "/" and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    directory = (point + path).rstrip("/")
    return directory if os.path.isdir(directory) else point

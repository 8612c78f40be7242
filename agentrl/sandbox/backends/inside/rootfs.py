"""A box's file system: a fresh copy-on-write view of the root, on its own size-limited tmpfs, in its own mount
namespace. Nothing is ever mounted where the host can see it, so nothing can be left behind.

With root `/` only the system folders of the host are shown (`_SHOWN`), and of those nothing that an ordinary user
could not read. With any other root all of it is shown. `volatile` overlays never flush to disk.
"""

from __future__ import annotations

import contextlib
import os
import stat

from agentrl.sandbox.backends.inside import kernel

TYPE_CHECKING = False  # importing typing would cost memory and time in every box
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_SHOWN = ("usr", "etc", "opt", "var", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
EMPTY = {"root": 0o700, "home": 0o755, "tmp": 0o1777, "run": 0o755, "mnt": 0o755, "srv": 0o755, "media": 0o755}
# Below /var: what package managers need, nothing that services of the host keep there.
_VAR = ("lib", "cache", "run", "lock")
_VAR_LIB = (
    *("apk", "apt", "dpkg", "dnf", "pacman", "rpm", "yum", "alternatives", "ca-certificates-java", "emacsen-common"),
    *("fontconfig", "gems", "ghc", "man-db", "misc", "pam", "python", "sgml-base", "shells.state", "ucf", "vim"),
    "xml-core",
)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PROC_HIDDEN = ("kcore", "keys", "timer_list", "latency_stats", "sched_debug", "scsi", "acpi")
_GROW_INODES = 4096
_PROC_READ_ONLY = ("bus", "fs", "irq", "sys")


def shown() -> tuple[list[str], dict[str, str]]:
    """Top folders of the host that a box sees, each an overlay of its own, and top links with their targets. Not one
    overlay of `/`: a user namespace may not clone a mount with others below it."""
    links = {name: os.readlink(f"/{name}") for name in _SHOWN if os.path.islink(f"/{name}")}
    return [name for name in _SHOWN if name not in links and os.path.isdir(f"/{name}")], links


def private(layers: Sequence[str], hide: Sequence[str]) -> Iterator[str]:
    """Host paths below the shown folders that a box must not see. A path may lie below an earlier one."""
    yield from _unreadable("/etc")
    for folder, keep in (("/var", _VAR), ("/var/lib", _VAR_LIB)):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name not in keep and not entry.is_symlink():
                    yield entry.path
    for path in hide:
        real = os.path.realpath(path)
        if os.path.exists(real) and real.split("/")[1] in layers:
            yield real


class Template:
    """What all boxes of one launcher share, made once in its private mount namespace: masks and devices.

    root: lower layer. base: an existing folder to mount on. hide: further host paths to mask.
    attributes: `trusted` as real root, `user` in a user namespace (the prefix of overlay's extended attributes).
    turn: makes the working directory the root.
    """

    def __init__(
        self,
        root: str,
        base: str,
        hide: Sequence[str],
        attributes: str,
        turn: Callable[[], None] = kernel.pivot_here,
    ) -> None:
        self.root = os.path.realpath(root)
        self.attributes = attributes
        self._turn = turn
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", base, "tmpfs", kernel.MS_NOSUID, "mode=755,size=16m")
        self.box, self.masks, self.devices = f"{base}/box", f"{base}/masks", f"{base}/dev"
        for folder in (self.box, self.masks, self.devices):
            os.mkdir(folder)
        if self.root == "/":
            self.layers, self.links = shown()
            for path in private(self.layers, hide):
                self._mask(path)
        else:
            self.layers, self.links = [""], {}  # one overlay of all of it
        self._make_devices()
        self._proc_hidden = _system_files("/proc") | {f"/proc/{name}" for name in _PROC_HIDDEN}

    def _mask(self, path: str) -> None:
        """Shadows a folder with an empty opaque one, a file with an empty one, below copies of its parents."""
        inner = ""
        for name in path.strip("/").split("/")[:-1]:
            inner += "/" + name
            self._copy_folder(inner)
        here = self.masks + path
        if os.path.isdir(path):
            self._copy_folder(path)
            os.setxattr(here, f"{self.attributes}.overlay.opaque", b"y")
            if path == "/var/tmp":
                os.chmod(here, 0o1777)
        else:
            os.close(os.open(here, os.O_CREAT | os.O_WRONLY, 0o644))

    def _copy_folder(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.masks + path)
            os.chmod(self.masks + path, stat.S_IMODE(os.stat(path).st_mode))

    def _make_devices(self) -> None:
        for name in _DEVICES:
            os.close(os.open(f"{self.devices}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            kernel.mount(f"/dev/{name}", f"{self.devices}/{name}", flags=kernel.MS_BIND)
        for name in ("pts", "shm"):
            os.mkdir(f"{self.devices}/{name}")
        links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
        for name, target in links.items():
            os.symlink(target, f"{self.devices}/{name}")

    def build(self, *, workdir: str, disk_bytes: int, texts: Mapping[str, str]) -> str:
        """Call in a fresh mount namespace; afterwards the process's root is the box's. texts: files to put in place of
        the root's. Returns the shell to use."""
        kernel.mount("tmpfs", self.box, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _tmpfs_options(disk_bytes))
        root = f"{self.box}/root"
        os.mkdir(root)
        os.mkdir(f"{self.box}/shm")
        os.chmod(f"{self.box}/shm", 0o1777)
        if self.layers != [""]:
            kernel.mount(root, root, flags=kernel.MS_BIND)
        for index, layer in enumerate(self.layers):
            self._overlay(index, layer, f"{root}/{layer}".rstrip("/"))
        self._fill(root)
        self._mount_system(root)
        os.chdir(root)
        self._turn()
        for path, text in texts.items():
            _replace(path, text)
        os.makedirs(workdir, exist_ok=True)
        return "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"

    def grow(self, count: int) -> None:
        """Room for `count` bytes more than is used now, for one who is inside the box."""
        usage = os.statvfs("/dev/shm")  # of the tmpfs that holds all the box's files
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        options = f"size={used + count},nr_inodes={usage.f_files - usage.f_ffree + _GROW_INODES}"
        kernel.mount("none", "/dev/shm", "tmpfs", kernel.MS_REMOUNT | kernel.MS_NOSUID | kernel.MS_NODEV, options)

    def _overlay(self, index: int, layer: str, target: str) -> None:
        upper, work = f"{self.box}/u{index}", f"{self.box}/w{index}"
        lower = f"{self.root}/{layer}".replace("//", "/") or "/"
        os.mkdir(upper)
        os.chmod(upper, stat.S_IMODE(os.stat(lower).st_mode))
        os.mkdir(work)
        os.makedirs(target, exist_ok=True)
        mask = f"{self.masks}/{layer}"
        if layer and os.path.isdir(mask):
            lower = f"{mask}:{lower}"
        options = f"lowerdir={lower},upperdir={upper},workdir={work},volatile"
        if self.attributes == "user":
            options += ",userxattr"
        kernel.mount("overlay", target, "overlay", kernel.MS_NODEV, options)

    def _fill(self, root: str) -> None:
        for name, target in self.links.items():
            os.symlink(target, f"{root}/{name}")
        for name in ("proc", "dev", "sys"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{root}/{name}")
        for name, mode in EMPTY.items():
            if not os.path.lexists(f"{root}/{name}"):
                os.mkdir(f"{root}/{name}")
                os.chmod(f"{root}/{name}", mode)

    def _mount_system(self, root: str) -> None:
        quiet = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("proc", f"{root}/proc", "proc", quiet)
        for path in self._proc_hidden:
            _hide_in_proc(root + path, self.devices)
        for name in _PROC_READ_ONLY:
            path = f"{root}/proc/{name}"
            if os.path.isdir(path):
                kernel.mount(path, path, flags=kernel.MS_BIND)
                kernel.mount(path, path, flags=kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | quiet)
        kernel.mount(self.devices, f"{root}/dev", flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.mount(
            "none", f"{root}/dev", flags=kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID
        )
        kernel.mount(f"{self.box}/shm", f"{root}/dev/shm", flags=kernel.MS_BIND)
        kernel.mount(
            "devpts", f"{root}/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, "newinstance,ptmxmode=0666"
        )


def _unreadable(folder: str) -> Iterator[str]:
    """Entries that are not readable by everybody: keys, password hashes, credentials."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                continue
            mode = entry.stat().st_mode
            if entry.is_dir():
                if mode & 0o005 != 0o005 or entry.name == "ssh":
                    yield entry.path
                else:
                    yield from _unreadable(entry.path)
            elif not mode & 0o004:
                yield entry.path


def _system_files(folder: str) -> set[str]:
    """Files of the whole system that only root may read, or may write: root in a box is root to them."""
    with os.scandir(folder) as entries:
        files = {e.path: e.stat().st_mode for e in entries if not e.name.isdigit() and e.is_file(follow_symlinks=False)}
    return {path for path, mode in files.items() if mode & 0o222 or not mode & 0o004}


def _hide_in_proc(path: str, devices: str) -> None:
    if os.path.isdir(path):
        kernel.mount(f"{devices}/shm", path, flags=kernel.MS_BIND)  # an empty folder, of all boxes: read-only
        kernel.mount(path, path, flags=kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID)
    elif os.path.exists(path):
        kernel.mount(f"{devices}/null", path, flags=kernel.MS_BIND)


def _tmpfs_options(disk_bytes: int) -> str:
    return f"mode=755,size={disk_bytes},nr_inodes={max(16_384, disk_bytes >> 13)}"


def _replace(path: str, text: str) -> None:
    """Also where it is a link into a folder that the box does not see."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        f.write(text)


def resolver() -> dict[str, str]:
    """The resolver's file of whoever calls, for a box that shares its network."""
    with contextlib.suppress(OSError), open("/etc/resolv.conf") as f:
        return {"/etc/resolv.conf": f.read()}
    return {}

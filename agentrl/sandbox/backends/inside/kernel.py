"""System calls that `os` lacks, through the C library. Each raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_MOVE = 8192
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

# What root inside a box keeps: enough to install packages and change users, nothing that reaches the host. Absent on
# purpose: SYS_ADMIN, SYS_MODULE, SYS_PTRACE, NET_ADMIN, NET_RAW, MKNOD, SYS_BOOT, SYS_TIME, SYS_RAWIO, BPF, SYS_CHROOT.
_KEPT_CAPABILITIES = frozenset(
    {
        0,  # CHOWN
        1,  # DAC_OVERRIDE
        3,  # FOWNER
        4,  # FSETID
        5,  # KILL
        6,  # SETGID
        7,  # SETUID
        10,  # NET_BIND_SERVICE
        31,  # SETFCAP
    }
)

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {kind or 'bind'} on {target}")


def unmount(target: str, flags: int = 0) -> None:
    _check(_libc.umount2(target.encode(), flags), f"umount {target}")


def pivot_here() -> None:
    """The working directory becomes the root; the old root is detached with all its mounts."""
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    unmount(".", MNT_DETACH)
    os.chdir("/")


def move_here() -> None:
    """The same where a filter refuses pivot_root: the working directory's mount goes on top of the old root. To reach
    below it takes the right to unmount."""
    mount(".", "/", flags=MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), f"setns {kind:#x}")


def _prctl(option: int, argument: int, what: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), what)


def die_with_parent(signal: int) -> None:
    """The parent is the *thread* that forked; use only where that thread lives as long as its process."""
    _prctl(_PR_SET_PDEATHSIG, signal, "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def close_to_inspection() -> None:
    """No process of the box may trace this one, read its memory or follow /proc/1/root out of the box."""
    _prctl(_PR_SET_DUMPABLE, 0, "PR_SET_DUMPABLE")


def limit_privileges() -> None:
    """For this process's future programs: what exec may grant, for ever. Its own privileges stay until it execs."""
    last = int(open("/proc/sys/kernel/cap_last_cap").read())
    for capability in range(last + 1):
        if capability not in _KEPT_CAPABILITIES:
            _prctl(_PR_CAPBSET_DROP, capability, f"drop capability {capability}")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def drop_privileges() -> None:
    """Now, for this process: only what a command of the box may hold as well."""
    version_3, low = 0x2008_0522, sum(1 << c for c in _KEPT_CAPABILITIES)
    header = struct.pack("=Ii", version_3, 0)
    sets = struct.pack("=6I", low, low, 0, 0, 0, 0)  # effective, permitted, inheritable; low then high 32 bits
    _check(_libc.capset(header, sets), "capset")


def filter_calls(program: bytes) -> None:
    """A seccomp filter (classic BPF, 8 bytes a step) for this process and its children, on top of any other."""
    steps = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))
    mode_filter = 2
    _check(_libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(mode_filter), head, 0, 0), "PR_SET_SECCOMP")


def loopback_up() -> None:
    """A fresh network namespace has its loopback down, and 127.0.0.1 unreachable."""
    siocsifflags, iff_up = 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, siocsifflags, struct.pack("16sh14x", b"lo", iff_up))


def map_self_to_root(uid: int, gid: int) -> None:
    """In a fresh user namespace: the one user outside becomes root inside."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)

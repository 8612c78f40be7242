"""Takes from commands what a container's init needs beyond theirs, down to the system call.

Docker's own filter opens a set of calls to a container that holds SYS_ADMIN and SYS_CHROOT. Capabilities bar most of
them, but a new user namespace hands capabilities out; so commands get a filter that closes the set again.
"""

from __future__ import annotations

import errno
import os
import struct

from agentrl.sandbox.backends.inside import kernel

_NEW_NAMESPACES = 0x7E02_0000  # all CLONE_NEW* flags
_X32 = 0x4000_0000

# What the two capabilities open: audit architecture to (clone, the refused calls).
_SINCE_5_2 = (428, 429, 430, 431, 432, 433, 442, 443)  # open_tree move_mount fs* mount_setattr quotactl_fd: the same
_CLONE3 = 435
_TABLES = {
    # mount umount2 pivot_root unshare setns chroot bpf perf_event_open quotactl name_to_handle_at lookup_dcookie
    # syslog fanotify_init sethostname setdomainname; i386 has umount beside umount2
    0xC000_003E: (56, (165, 166, 155, 272, 308, 161, 321, 298, 179, 303, 212, 103, 300, 170, 171)),  # x86_64
    0x4000_0003: (120, (21, 22, 52, 217, 310, 346, 61, 357, 336, 131, 341, 253, 103, 338, 74, 121)),  # i386
    0xC000_00B7: (220, (40, 39, 41, 97, 268, 51, 280, 241, 60, 264, 18, 116, 262, 161, 162)),  # aarch64
}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: ld abs, jeq, jge, jset, ret
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little-endian


def _step(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, k)


def _program() -> bytes:
    """Per architecture: refused calls, clone3 as if the kernel lacked it (its flags are out of a filter's sight), clone
    by its flags. An architecture of none of the tables is refused whole."""
    steps = [_step(_LOAD, _ARCHITECTURE)]
    refuse, absent, allow = (_step(_RETURN, k) for k in (_ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ALLOW))
    for architecture, (clone, numbers) in _TABLES.items():
        block = [_step(_LOAD, _NUMBER), _step(_AT_LEAST, _X32, 0, 1), refuse]
        for number in (*numbers, *_SINCE_5_2):
            block += [_step(_EQUAL, number, 0, 1), refuse]
        block += [_step(_EQUAL, _CLONE3, 0, 1), absent, _step(_EQUAL, clone, 1, 0), allow]
        block += [_step(_LOAD, _FIRST_ARGUMENT), _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse, allow]
        steps += [_step(_EQUAL, architecture, 0, len(block)), *block]
    return b"".join([*steps, refuse])


_PROGRAM = _program()


def confine() -> None:
    """This process and all it starts, for ever. Needs `kernel.limit_privileges` before it."""
    kernel.filter_calls(_PROGRAM)


def check() -> None:
    """OSError on a machine whose calls are in none of the tables: nothing could run there."""
    if os.uname().machine not in ("x86_64", "i686", "aarch64"):
        raise OSError(errno.ENOSYS, f"no filter of system calls for {os.uname().machine}")

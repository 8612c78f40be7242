"""This machine's CPUs as the kernel lists them. The impure half of `cpusets`."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl.sandbox.cpusets import Cpu, Topology, parse_cpus

_SYS = Path("/sys/devices/system")


def read_topology(sys: Path = _SYS) -> Topology:
    """The CPUs this process may use. Where /sys does not say, each CPU is a core of its own on node 0."""
    usable = sorted(os.sched_getaffinity(0))
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted((sys / "node").glob("node[0-9]*"))
        for cpu in parse_cpus(_read(folder / "cpulist"))
    }
    cpus = []
    for cpu in usable:
        siblings = parse_cpus(_read(sys / f"cpu/cpu{cpu}/topology/thread_siblings_list")) or (cpu,)
        cpus.append(Cpu(id=cpu, core=min(siblings), node=node_of.get(cpu, 0)))
    return Topology(cpus=tuple(cpus))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

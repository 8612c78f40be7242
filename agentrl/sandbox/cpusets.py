"""Which CPUs each lane owns. Pure: a topology goes in, a plan comes out, the same one every time.

Laws (property-tested for 1 to 256 CPUs): no lane is empty; every CPU outside `serving` belongs to exactly one group of
lanes; a core's SMT siblings are split between lanes only where a node has fewer cores than lanes; a lane spans NUMA
nodes only where there are more nodes than lanes.

With fewer than five CPUs lanes are merged, in this order, verification last (its time-outs decide rewards, so a
neighbour's load must not reach it): reset+cleanup, then those join command, then package joins them, then all are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.errors import UserError
from agentrl.records import Lane, Record

WEIGHTS: Mapping[Lane, float] = {
    Lane.RESET: 1.0,
    Lane.COMMAND: 4.0,
    Lane.PACKAGE: 4.0,
    Lane.VERIFY: 2.0,
    Lane.CLEANUP: 1.0,
}
"""Shares of the CPUs: most time goes into the agent's commands, reset and cleanup are short."""

_GROUPS: Mapping[int, tuple[tuple[Lane, ...], ...]] = {
    5: ((Lane.RESET,), (Lane.COMMAND,), (Lane.PACKAGE,), (Lane.VERIFY,), (Lane.CLEANUP,)),
    4: ((Lane.RESET, Lane.CLEANUP), (Lane.COMMAND,), (Lane.PACKAGE,), (Lane.VERIFY,)),
    3: ((Lane.RESET, Lane.COMMAND, Lane.CLEANUP), (Lane.PACKAGE,), (Lane.VERIFY,)),
    2: ((Lane.RESET, Lane.COMMAND, Lane.PACKAGE, Lane.CLEANUP), (Lane.VERIFY,)),
    1: (tuple(Lane),),
}

Unit = tuple[int, ...]
"""CPUs that are given out together: the siblings of one core, or one CPU of a core that had to be split."""


class Cpu(Record):
    """core: siblings of one physical core share it; unique over the machine. node: NUMA node."""

    id: int
    core: int
    node: int = 0


class Topology(Record):
    cpus: tuple[Cpu, ...]


class CpuPlan(Record):
    """lanes: sorted CPUs of each lane. merged: groups of lanes that share theirs. notes: every compromise, in words."""

    lanes: dict[Lane, tuple[int, ...]]
    serving: tuple[int, ...] = ()
    merged: tuple[tuple[Lane, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def merged_with(self, lane: Lane) -> tuple[Lane, ...]:
        return tuple(other for group in self.merged if lane in group for other in group if other != lane)


def plan_cpus(topology: Topology, *, serving: Sequence[int] = (), weights: Mapping[Lane, float] = WEIGHTS) -> CpuPlan:
    """Disjoint CPU sets for the five lanes. UserError where `serving` names unknown CPUs or leaves none."""
    kept = frozenset(serving)
    unknown = kept - {cpu.id for cpu in topology.cpus}
    if unknown:
        raise UserError(
            f"serving CPUs {format_cpus(sorted(unknown))} are not among this host's usable CPUs "
            f"{format_cpus([cpu.id for cpu in topology.cpus])}",
            hint="set sandbox.serving_cpus to CPUs this host has",
        )
    free = sorted((cpu for cpu in topology.cpus if cpu.id not in kept), key=lambda cpu: (cpu.node, cpu.core, cpu.id))
    if not free:
        raise UserError("serving CPUs leave none for the sandboxes", hint="shorten sandbox.serving_cpus")
    groups = _GROUPS[min(5, len(free))]
    nodes = _cores_by_node(free)
    shares = [sum(weights[lane] for lane in group) for group in groups]
    owned = _share_out(nodes, shares)
    merged = tuple(group for group in groups if len(group) > 1)
    return CpuPlan(
        lanes={lane: tuple(sorted(owned[i])) for i, group in enumerate(groups) for lane in group},
        serving=tuple(sorted(kept)),
        merged=merged,
        notes=_notes(topology, kept, owned, merged, len(free)),
    )


def one_pool(topology: Topology) -> CpuPlan:
    """No lanes at all: each has every CPU, those of serving included."""
    cpus = tuple(cpu.id for cpu in topology.cpus)
    return CpuPlan(lanes=dict.fromkeys(Lane, cpus), merged=(tuple(Lane),), notes=("one pool, no lanes",))


def parse_cpus(text: str) -> tuple[int, ...]:
    """`"0-3,8"` to (0, 1, 2, 3, 8), sorted, without repeats. UserError where it is not such a list."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise UserError(f"{part!r} in CPU list {text!r} is neither a number nor a range", hint='write "0-3,8"')
        low, high = int(first), int(last or first)
        if low > high or high > 65_535:
            raise UserError(f"{part!r} in CPU list {text!r} is not an ascending range", hint='write "0-3,8"')
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Sequence[int]) -> str:
    """The kernel's list format, shortest form: (0, 1, 2, 3, 8) to `"0-3,8"`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in runs)


def _cores_by_node(free: Sequence[Cpu]) -> list[list[Unit]]:
    nodes: dict[int, dict[int, list[int]]] = {}
    for cpu in free:
        nodes.setdefault(cpu.node, {}).setdefault(cpu.core, []).append(cpu.id)
    return [[tuple(cpus) for cpus in cores.values()] for cores in nodes.values()]


def _share_out(nodes: list[list[Unit]], shares: Sequence[float]) -> list[list[int]]:
    """Groups to nodes, heaviest first, to the node where they crowd least; then each node's cores among its groups."""
    residents: list[list[int]] = [[] for _ in nodes]
    for placed, group in enumerate(sorted(range(len(shares)), key=lambda g: (-shares[g], g))):
        empty = [n for n in range(len(nodes)) if not residents[n]]
        roomy = [n for n in range(len(nodes)) if len(residents[n]) < _cpus(nodes[n])]

        def crowding(n: int, group: int = group) -> tuple[bool, float, int]:
            load = sum(shares[g] for g in residents[n]) + shares[group]
            return len(residents[n]) >= len(nodes[n]), load / _cpus(nodes[n]), n

        residents[min(empty if len(shares) - placed <= len(empty) else roomy, key=crowding)].append(group)
    owned: list[list[int]] = [[] for _ in shares]
    for units, groups in zip(nodes, residents, strict=True):
        for group, cpus in _divide(units, sorted(groups), shares):
            owned[group].extend(cpus)
    for units, groups in zip(nodes, residents, strict=True):
        if not groups:  # more nodes than groups: whole nodes to whoever has least for its weight
            neediest = max(range(len(shares)), key=lambda g: (shares[g] / len(owned[g]), -g))
            owned[neediest].extend(cpu for unit in units for cpu in unit)
    return owned


def _divide(units: list[Unit], groups: Sequence[int], shares: Sequence[float]) -> list[tuple[int, Unit]]:
    """One node's cores as neighbouring runs, one core each and the rest by highest averages (D'Hondt)."""
    units = list(units)
    while len(units) < len(groups):
        at = max(range(len(units)), key=lambda i: (len(units[i]), i))
        units[at : at + 1] = [units[at][:1], units[at][1:]]
    counts = dict.fromkeys(groups, 1)
    for _ in range(len(units) - len(groups) if groups else 0):
        counts[max(groups, key=lambda g: (shares[g] / (counts[g] + 1), -g))] += 1
    runs, start = [], 0
    for group in groups:
        run = units[start : start + counts[group]]
        runs.append((group, tuple(cpu for unit in run for cpu in unit)))
        start += counts[group]
    return runs


def _cpus(units: Sequence[Unit]) -> int:
    return sum(map(len, units))


def _notes(
    topology: Topology,
    kept: frozenset[int],
    owned: Sequence[Sequence[int]],
    merged: Sequence[Sequence[Lane]],
    free: int,
) -> tuple[str, ...]:
    notes = [f"{'+'.join(group)} share CPUs: {free} free CPU(s) for 5 lanes" for group in merged]
    owner = {cpu: i for i, cpus in enumerate(owned) for cpu in cpus} | dict.fromkeys(kept, -1)
    cores: dict[int, set[int]] = {}
    for cpu in topology.cpus:
        cores.setdefault(cpu.core, set()).add(owner[cpu.id])
    for what, split in (
        ("lanes", [core for core, owners in cores.items() if len(owners - {-1}) > 1]),
        ("serving and a lane", [core for core, owners in cores.items() if -1 in owners and len(owners) > 1]),
    ):
        if split:
            notes.append(f"{len(split)} core(s) have SMT siblings split between {what}")
    return tuple(notes)

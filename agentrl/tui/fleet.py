"""The panels of what works for the run: engines, and the lanes of the sandbox hosts. Functions of the view."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from agentrl.records import LaneStatus
from agentrl.runtime.status import EngineStatus, RankStatus, Status
from agentrl.tui.draw import BAD, DIM, FAIR, GOOD, Cell, columns, count, level, out_of, percent, took
from agentrl.tui.panels import View

_NARROW = 60
_SHORT = {"staging": "stages", "swapping": "swaps", "catching": "behind"}

# --- 3: engines -------------------------------------------------------------------------------------------------------


def engines(view: View, width: int, height: int) -> list[Text]:
    """Each engine's data-parallel ranks below it, where there is room for all of them."""
    status = view.status
    gone = [d for d in status.down if d.kind == "engine"]
    lines = sum(1 + len(_ranks(e)) for e in status.engines)
    apart = lines + 1 + len(gone) <= height
    rows = [row for e in status.engines for row in (_engine(e, status, width), *(_ranks(e) if apart else ()))]
    names = ("engine", ">ver", ">run", ">wait", ">KV", ">tok/s", "phase", ">conv", ">reuse", "host")
    far = (9,) if any(e.host for e in status.engines) else ()
    order = (0, 1, 2, 3, 4, 6, *far, 5) if width < _NARROW else (0, 1, 7, 2, 3, 4, 5, 8, *far, 6)
    drawn = columns([[row[i] for i in order] for row in rows], [names[i] for i in order], width)
    drawn += [Text(f"{d.name} down {took(status.now_s - d.at_s)}: {d.reason}", style=BAD) for d in gone]
    return drawn if rows or gone else [Text("no engine is up", style=BAD)]


def _engine(e: EngineStatus, status: Status, width: int) -> list[Cell]:
    behind = FAIR if e.version < status.version else ""
    style = {"serving": GOOD, "catching up": BAD}.get(e.phase, "cyan")
    phase = e.phase if width >= _NARROW else _SHORT.get(e.phase.split()[0], e.phase)
    return [
        e.name,
        Text(f"v{e.version}", style=behind),
        *_load(e),
        Text(phase, style=style),
        str(e.conversations),
        percent(e.prefix_reuse) if e.prefix_reuse is not None else "",
        e.host,
    ]


def _ranks(e: EngineStatus) -> list[list[Cell]]:
    """None where there is only one."""
    if len(e.ranks) < 2:
        return []
    return [
        [
            Text(f" └ {r.rank}", style=DIM),
            "",
            *_load(r),
            "",
            str(r.conversations),
            percent(r.prefix_reuse) if r.prefix_reuse is not None else "",
            "",
        ]
        for r in e.ranks
    ]


def _load(of: EngineStatus | RankStatus) -> list[Cell]:
    """Running, waiting, KV, tokens a second."""
    kv = of.kv_used_tokens / of.kv_total_tokens if of.kv_total_tokens else 0.0
    return [
        out_of(of.running, of.slots),
        Text(str(of.waiting), style=FAIR if of.waiting else ""),
        Text(percent(kv), style=level(kv, fair=0.75, bad=0.92)),
        count(of.tokens_per_s),
    ]


# --- 4: sandboxes -----------------------------------------------------------------------------------------------------


def lanes(view: View, width: int, height: int) -> list[Text]:
    """Every host's lanes, the longest queue first, where there is room; else each lane summed over the hosts."""
    status = view.status
    drawn = [
        Text(f"{d.name} down {took(status.now_s - d.at_s)}: {d.reason}", style=BAD)
        for d in status.down
        if d.kind == "sandbox host"
    ]
    if not status.hosts and not drawn:
        drawn.append(Text("no sandbox host is up", style=BAD))
    told = [(host.name, lane) for host in status.sandboxes for lane in host.lanes]
    if told:
        return drawn + _lanes(told, len(status.sandboxes), width, height - len(drawn))
    used = "  ".join(f"{name}: {n} in use" for name, n in status.hosts.items())
    return [*drawn, Text(used), Text("no lane was told of yet", style=DIM)]


def _lanes(told: list[tuple[str, LaneStatus]], hosts: int, width: int, room: int) -> list[Text]:
    if hosts > 1 and len(told) + 1 > room:
        of: dict[str, list[LaneStatus]] = {}
        for _, lane in told:
            of.setdefault(lane.lane, []).append(lane)
        told = [(f"{hosts} hosts", _summed(lanes)) for lanes in of.values()]
    told = sorted(told, key=lambda pair: -pair[1].queued)
    names = ("lane", ">use", ">queue", ">wait", ">p95", "CPUs", "host")
    rows = [[*_lane(lane), host if hosts > 1 else ""] for host, lane in told]
    return columns(rows, names if hosts > 1 else (*names[:-1], ""), width)


def _summed(of: list[LaneStatus]) -> LaneStatus:
    """One lane of several hosts; waits are those of the worst."""
    return LaneStatus(
        lane=of[0].lane,
        cap=sum(lane.cap for lane in of),
        running=sum(lane.running for lane in of),
        queued=sum(lane.queued for lane in of),
        cpus=of[0].cpus,
        merged_with=of[0].merged_with,
        wait_s_mean=max(lane.wait_s_mean for lane in of),
        wait_s_p95=max(lane.wait_s_p95 for lane in of),
    )


def _lane(lane: LaneStatus) -> list[Cell]:
    full = lane.cap and lane.running >= lane.cap
    return [
        f"{lane.lane:<7}",  # all of them: a longer one that comes and goes would move the columns
        Text(out_of(lane.running, lane.cap), style=FAIR if full else ""),
        Text(str(lane.queued), style=FAIR if lane.queued else DIM),
        took(lane.wait_s_mean),
        took(lane.wait_s_p95),
        cpu_list(lane.cpus) + (" shared" if lane.merged_with else ""),
    ]


def cpu_list(cpus: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0-2,5`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

"""The knobs of the core. Depth (window) and freshness (bound) are separate; see docs/laws.md."""

from __future__ import annotations

from agentrl.records import Record


class Policy(Record):
    steps: int
    groups: int  # B: groups of one batch
    siblings: int  # n: attempts of a group that count
    window_groups: int  # W: places for groups that are open, in training, or trained and not yet live everywhere
    window_attempts: int  # C: conversations in flight
    bound: int  # K
    auto: bool = False  # W and C follow what is measured (sizing.py): W begins as window_groups, C is at most that
    spare: int = 0  # further attempts started per group; the first n to end count
    retries: int = 3
    attempt_timeout_s: float = 300.0
    stall_s: float = 120.0
    order: str = "rolling"  # rolling | all
    max_unavailable: int = 1
    in_flight: str = "continue"  # what happens to unfinished work at a swap: continue | finish | regenerate | restart
    finish_timeout_s: float = 300.0  # `finish`: how long an engine may drain
    load_retries: int = 2  # failed weight loads of one engine in a row before it is restarted
    move_margin: float = 0.2
    when_stale: str = "drop"  # drop | wait (nothing expires: old groups first, the cut waits for them) | mask
    mode: str = "async"  # async | sync | pipelined: rounds at fixed weights, trained at the end or group by group
    round_groups: int = 0  # groups of a round; a multiple of `groups`
    admission: str = "fifo"  # which waiting sibling starts first, see admission.py

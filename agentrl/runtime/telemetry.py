"""What a run leaves behind for people: summary.json, metrics.jsonl, trace.json (Chrome trace; Perfetto opens it).

Definitions are those of docs/cli.md. All times are seconds of the run's clock. A resumed run carries its figures on
from the summary that is there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.records import AttemptId, Batch, GroupId, LoadReport, StepReport, Trajectory, Turn, Version
from agentrl.runtime.loop import Listener
from agentrl.runtime.metrics import Metrics
from agentrl.runtime.moments import Moments, Timeline
from agentrl.runtime.trace import Trace
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.attempts import NEW_WEIGHTS
from agentrl.scheduler.core import Core


class _Totals(msgspec.Struct):
    """Sums since the run began."""

    generated: int = 0
    observed: int = 0
    trained: int = 0
    wasted: int = 0
    lost: int = 0  # of the wasted: given up because weights changed
    cached: int = 0
    reusable: int = 0
    turns_regenerated: int = 0
    completed_tokens: int = 0
    completed: int = 0
    trained_tokens: int = 0
    trained_trajectories: int = 0
    batch_wait_s: float = 0.0
    first_batch_s: float | None = None


class Telemetry(Listener):
    """folder: the run's. `shown` is called after each step with its line of metrics, for progress."""

    def __init__(
        self,
        folder: Path,
        head: dict[str, Any],
        clock: Callable[[], float],
        *,
        order: str,
        in_flight: str,
        shown: Callable[[dict[str, Any]], None] = lambda step: None,
    ) -> None:
        self.stream: Callable[[float, news.Event, Sequence[orders.Command]], None] | None = None
        self.metrics: Metrics | None = None
        self.follower: Callable[[float, news.Event, Sequence[orders.Command]], None] | None = None
        self._folder = folder
        self._head = head
        self._clock = clock
        self._shown = shown
        self._publish = {"order": order, "in_flight": in_flight}
        self.steps: list[dict[str, Any]] = []
        self._publications: dict[int, dict[str, Any]] = {}
        self._stage_s: dict[tuple[str, Version], float] = {}
        self._sum = _Totals()
        self._last = _Totals()
        self._by_group: Counter[GroupId] = Counter()  # sampled tokens of groups whose story is not over
        self._by_sibling: Counter[tuple[int, int]] = Counter()  # of those, what its running or resumed try has sampled
        self._timeline = Timeline()
        self._ready_at: float | None = None
        self._window: dict[int, dict[str, Any]] = {}  # batch -> W and C when it was cut, and what held them
        self._cut: dict[int, tuple[float, float]] = {}  # batch -> (when it was cut, how long the trainer had waited)
        self._cut_before = 0.0
        self._finished: dict[Version, float] = {}
        self._lag, self._lag_told = 0.0, 0.0  # the worst look since one was told
        self._restore()
        self.trace = Trace(folder / "trace.json")

    # --- what the driver says -----------------------------------------------------------------------------------------

    def turn(self, attempt: AttemptId, turn: Turn) -> None:
        total, sampled = self._sum, turn.end - turn.start
        total.generated += sampled
        total.observed += turn.observed_end - turn.end
        total.cached += min(turn.cached_tokens, turn.reusable_tokens)
        total.reusable += turn.reusable_tokens
        total.turns_regenerated += turn.regenerated
        self._by_group[attempt.group] += sampled
        self._by_sibling[attempt[:2]] += sampled
        self.trace.turn(attempt, turn, self._clock())
        if self.metrics is not None:
            self.metrics.turn(turn)

    def ended(self, trajectory: Trajectory) -> None:
        self._sum.completed += 1
        self._sum.completed_tokens += len(trajectory.tokens)
        if self.metrics is not None:
            self.metrics.ended(trajectory)

    def stepped(self, batch: Batch, report: StepReport) -> None:
        now = self._clock()
        trained = sum(sum(t.trainable) for t in batch.trajectories)
        total = self._sum
        total.trained += trained
        total.trained_trajectories += len(batch.trajectories)
        total.trained_tokens += sum(len(t.tokens) for t in batch.trajectories)
        spent = sum(self._by_group.pop(proof.group, 0) for proof in batch.proofs)
        total.wasted += max(0, spent - trained)
        self._finished[report.version] = now
        self._timeline.stepped(batch.id, report.version, report.seconds, now)
        step = self._step(batch, report, trained)
        self.steps = [s for s in self.steps if s["step"] != step["step"]] + [step]  # a redelivered batch counts once
        with (self._folder / "metrics.jsonl").open("ab") as lines:
            lines.write(msgspec.json.encode(step) + b"\n")
        self._shown(step)

    def lagged(self, seconds: float) -> None:
        """How late the event loop was at a look; a counter in the trace, once a second where it is nothing new."""
        now = self._clock()
        self._lag = max(self._lag, seconds)
        if now - self._lag_told >= 1.0:
            self.trace.lagged(now, self._lag)
            self._lag, self._lag_told = 0.0, now

    def staged(self, engine: str, version: Version, seconds: float) -> None:
        self._stage_s[engine, version] = seconds
        now = self._clock()
        self.trace.weights(engine, "stage", version, now - seconds, now)

    def swapped(self, engine: str, report: LoadReport, began: float, others_tokens: int) -> None:
        version = report.version
        publication = self._publication(version)
        self._lose(version, report.lost_tokens)
        publication["engines"].append(
            {
                "name": engine,
                "stage_s": self._stage_s.pop((engine, version), report.stage_s),
                "pause_s": report.pause_s,
                "lost_tokens": report.lost_tokens,
                "checksum": report.checksum,
                "others_tokens": others_tokens,
            }
        )
        now = self._clock()
        self.trace.weights(engine, "swap", version, began, now, pause_s=report.pause_s, others=others_tokens)
        for step in reversed(self.steps):
            if step["version"] == version and version in self._finished:
                step["publish_s"] = now - self._finished[version]
                break

    def _publication(self, version: Version) -> dict[str, Any]:
        fresh = {"version": version, **self._publish, "lost_tokens": 0, "engines": []}
        return self._publications.setdefault(version, fresh)

    def _lose(self, version: Version, tokens: int) -> None:
        """Sampled and given up because this version was loaded."""
        self._sum.lost += tokens
        self._publication(version)["lost_tokens"] += tokens

    def _restarted(self, commands: Sequence[orders.Command]) -> None:
        """What `restart` gave up for the swap that follows in the same orders."""
        given_up = 0
        for order in commands:
            match order:
                case orders.CancelAttempt() if order.reason == NEW_WEIGHTS:
                    given_up += self._by_sibling.pop(order.attempt[:2], 0)
                case orders.SwapWeights() if given_up:
                    self._lose(order.version, given_up)
                    given_up = 0
                case orders.StartAttempt() if order.resume is None:
                    self._by_sibling.pop(order.attempt[:2], None)
                case orders.TrainOn() | orders.DropGroup():
                    for attempt in order.attempts:
                        self._by_sibling.pop(attempt[:2], None)
                case _:
                    pass

    def _timed(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        dispatched, live = self._timeline.heard(now, event, commands, core)
        for moments in dispatched:
            self.trace.dispatched(moments)
        for moments in live:
            self.trace.live(moments)
            for step in self.steps:
                if step["step"] == moments.batch + 1:
                    step["moments"] = _told(moments)

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        if self.stream is not None:
            self.stream(now, event, commands)
        if self.follower is not None:
            self.follower(now, event, commands)
        self.trace.heard(now, event, commands, core)
        self._restarted(commands)
        self._timed(now, event, commands, core)
        if core.trainer == "ready" and self._ready_at is None:
            self._ready_at = now
        for order in commands:
            match order:
                case orders.TrainOn():
                    self._cut[order.batch] = (now, now - (self._ready_at if self._ready_at is not None else now))
                    self._ready_at = None
                    self._window[order.batch] = _window(core)
                case orders.DropGroup():
                    self._sum.wasted += self._by_group.pop(order.group, 0)
                case _:
                    pass
        if isinstance(event, news.StepFinished | news.EngineLoaded) or core.finished is not None:
            self.write(core, now)

    # --- what it makes of it ------------------------------------------------------------------------------------------

    def _step(self, batch: Batch, report: StepReport, trained: int) -> dict[str, Any]:
        cut, waited = self._cut.pop(batch.id, (self._clock(), 0.0))
        total, last = self._sum, self._last
        if total.first_batch_s is None:
            total.first_batch_s = cut
        else:
            total.batch_wait_s += waited
        oldest = {proof.group: proof.oldest for proof in batch.proofs}
        ages = Counter(batch.version - min(s.version for s in t.spans) for t in batch.trajectories if t.spans)
        count = len(batch.trajectories)
        step = {
            "step": batch.id + 1,
            "version": report.version,
            "interval_s": cut - self._cut_before,
            "batch_wait_s": waited,
            "train_s": report.seconds,
            "publish_s": 0.0,
            "groups": len(batch.proofs),
            "trajectories": count,
            "reward_mean": sum(t.verdict.reward or 0.0 for t in batch.trajectories) / count,
            "age": {
                "max": max(batch.version - version for version in oldest.values()),
                "mean": sum(age * n for age, n in ages.items()) / max(1, ages.total()),
                "histogram": {str(age): ages[age] for age in sorted(ages)},
            },
            "tokens": {
                "generated": total.generated - last.generated,
                "observed": total.observed - last.observed,
                "trained": trained,
                "wasted": total.wasted - last.wasted,
                "lost": total.lost - last.lost,
            },
            "moments": _told(self._timeline.batches.get(batch.id)),
            "window": self._window.pop(batch.id, None),
            "prefix_reuse": _ratio(total.cached - last.cached, total.reusable - last.reusable),
            "length_ratio": self._length_ratio(),
            "logprob_gap": {
                "mean": report.metrics.get("logprob_gap_mean"),  # none: no token of this version in the batch
                "max": report.metrics.get("logprob_gap_max"),
            },
            "metrics": report.metrics,
        }
        self._cut_before = cut
        self._last = msgspec.structs.replace(total)
        return step

    def _length_ratio(self) -> float:
        """Mean tokens of trained over mean tokens of completed trajectories."""
        total = self._sum
        completed = _ratio(total.completed_tokens, total.completed)
        return _ratio(_ratio(total.trained_tokens, total.trained_trajectories), completed)

    def summary(self, core: Core, now: float) -> dict[str, Any]:
        book, total = core.ledger, self._sum
        since_first = now - total.first_batch_s if total.first_batch_s is not None else 0.0
        dropped = sum(book.dropped.values())
        training = len(core.training.proofs) if core.training is not None else 0
        still_open = len(core.table.groups) + training
        return {
            "schema": 1,
            **self._head,
            "elapsed_s": now,
            "outcome": core.finished.outcome if core.finished is not None else "running",
            "detail": core.finished.detail if core.finished is not None else "",
            "steps": self.steps,
            "trainer_idle_fraction": _ratio(total.batch_wait_s, since_first),
            "trainable_per_min": _ratio(60.0 * total.trained_trajectories, now),
            "prefix_reuse": _ratio(total.cached, total.reusable),
            "length_ratio": self._length_ratio(),
            "tokens": self.tokens(),
            "groups": {
                "admitted": book.admitted,
                "completed": book.completed,
                "trained": book.trained,
                "dropped_stale": book.dropped["stale"],
                "dropped_failed": book.dropped["failed"] + book.dropped["task"],
                "dropped_end": book.dropped["end"],
                "open": still_open,
            },
            "attempts": {
                "started": book.started,
                "ended": book.ended,
                "retried": book.retried,
                "restarted": book.restarted,
                "mixed": book.mixed,
                "fallbacks": book.fallbacks,
                "turns_regenerated": total.turns_regenerated,
            },
            "publications": [self._publications[v] for v in sorted(self._publications)],
            "engines": {name: engine.version for name, engine in sorted(core.router.engines.items())},
            "ledger_balanced": book.admitted == book.trained + dropped + still_open,
            "totals": msgspec.to_builtins(total),
        }

    def tokens(self) -> dict[str, int]:
        """Since the run began, by what became of them."""
        total = self._sum
        return {name: getattr(total, name) for name in ("generated", "observed", "trained", "wasted", "lost")}

    def write(self, core: Core, now: float) -> None:
        """summary.json, whole and atomically."""
        _replace(self._folder / "summary.json", msgspec.json.format(msgspec.json.encode(self.summary(core, now))))

    def _restore(self) -> None:
        """Carry on from the last summary; a step that was measured after it is in metrics.jsonl."""
        path, lines = self._folder / "summary.json", self._folder / "metrics.jsonl"
        steps: dict[int, dict[str, Any]] = {}
        if lines.is_file():
            for line in lines.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # a writer that was killed may leave half a line
                    step = msgspec.json.decode(line)
                    steps[step["step"]] = step
        if path.is_file():
            before = msgspec.json.decode(path.read_bytes())
            steps |= {step["step"]: step for step in before["steps"]}
            self._publications = {p["version"]: p for p in before["publications"]}
            self._sum = msgspec.convert(before["totals"], _Totals)
            self._last = msgspec.structs.replace(self._sum)
            self._cut_before = before["elapsed_s"]
        self.steps = [steps[number] for number in sorted(steps)]

    def close(self) -> None:
        self.trace.close()


def _told(moments: Moments | None) -> dict[str, Any] | None:
    """None where the batch was dispatched by an earlier process; the journal, and so a report, still has it."""
    return msgspec.to_builtins(moments, str_keys=True) if moments is not None else None


def _window(core: Core) -> dict[str, Any]:
    limits = core.window.limits
    return {
        "groups": core.window.groups,
        "attempts": core.window.attempts,
        "limits": [f"{limit.of} ≤ {limit.value:.0f} ({limit.name}): {limit.said}" for limit in limits],
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    os.replace(partial, path)  # noqa: PTH105 - atomic on one file system

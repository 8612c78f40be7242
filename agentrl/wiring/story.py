"""Reads a run's story out of its folder: the journal through a fresh core, and what the trainer measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import DataError
from agentrl.journal.reader import JournalReader
from agentrl.records import AttemptId, GroupId, TrajectoryFacts, Version
from agentrl.report.story import STAGES, Lengths, Rate, Sample, StepStory, Story
from agentrl.runtime.moments import Moments, Timeline
from agentrl.runtime.rates import DIMENSIONS, Rates
from agentrl.runtime.recent import Recent
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler import publication
from agentrl.scheduler.core import Core
from agentrl.wiring.recording import policy_in

_SAMPLES = 2_000


def read_story(folder: Path) -> Story:
    """Blocking; also while the run is live. UserError where the folder holds no run, DataError where the journal is
    damaged or of another version of agentrl."""
    core = Core(policy_in(folder))
    teller = _Teller(core)
    for now, data, _ in JournalReader(folder / "run.sqlite").events():
        try:
            event = news.decode(data)
        except msgspec.DecodeError as exc:
            raise DataError(f"{folder / 'run.sqlite'}: {exc}", hint="use the agentrl that wrote the run") from exc
        teller.hear(now, event)
    return teller.story(folder.resolve().name, _measured(folder / "metrics.jsonl"))


def _measured(path: Path) -> dict[int, dict[str, Any]]:
    """Lines of metrics by step."""
    found: dict[int, dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_bytes().splitlines():
            with suppress(msgspec.DecodeError, KeyError, TypeError):  # a writer that was killed leaves half a line
                step = msgspec.json.decode(line)
                found[int(step["step"])] = step
    return dict(sorted(found.items()))


def _gaps(lines: dict[int, dict[str, Any]]) -> tuple[tuple[int, float], ...]:
    means = {step: line.get("logprob_gap", {}).get("mean") for step, line in lines.items()}
    return tuple((step, float(gap)) for step, gap in means.items() if gap is not None)


def _lost(lines: dict[int, dict[str, Any]]) -> dict[int, int]:
    return {step: int(line["tokens"]["lost"]) for step, line in lines.items() if "lost" in line.get("tokens", {})}


class _Life:
    """One trajectory that ended."""

    def __init__(self, facts: TrajectoryFacts, began: float, ended: float) -> None:
        self.facts = facts
        self.began = began
        self.ended = ended


class _Teller:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._recent = Recent(keep=None)
        self._timeline = Timeline()
        self._now = 0.0
        self._started: dict[AttemptId, float] = {}
        self._lives: dict[GroupId, list[_Life]] = defaultdict(list)
        self._ready: dict[GroupId, float] = {}
        self._batches: dict[int, list[_Life]] = {}
        self._cut: dict[int, float] = {}
        self._orders: dict[int, orders.TrainOn] = {}
        self._unpublished: list[tuple[Version, float, list[_Life]]] = []  # (version, when its step ended, its batch)
        self._samples: list[Sample] = []
        self._completed: list[int] = []
        self._trained: list[int] = []
        self._dropped: list[int] = []
        self._time = dict.fromkeys(STAGES, 0.0)
        self._published = 0  # trained trajectories whose weights went live

    def hear(self, now: float, event: news.Event) -> None:
        core = self._core
        late, self._now = core.ledger.late, now
        commands = core.handle(event, now)
        self._recent.heard(now, event, commands, core)
        self._timeline.heard(now, event, commands, core)
        if isinstance(event, news.AttemptEnded) and core.ledger.late == late:
            self._ended(now, event.facts)
        self._follow(now, commands)
        if isinstance(event, news.StepFinished) and event.batch in self._cut:
            self._stepped(now, event)
        self._publish(now)
        self._samples.append(
            Sample(at_s=now, bank=len(core.bank), attempts=len(core.table.running), places=core.places_used)
        )

    def _ended(self, now: float, facts: TrajectoryFacts) -> None:
        group = facts.attempt.group
        self._completed.append(facts.tokens)
        self._lives[group].append(_Life(facts, self._started.pop(facts.attempt, now), now))
        if len(self._lives[group]) == self._core.policy.siblings:
            self._ready[group] = now

    def _follow(self, now: float, commands: Sequence[orders.Command]) -> None:
        for order in commands:
            match order:
                case orders.StartAttempt():
                    resumed = self._started.pop(order.resume, now) if order.resume is not None else now
                    self._started[order.attempt] = resumed
                case orders.TrainOn() if order.batch not in self._cut:
                    self._take(now, order)
                case orders.DropGroup():
                    self._dropped += [life.facts.tokens for life in self._lives.pop(order.group, [])]
                case _:
                    pass

    def _take(self, now: float, order: orders.TrainOn) -> None:
        self._cut[order.batch], self._orders[order.batch] = now, order
        batch: list[_Life] = []
        for proof in order.proofs:
            lives, ready = self._lives.pop(proof.group, []), self._ready.pop(proof.group, now)
            batch += lives
            for life in lives:
                self._spend(life)
                self._time["siblings"] += max(0.0, ready - life.ended)
                self._time["bank"] += max(0.0, now - ready)
        self._trained += [life.facts.tokens for life in batch]
        self._batches[order.batch] = batch

    def _spend(self, life: _Life) -> None:
        facts = life.facts
        spent = {
            "opening": facts.open_s,
            "queue": facts.queue_s,
            "prefill": facts.prefill_s,
            "decode": max(0.0, facts.engine_s - facts.queue_s - facts.prefill_s),
            "lane_wait": facts.open_wait_s + facts.tool_wait_s + facts.verify_wait_s,
            "tool": max(0.0, facts.tool_s - facts.tool_wait_s),
            "verifying": facts.verify_s,
        }
        for stage, seconds in spent.items():
            self._time[stage] += seconds
        self._time["other"] += max(0.0, life.ended - life.began - sum(spent.values()))

    def _stepped(self, now: float, event: news.StepFinished) -> None:
        batch = self._batches[event.batch]
        self._time["training"] += len(batch) * (now - self._cut[event.batch])
        self._unpublished.append((event.version, now, batch))

    def _publish(self, now: float) -> None:
        live = publication.live_version(self._core.engines, Version(0))
        while self._unpublished and self._unpublished[0][0] <= live:
            _, since, batch = self._unpublished.pop(0)
            self._time["publication"] += len(batch) * (now - since)
            self._published += len(batch)

    def story(self, name: str, lines: dict[int, dict[str, Any]]) -> Story:
        core, book = self._core, self._core.ledger
        every = max(1, len(self._samples) // _SAMPLES)
        counts = {"groups admitted": book.admitted, "groups trained": book.trained}
        counts |= {f"groups dropped: {reason}": n for reason, n in sorted(book.dropped.items()) if n}
        counts |= {"attempts started": book.started, "retried": book.retried, "restarted": book.restarted}
        counts |= {"of several versions": book.mixed, "fallbacks of finish": book.fallbacks}
        return Story(
            name=name,
            outcome=core.finished.outcome if core.finished is not None else "running or killed",
            elapsed_s=self._now,
            batch_groups=core.policy.groups,
            bound=core.policy.bound,
            in_flight=core.policy.in_flight,
            window_groups=core.window.groups,
            steps=tuple(self._steps()),
            samples=tuple(self._samples[::every]),
            lengths=Lengths(
                completed=tuple(self._completed), trained=tuple(self._trained), dropped=tuple(self._dropped)
            ),
            stages=self._stages(),
            gaps=_gaps(lines),
            lost=_lost(lines),
            waited_s=self._recent.waited(self._now),
            watched_s=self._recent.watched(self._now),
            length_ratio=self._recent.length_ratio,
            rates={name: _rates(self._recent.rates, name) for name in DIMENSIONS},
            counts=counts,
        )

    def _stages(self) -> dict[str, float]:
        trained = len(self._trained)
        whole = {**dict.fromkeys(STAGES, trained), "publication": self._published}
        return {stage: self._time[stage] / max(1, whole[stage]) for stage in STAGES} if trained else {}

    def _steps(self) -> list[StepStory]:
        return [
            StepStory(
                step=step.batch + 1,
                at_s=step.at_s,
                interval_s=step.interval_s,
                waited_s=step.waited_s,
                train_s=step.train_s,
                ages=step.ages,
                tokens=_by_age(self._orders[step.batch]),
                masked=sum(proof.masked for proof in self._orders[step.batch].proofs),
                reward=sum(life.facts.reward for life in batch) / max(1, len(batch)),
                generated=sum(life.facts.generated for life in batch),
                ready=tuple(sorted(self._timeline.batches[step.batch].ready_s.items())),
                moments=_moments(self._timeline.batches[step.batch]),
            )
            for step in self._recent.steps
            for batch in [self._batches[step.batch]]
        ]


def _moments(found: Moments) -> tuple[tuple[str, float | None], ...]:
    return (
        ("dispatched_s", found.dispatched_s),
        ("step_began_s", found.step_began_s),
        ("step_ended_s", found.step_ended_s),
        ("publish_began_s", found.publish_began_s),
        ("live_s", found.live_s),
    )


def _by_age(order: orders.TrainOn) -> tuple[tuple[int, int], ...]:
    ages: Counter[int] = Counter()
    for version, count in (pair for proof in order.proofs for pair in proof.tokens):
        ages[order.version - version] += count
    return tuple(sorted(ages.items()))


def _rates(found: Rates, dimension: str) -> tuple[Rate, ...]:
    return tuple(
        Rate(
            bucket=bucket,
            trained=tally.trained,
            stale=tally.stale,
            dropped=tally.dropped,
            completion=tally.completion,
            freshness=tally.freshness,
            age=tally.age,
        )
        for bucket, tally in found.of(dimension)
    )

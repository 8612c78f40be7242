"""A run's figures for Prometheus: gauges and counters read from its picture when asked, histograms fed as turns end.

Nothing is kept for a metric that the run does not keep anyway: who does not ask does not pay. The dashboard in
docs/grafana.json asks for these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentrl.records import Trajectory, Turn
from agentrl.runtime.rates import DIMENSIONS, Rates, Tally
from agentrl.runtime.status import EngineStatus, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_PER_ENGINE = ("engine", "rank")


class Metrics:
    """One run's. steps: telemetry's, of which the last is told. tokens: sums by what became of them."""

    def __init__(
        self,
        picture: Callable[[], Status],
        rates: Rates,
        steps: Callable[[], list[dict[str, Any]]],
        tokens: Callable[[], dict[str, int]],
    ) -> None:
        self._picture = picture
        self._rates = rates
        self._steps = steps
        self._tokens = tokens
        self._measured = CollectorRegistry(auto_describe=False)
        turns, attempts = self._histogram("turn"), self._histogram("attempt")
        self._parts = {name: turns.labels(name) for name in ("queue", "prefill", "decode", "lane_wait", "tool")}
        self._lives = {name: attempts.labels(name) for name in ("opening", "open_wait", "verifying", "verify_wait")}

    def _histogram(self, of: str) -> Histogram:
        return Histogram(
            f"agentrl_{of}_seconds", f"Parts of one {of}.", ["part"], buckets=_SECONDS, registry=self._measured
        )

    def turn(self, turn: Turn) -> None:
        parts = self._parts
        parts["queue"].observe(turn.queue_s)
        parts["prefill"].observe(turn.prefill_s)
        parts["decode"].observe(max(0.0, turn.engine_s - turn.queue_s - turn.prefill_s))
        if turn.command is not None:
            parts["lane_wait"].observe(turn.tool_wait_s)
            parts["tool"].observe(turn.tool_s)

    def ended(self, trajectory: Trajectory) -> None:
        lives = self._lives
        lives["opening"].observe(trajectory.open_s)
        lives["open_wait"].observe(trajectory.open_wait_s)
        lives["verifying"].observe(trajectory.verdict.verify_s)
        lives["verify_wait"].observe(trajectory.verdict.queue_s)

    def now(self) -> Callable[[], bytes]:
        """Takes the figures now; what it returns writes them in Prometheus' text format, in any thread."""
        status, steps, tokens = self._picture(), self._steps()[-1:], dict(self._tokens())
        rates = [(name, self._rates.of(name)) for name in DIMENSIONS]

        def text() -> bytes:
            pictured = CollectorRegistry(auto_describe=False)
            pictured.register(_Pictured(status, rates, steps, tokens))
            return generate_latest(self._measured) + generate_latest(pictured)

        return text


@dataclass(eq=False)
class _Pictured(Collector):
    status: Status
    rates: list[tuple[str, list[tuple[str, Tally]]]]
    steps: list[dict[str, Any]]
    tokens: dict[str, int]

    def collect(self) -> Iterable[Metric]:
        yield from _trainer(self.status)
        yield from _work(self.status)
        yield from _engines(self.status)
        yield from _hosts(self.status)
        yield from _finished(self.rates)
        yield _counter("tokens", "Tokens by what became of them.", "what", self.tokens)
        yield from _last_step(self.steps)


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentrl_{name}", says, value=value)


def _gauges(name: str, says: str, labels: Iterable[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(f"agentrl_{name}", says, labels=list(labels))
    for key, value in values:
        family.add_metric(list(key), value)
    return family


def _counter(name: str, says: str, label: str, values: dict[str, int]) -> Metric:
    """Prometheus puts `_total` behind its name."""
    family = CounterMetricFamily(f"agentrl_{name}", says, labels=[label])
    for key in sorted(values):
        family.add_metric([key], values[key])
    return family


def _trainer(status: Status) -> Iterator[Metric]:
    states = ((("absent",), "absent"), (("ready",), "ready"), (("stepping",), "stepping"))
    yield _gauges(
        "trainer_state",
        "1 for what the trainer does: ready means that it waits for a batch.",
        ["state"],
        ((key, float(status.trainer == name)) for key, name in states),
    )
    yield _gauge("trainer_state_seconds", "How long the trainer has been in its state.", status.trainer_for_s)
    waited = CounterMetricFamily("agentrl_trainer_waited_seconds", "Waited for batches, from the first one on.")
    waited.add_metric([], status.waited_s)
    yield waited
    yield _gauge("step", "Optimizer steps that are done.", status.step)
    yield _gauge("version", "The policy version that the trainer holds.", status.version)
    yield _gauge("live_version", "The oldest version that an engine serves.", status.live_version)


def _work(status: Status) -> Iterator[Metric]:
    yield _gauge("ready_groups", "Complete groups in the bank.", status.bank)
    yield _gauge("batch_groups", "Groups that a batch takes.", status.batch_groups)
    yield _gauge("window_used", "Places of the window that are taken.", status.places_used)
    yield _gauge("window_groups", "Places of the window.", status.window_groups)
    yield _gauge("conversations", "Attempts that run.", status.attempts)
    yield _gauge("conversations_limit", "Attempts that may run.", status.window_attempts)
    ages = Counter(status.version - group.oldest for group in status.groups if group.oldest is not None)
    yield _gauges(
        "open_groups",
        "Open groups by the age of their oldest token, in versions.",
        ["age"],
        (((str(age),), float(ages[age])) for age in range(max([status.bound, *ages]) + 1)),
    )
    groups = {"admitted": status.admitted, "trained": status.trained}
    yield _counter("groups", "Groups by what became of them.", "what", groups | status.dropped)
    tries = {"retried": status.retried, "restarted": status.restarted, "late": status.late}
    yield _counter("attempts", "Attempts that were tried again, and answers that came too late.", "what", tries)
    yield _gauge("quiet_seconds", "Since anything moved.", status.quiet_s)
    yield _gauge("failed_in_a_row", "Attempts that failed one after the other.", status.failing)
    yield _gauge("loop_lag_seconds", "How late the run's event loop was, worst of ten seconds.", status.loop_lag_s)
    if status.length_ratio is not None:
        yield _gauge("length_ratio", "Mean tokens of trained over completed trajectories.", status.length_ratio)


def _engines(status: Status) -> Iterator[Metric]:
    engines = status.engines
    down = [gone.name for gone in status.down if gone.kind == "engine"]
    up = [((e.name,), 1.0) for e in engines] + [
        ((name,), 0.0) for name in down if name not in {e.name for e in engines}
    ]
    yield _gauges("engine_up", "1 where the engine serves this run.", ["engine"], up)
    yield _gauges("engine_version", "The version it holds.", ["engine"], (((e.name,), e.version) for e in engines))
    for name, field, says in (
        ("engine_running", "running", "Requests that run."),
        ("engine_waiting", "waiting", "Requests that wait for a slot."),
        ("engine_slots", "slots", "Requests that run at most."),
        ("engine_conversations", "conversations", "Conversations that the scheduler has placed there."),
        ("engine_kv_used_tokens", "kv_used_tokens", "KV cache in use."),
        ("engine_kv_tokens", "kv_total_tokens", "KV cache."),
        ("engine_tokens_per_second", "tokens_per_s", "Sampled, of attempts that ended in the last minute."),
        ("engine_prefix_reuse", "prefix_reuse", "Share of reusable prompt tokens that came from a cache."),
    ):
        yield _gauges(name, says, _PER_ENGINE, _by_rank(engines, field))


def _by_rank(engines: Iterable[EngineStatus], field: str) -> Iterator[tuple[tuple[str, ...], float]]:
    for engine in engines:
        for rank in engine.ranks:
            value = getattr(rank, field)
            if value is not None:
                yield (engine.name, str(rank.rank)), value


def _hosts(status: Status) -> Iterator[Metric]:
    down = [gone.name for gone in status.down if gone.kind == "sandbox host" and gone.name not in status.hosts]
    up = [((name,), 1.0) for name in status.hosts] + [((name,), 0.0) for name in down]
    yield _gauges("host_up", "1 where the sandbox host serves this run.", ["host"], up)
    used = [((name,), float(count)) for name, count in status.hosts.items()]
    yield _gauges("sandboxes", "Attempts placed on the host.", ["host"], used)
    lanes = [((host.name, lane.lane.value), lane) for host in status.sandboxes for lane in host.lanes]
    for name, field, says in (
        ("lane_running", "running", "Operations that run."),
        ("lane_queued", "queued", "Operations that wait."),
        ("lane_cap", "cap", "Operations that run at most."),
        ("lane_wait_mean_seconds", "wait_s_mean", "Mean wait since the daemon began."),
        ("lane_wait_p95_seconds", "wait_s_p95", "95th percentile of the last few hundred waits."),
    ):
        yield _gauges(name, says, ["host", "lane"], ((key, getattr(lane, field)) for key, lane in lanes))


def _finished(rates: Iterable[tuple[str, list[tuple[str, Tally]]]]) -> Iterator[Metric]:
    by = ["by", "bucket"]
    finished = CounterMetricFamily(
        "agentrl_finished", "Finished trajectories by what became of their group.", labels=[*by, "what"]
    )
    ages = CounterMetricFamily("agentrl_trained_ages", "Ages of trained trajectories, summed, in versions.", labels=by)
    for name, found in rates:
        for bucket, tally in found:
            for what in ("trained", "stale", "dropped"):
                finished.add_metric([name, bucket, what], getattr(tally, what))
            ages.add_metric([name, bucket], tally.ages)
    yield finished
    yield ages


def _last_step(steps: list[dict[str, Any]]) -> Iterator[Metric]:
    """Of the last optimizer step; nothing before the first."""
    if not steps:
        return
    last = steps[-1]
    for name, field, says in (
        ("step_reward_mean", "reward_mean", "Mean reward of the last batch."),
        ("step_interval_seconds", "interval_s", "Between the last two cuts."),
        ("step_wait_seconds", "batch_wait_s", "That the trainer waited for the last batch."),
        ("step_train_seconds", "train_s", "Of the last optimizer step."),
        ("step_publish_seconds", "publish_s", "From its end until every engine that took it had."),
    ):
        yield _gauge(name, says, last[field])
    yield _gauge("step_age_max", "Largest age in the last batch, in versions.", last["age"]["max"])
    yield _gauge("step_age_mean", "Mean age in the last batch.", last["age"]["mean"])
    gap = {which: value for which, value in last["logprob_gap"].items() if value is not None}
    yield _gauges("logprob_gap", "|trainer's - engine's logprob|.", ["which"], (((k,), v) for k, v in gap.items()))
    told = (((name,), float(value)) for name, value in sorted(last["metrics"].items()))
    yield _gauges("trainer_metric", "What the trainer measured in its last step.", ["name"], told)

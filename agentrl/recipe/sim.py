"""The recipe of a simulated fleet: what serves, what is played, what the scheduler may do. Strict like `schema`.

Constants of hardware and model are not here but, with their sources, in the simulator; a recipe chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from agentrl.recipe.schema import Natural, Positive, Publish, Seconds, Section
from agentrl.records import Lane

Factor = Annotated[float, Meta(gt=0)]


class Engine(Section):
    """As measured in a live run, by `agentrl bench calibrate`. Seconds."""

    step_s: Annotated[float, Meta(ge=0)]  # of one token for all that run, and
    sequence_s: Annotated[float, Meta(ge=0)]  # more for each of them
    prefill_token_s: Annotated[float, Meta(ge=0)]  # of one prompt token that is not cached
    stage_s: Annotated[float, Meta(ge=0)]  # new weights, brought near
    swap_s: Annotated[float, Meta(ge=0)]  # and loaded
    ranks: Positive = 1
    slots: Positive = 32  # of one rank
    kv_tokens: Positive = 65_536  # of one rank
    threads: Natural = 0  # of the host's CPUs, pooled, that it takes while it steps


class Controller(Section):
    """The one thread that plays all attempts."""

    start_s: Annotated[float, Meta(ge=0)] = 0.0  # before an attempt asks for its sandbox; nobody works
    turn_s: Annotated[float, Meta(ge=0)] = 0.0  # CPU seconds of a turn
    attempt_s: Annotated[float, Meta(ge=0)] = 0.0  # and of an attempt besides its turns


class Fleet(Section):
    hosts: Positive = 4  # each with its engines over all its GPUs, and its share of the sandboxes
    engines_per_host: Positive = 1
    measured: Engine | None = None  # engines as a live run measured them, in place of the model's and the GPU's figures
    gpus_per_host: Positive = 8
    cpus_per_host: Positive = 128
    serving_cpus: Natural = 16  # CPUs that one engine's own threads occupy
    model: Literal["glm-5.2"] = "glm-5.2"
    gpu: Literal["b300"] = "b300"
    weights_dtype: Literal["bf16", "fp8"] = "fp8"
    kv_dtype: Literal["bf16", "fp8"] = "fp8"
    topology: Literal["tp8", "dp8ep8"] = "dp8ep8"  # one KV domain over all GPUs, or one for each with shared experts
    slots: Natural = 0  # running requests of one rank; 0: the topology's own
    mtp: Natural = 3  # tokens drafted per step; 0: none
    offload: bool = False  # a host tier for cached KV, whose entries are never read again
    derate: Factor = 1.0  # on every step: what kernels lose against the roofline; to be fitted, 1.0: nothing fitted
    flops_share: Annotated[float, Meta(gt=0, le=1)] = 0.45  # of the peak that kernels reach; assumed, may be fitted
    lanes: Literal["isolated", "pooled"] = "isolated"  # CPU sets by lane, or one pool shared with the engines
    package_cap: Positive = 16  # package-heavy operations at once, on one host
    greed: Factor = 1.0  # pooled: threads that parallel tools start for each CPU they can use; to be fitted
    lane_caps: dict[Lane, Positive] = {}  # pooled: operations at once, by lane; without a bound where none is named
    controller: Controller = Controller()  # pooled: on the first host
    sandboxes_per_host: Positive = 1024


class Overrides(Section):
    """Factors on the preset's figures; 1.0 leaves them."""

    turns: Factor = 1.0
    reply: Factor = 1.0
    observed: Factor = 1.0
    difficulty: Factor = 1.0  # on the spread between groups
    tool_cpu: Factor = 1.0
    tool_wait: Factor = 1.0


class Workload(Section):
    preset: Literal["terminal-bench", "swe-bench"] = "terminal-bench"
    trace: str = ""  # a file of recorded attempts, in place of the preset
    overrides: Overrides = Overrides()


class SimPolicy(Section):
    groups: Positive = 8  # B
    siblings: Positive = 32  # n
    spare: Natural = 0
    window_groups: Natural | Literal["auto"] = 0  # W; 0: twice the batch; auto: as measured
    window_attempts: Natural = 0  # offered trajectories; 0: those of the window, under auto what the hosts take
    K: Natural = 8
    retries: Natural = 3
    attempt_timeout_s: Seconds = 7_200.0
    stall_s: Seconds = 3_600.0
    move_margin: Annotated[float, Meta(ge=0)] = 0.2
    when_stale: Literal["drop", "wait", "mask"] = "drop"
    mode: Literal["async", "sync", "pipelined"] = "async"
    round_groups: Natural = 0  # sync and pipelined: groups of a round
    admission: Literal["fifo", "frontier", "shortest-group", "longest-first", "expiry"] = "fifo"


class SimTrainer(Section):
    step_s: Annotated[float, Meta(ge=0)] = 60.0  # one optimizer step; 0: weights stay fixed in all but number
    token_s: Annotated[float, Meta(ge=0)] = 0.0  # more for each trained token
    threads: Natural = 0  # of the first host's CPUs, pooled, that it takes while it steps; 0: a machine of its own


class SimRecipe(Section):
    name: str
    seed: Natural = 0
    steps: Positive = 12
    fleet: Fleet = Fleet()
    workload: Workload = Workload()
    policy: SimPolicy = SimPolicy()
    trainer: SimTrainer = SimTrainer()
    publish: Publish = Publish()

    @property
    def window_groups(self) -> int:
        fixed = 0 if self.policy.window_groups == "auto" else self.policy.window_groups
        return fixed or 2 * self.policy.groups

    @property
    def window_attempts(self) -> int:
        if self.policy.window_groups == "auto":
            return self.policy.window_attempts or self.fleet.hosts * self.fleet.sandboxes_per_host
        return self.policy.window_attempts or self.window_groups * (self.policy.siblings + self.policy.spare)

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """(TOML path, what cannot work, remedy) of rules that relate several keys."""
        groups, room = self.policy.groups, self.fleet.hosts * self.fleet.sandboxes_per_host
        if self.window_groups < groups:
            yield (
                "policy.window_groups",
                f"{self.window_groups} open groups can never fill a batch of {groups}",
                "raise it",
            )
        engines = self.fleet.measured.threads if self.fleet.measured is not None else 0
        shared = self.trainer.threads or engines or self.fleet.controller != Controller()
        if shared and self.fleet.lanes != "pooled":
            yield "fleet.lanes", "isolated lanes leave no CPUs that others could share", 'set it to "pooled"'
        if self.fleet.serving_cpus >= self.fleet.cpus_per_host:
            yield "fleet.serving_cpus", "leaves no CPU for sandboxes", f"below {self.fleet.cpus_per_host}"
        if room < groups * self.policy.siblings:
            message = f"{room} sandboxes in all, one batch needs {groups * self.policy.siblings}"
            yield "fleet.sandboxes_per_host", message, "raise it, or fleet.hosts"

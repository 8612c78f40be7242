"""The recipe: everything a run is told, typed. Units are in the names; a default is a choice, its reason beside it.

An unknown key is an error that names the nearest valid one (`load.py`). Numbers that follow from others are derived in
`plan`, never asked for twice.
"""

from __future__ import annotations

from typing import Annotated, Literal, dataclass_transform

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, no unknown keys."""


class Model(Section):
    path: str = "builtin:tiny"  # a model folder, or `builtin:tiny`: the small policy that ships with agentrl
    context_tokens: Positive = 1024  # prompt and reply together; a conversation that would pass it ends


class Tasks(Section):
    source: Literal["chores", "harbor"] = "chores"  # generated shell tasks, or task folders of your own
    path: str = ""  # harbor: a folder of task folders
    kinds: tuple[str, ...] = ()  # chores: only these families; empty: all
    instances: Positive = 64  # chores: different problems of each family
    # chores: median seconds that a problem's hidden tests wait before they run, as suites do that install what they
    # need; each problem its own, with a heavy tail (lognormal, at most 15 s); 0: they run at once
    tests_wait_s: Annotated[float, Meta(ge=0, le=10)] = 0.0


class Engines(Section):
    kind: Literal["embedded", "sglang"] = "embedded"  # the small CPU engine, or SGLang
    count: Positive = 2  # engine processes; with two, one generates while the other takes new weights
    ranks: Positive = 1  # data-parallel ranks of each engine, each with its own KV cache
    slots: Positive = 32  # sequences that one rank decodes at once
    kv_tokens: Natural = 65_536  # KV capacity of one rank; 0: what fits, by SGLang's own account
    threads: Positive = 1  # CPU threads of an embedded engine
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the engines' weights, as far as those are not quantized
    gpus: Natural = 0  # sglang: of one engine, split by tensor parallelism; 0: one for each rank
    experts_over: Natural = 0  # sglang: GPUs of one engine that its experts are spread over; 0: SGLang decides
    kv_dtype: Literal["auto", "bfloat16", "fp8_e4m3"] = "auto"  # sglang: of the KV cache; auto: SGLang decides
    memory_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # sglang: of a GPU, for weights and KV; 0: SGLang decides
    gpu_gb: Annotated[float, Meta(ge=0)] = 0.0  # memory of one GPU, for `plan` to estimate what kv_tokens = 0 comes to
    prefill_tokens: Natural = 0  # sglang: of one prefill step of the engine, all ranks together; 0: SGLang decides
    draft_tokens: Natural = 0  # sglang: guessed ahead by the model's own MTP layer, then verified; 0: no speculation
    args: tuple[str, ...] = ()  # sglang: more flags, verbatim; they win over the keys above
    env: dict[str, str] = {}  # sglang: more environment variables
    python: str = ""  # sglang: the interpreter that has it installed; empty: this one
    attach: tuple[str, ...] = ()  # URLs of engines that already run; then nothing is started
    token_file: str = ""  # of attached engines; empty: they ask for none
    base_port: Natural = 0  # 0: free ports
    start_timeout_s: Seconds = 120.0  # from start to serving
    request_timeout_s: Seconds = 120.0  # one turn's generation
    admin_timeout_s: Seconds = 60.0  # pause, load, continue: each
    stuck_s: Annotated[float, Meta(ge=0)] = 60.0  # no token for so long while requests run: it is restarted; 0: never
    restarts: Natural = 3  # per engine; then it stays down

    @property
    def split(self) -> int:
        """GPUs (on a CPU: processes) of one SGLang engine."""
        return max(self.gpus, self.ranks)


class LaneCaps(Section):
    """How many operations of a lane run at once; 0 means twice the CPUs of its set."""

    reset: Natural = 0  # opening a sandbox: files and set-up
    command: Natural = 0  # the model's commands
    package: Natural = 16  # installs, builds, downloads: what the detector calls heavy
    verify: Natural = 0  # hidden tests
    cleanup: Natural = 0  # closing a sandbox


class Docker(Section):
    url: str = ""  # of the engine: unix:///path/to/docker.sock; empty: DOCKER_HOST, else Docker's own
    network: str = "bridge"  # the engine's network for tasks that ask for one; all others have loopback only
    warm: Natural = 32  # idle containers kept for the next conversations
    starts: Positive = 4  # containers being started at once
    starts_per_s: Annotated[float, Meta(gt=0)] = 10.0  # of them, with jitter
    call_timeout_s: Seconds = 30.0  # of one call to the engine


class Sandbox(Section):
    backend: Literal["namespace", "bubblewrap", "docker", "process"] = "namespace"  # how a sandbox is contained
    root: str = "/"  # lower layer of the sandboxes' file system; `/` with private folders masked; not of docker's
    image: str = ""  # docker: what tasks that name no image run in
    docker: Docker = Docker()  # how its engine is used
    lanes: LaneCaps = LaneCaps()
    serving_cpus: str = ""  # CPU list kept for engines, e.g. "0-3"; empty: none kept
    lease_s: Seconds = 600.0  # an unrenewed sandbox is reaped after this
    max_live: Positive = 256  # sandboxes open at once on one host
    attach: str = ""  # folder of a daemon that already runs (`agentrl sandbox up` names it); then nothing is started
    start_timeout_s: Seconds = 30.0  # of the daemon
    restarts: Natural = 5  # of the daemon; then the host stays down


class HostSpec(Section):
    """One machine of the fleet. `~/.ssh/config` supplies what is left out here, jump hosts included."""

    name: str  # names it everywhere; letters, digits, dots and dashes
    address: str = ""  # a name or address that ssh takes; empty: the name; "local": this machine
    user: str = ""  # to log in as; empty: as ssh would
    port: Natural = 0  # of sshd; 0: as ssh would
    roles: tuple[Literal["engines", "sandbox"], ...] = ("engines", "sandbox")  # what runs there
    engines: Natural = 0  # of `engines.count`; 0: an even share of what other hosts leave
    python: str = ""  # its interpreter that has agentrl; empty: where `agentrl hosts install` puts one
    home: str = ""  # folder there that holds what a run needs while it runs; empty: ~/.agentrl
    serving_cpus: str = ""  # CPU list kept for engines there; empty: as `sandbox.serving_cpus`
    # how versions of the weights get there:
    # auto    a shared file system is found by trying, otherwise they are copied
    # shared  the run's folder is at the same path there
    # copy    files that are missing there are sent
    weights: Literal["auto", "shared", "copy"] = "auto"
    lease_s: Seconds = 120.0  # what a run started there lives on this long without hearing of it


class Rollout(Section):
    system: str = ""  # system prompt; empty: the task source's own
    max_turns: Positive = 8  # of one conversation; a task's own limit wins
    max_new_tokens: Positive = 64  # of one turn
    temperature: Annotated[float, Meta(gt=0)] = 1.0  # 1.0 keeps engine logprobs the true behaviour logprobs
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1.0 for the same reason
    parse_limit: Positive = 3  # malformed replies in a row before the attempt ends
    observation_chars: Positive = 1_000  # of a command's output shown to the model, head and tail


class Batch(Section):
    groups: Positive = 4  # B: complete groups of one optimizer step
    siblings: Positive = 8  # n: attempts of a group that count
    spare: Natural = 0  # further siblings started; the first n to end count


class Window(Section):
    """Depth, not freshness: how much work is offered. Versions passing while a group is in flight: W/B on average."""

    # W: open groups (running, or ready and not yet trained and live); 0: twice the batch;
    # auto: set at each step from what was measured, beginning there
    groups: Natural | Literal["auto"] = 0
    # conversations in flight; 0: what the engines' slots carry. Under auto the most, and 0: what the sandbox hosts take
    attempts: Natural = 0


class Freshness(Section):
    K: Natural = 4  # largest age, in versions, of the oldest trainable token of a group at its optimizer step
    # what becomes of a group that would be older:
    # drop   it goes, and short work is favoured: watch length_ratio
    # wait   nothing expires: the oldest groups are trained first and a batch waits for those that could not follow
    # mask   it is trained, without its over-age tokens; its rewards still count for the group's baseline
    when_stale: Literal["drop", "wait", "mask"] = "drop"


class Schedule(Section):
    # async      groups are sampled, trained and weights published all at once
    # pipelined  rounds at fixed weights: groups train as they complete, weights go out after the round's last step
    # sync       rounds at fixed weights: training begins when the whole round is complete
    mode: Literal["async", "pipelined", "sync"] = "async"
    round_steps: Positive = 1  # optimizer steps of a round; a round has batch.groups times as many groups
    # which waiting conversation starts first: the oldest group's (fifo), of the group that lacks fewest siblings
    # (frontier), has least work left (shortest-group), the longest conversations (longest-first), or fewest versions
    # left until it is stale, then least work (expiry)
    admission: Literal["fifo", "frontier", "shortest-group", "longest-first", "expiry"] = "fifo"
    retries: Natural = 3  # new tries of one sibling after infra faults
    attempt_timeout_s: Seconds = 300.0  # an attempt that takes longer is cancelled and counts as an infra fault
    stall_s: Seconds = 120.0  # nothing moved for this long: name who blocks, exit 4
    move_margin: Annotated[float, Meta(ge=0)] = 0.2  # a conversation moves only for a gain beyond this share


class Train(Section):
    lr: Annotated[float, Meta(gt=0)] = 3e-4  # AdamW's learning rate
    warmup_steps: Natural = 0  # steps over which the rate rises to `lr`
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0  # AdamW's
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    clip_norm: Annotated[float, Meta(gt=0)] = 1.0  # largest norm of the whole gradient
    # token-level importance ratio exp(trainer logprob - engine logprob); outside (1-low, 1+high) a token gives no
    # gradient, whatever the sign of its advantage (direct double-sided importance sampling: GLM-5, SAO)
    ratio_low: Annotated[float, Meta(gt=0, lt=1)] = 0.8
    ratio_high: Annotated[float, Meta(gt=0)] = 3.0  # see ratio_low
    advantage: Literal["group_norm", "group_center"] = "group_norm"  # against the siblings' mean; norm: in deviations
    micro_tokens: Positive = 8_192  # tokens of one packed forward pass
    threads: Positive = 1  # CPU threads of the trainer
    checkpoint_every: Positive = 1  # steps
    keep_checkpoints: Positive = 2  # the newest
    step_timeout_s: Seconds = 600.0  # the lease on a claimed batch; the trainer renews it while it works
    restarts: Natural = 3  # of the trainer; then the run ends
    embedded: bool = True  # `run` starts the trainer itself; false: wait for `agentrl train --attach`


class Publish(Section):
    order: Literal["rolling", "all"] = "rolling"  # engines one after the other, or all together
    # what happens to unfinished work when an engine takes new weights:
    # continue    requests go on with their KV cache, each token marked with the version that made it
    # regenerate  after grace_s unfinished generations are aborted and those turns sampled anew; earlier turns stay
    # finish      an engine gets nothing new until its conversations have ended under its old weights
    # restart     conversations of the engine start over: the dearest
    in_flight: Literal["continue", "regenerate", "finish", "restart"] = "continue"
    grace_s: Annotated[float, Meta(ge=0)] = 2.0  # regenerate: for generations to end by themselves
    finish_timeout_s: Seconds = 120.0  # finish: then what is left goes on under the new weights, counted as a fallback
    max_unavailable: Positive = 1  # engines that may be swapping at once under `rolling`
    keep_versions: Positive = 3  # the newest, on disk
    # how engines get new weights; started anew they read them from the disk in both cases:
    # disk         they read the version's folder, which is brought to their host before
    # distributed  a process of the run broadcasts it to their GPUs, within the pause
    transfer: Literal["disk", "distributed"] = "disk"
    backend: Literal["nccl", "gloo"] = "nccl"  # distributed: gloo for engines on CPUs
    address: str = "127.0.0.1"  # distributed: of this machine, as the engines' hosts reach it; on a network of your own


class Telemetry(Section):
    port: Natural = 0  # of the run's HTTP face, with /metrics for Prometheus; 0: a free one, which is in the file `url`
    tensorboard: bool = False  # each step's figures into the run's folder `tensorboard/`; needs agentrl[tensorboard]
    wandb: str = ""  # project at Weights & Biases for the same; empty: none; needs agentrl[wandb]


class Recipe(Section):
    name: str  # names the run's folder
    seed: Natural = 0  # of the order of tasks, and of the trainer
    steps: Positive = 20  # optimizer steps
    model: Model = Model()
    tasks: Tasks = Tasks()
    engines: Engines = Engines()
    sandbox: Sandbox = Sandbox()
    rollout: Rollout = Rollout()
    batch: Batch = Batch()
    window: Window = Window()
    freshness: Freshness = Freshness()
    schedule: Schedule = Schedule()
    train: Train = Train()
    publish: Publish = Publish()
    telemetry: Telemetry = Telemetry()
    hosts: tuple[HostSpec, ...] = ()  # machines that engines and sandboxes run on; none: this one

    @property
    def engine_hosts(self) -> tuple[str, ...]:
        """For each engine that is started, e0 first: the name of its host. Empty names where there is no inventory;
        fewer than `engines.count` where the hosts do not take all of them."""
        if not self.hosts:
            return ("",) * self.engines.count
        having = [host for host in self.hosts if "engines" in host.roles]
        sharing = [host.name for host in having if not host.engines]
        left = max(0, self.engines.count - sum(host.engines for host in having))
        shares = {name: left // len(sharing) + (i < left % len(sharing)) for i, name in enumerate(sharing)}
        return tuple(host.name for host in having for _ in range(host.engines or shares[host.name]))

    def first_gpu(self, engine: int) -> int:
        """The lowest of engine e`engine`'s GPUs on its host: those of one host take theirs in order."""
        hosts = self.engine_hosts
        return hosts[:engine].count(hosts[engine]) * self.engines.split

    @property
    def sandbox_hosts(self) -> tuple[str, ...]:
        """Names of the hosts that a sandbox daemon is started on; one empty name where there is no inventory."""
        return tuple(host.name for host in self.hosts if "sandbox" in host.roles) if self.hosts else ("",)

    @property
    def round_groups(self) -> int:
        """Groups of one round; 0 where there are no rounds."""
        return 0 if self.schedule.mode == "async" else self.schedule.round_steps * self.batch.groups

    @property
    def window_groups(self) -> int:
        """Under `auto`: what it begins with."""
        fixed = 0 if self.window.groups == "auto" else self.window.groups
        return fixed or max(2 * self.batch.groups, self.round_groups)

    @property
    def window_attempts(self) -> int:
        """Conversations in flight: by default the slots of all engines: decoding, not admission, is the limit."""
        if self.window.groups == "auto":
            return self.window.attempts or self.sandbox.max_live * max(1, len(self.sandbox_hosts))
        return self.window.attempts or self.engines.count * self.engines.ranks * self.engines.slots

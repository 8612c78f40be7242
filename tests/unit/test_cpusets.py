"""The CPU planner's laws, on made-up machines of 1 to 256 CPUs with NUMA nodes and SMT."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from agentrl.records import Lane
from agentrl.sandbox.cpusets import WEIGHTS, Cpu, CpuPlan, Topology, format_cpus, one_pool, parse_cpus, plan_cpus
from agentrl.sandbox.topology import read_topology


def machine(cores: int, *, smt: int = 1, nodes: int = 1) -> Topology:
    """Linux numbering: first siblings 0..cores-1, second siblings after them; cores in equal blocks per node."""
    block = -(-cores // nodes)
    return Topology(
        cpus=tuple(Cpu(id=s * cores + c, core=c, node=c // block) for s in range(smt) for c in range(cores))
    )


@st.composite
def machines(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    smt = draw(st.sampled_from([1, 2, 4]))
    cores = draw(st.integers(1, 256 // smt))
    topology = machine(cores, smt=smt, nodes=draw(st.integers(1, min(cores, 8))))
    ids = [cpu.id for cpu in topology.cpus]
    serving = draw(st.lists(st.sampled_from(ids), unique=True, max_size=len(ids) - 1))
    return topology, serving


def sets_of(plan: CpuPlan) -> set[tuple[int, ...]]:
    return set(plan.lanes.values())


@given(machines())
def test_every_free_cpu_has_one_owner_and_no_lane_is_empty(case: tuple[Topology, list[int]]) -> None:
    topology, serving = case
    plan = plan_cpus(topology, serving=serving)
    owned = [cpu for cpus in sets_of(plan) for cpu in cpus]
    assert set(plan.lanes) == set(Lane)
    assert all(plan.lanes.values())
    assert sorted(owned) == sorted({cpu.id for cpu in topology.cpus} - set(serving))


@given(machines())
def test_lanes_merge_only_below_five_cpus_and_the_plan_says_so(case: tuple[Topology, list[int]]) -> None:
    topology, serving = case
    plan = plan_cpus(topology, serving=serving)
    free = len(topology.cpus) - len(serving)
    assert len(sets_of(plan)) == min(5, free)
    assert bool(plan.merged) == (free < 5)
    for lane in Lane:
        sharing = {other for other in Lane if other != lane and plan.lanes[other] == plan.lanes[lane]}
        assert set(plan.merged_with(lane)) == sharing
    assert all(any("+".join(group) in note for note in plan.notes) for group in plan.merged)
    if free >= 2:
        assert plan.merged_with(Lane.VERIFY) == ()


@given(machines())
def test_cores_split_only_where_a_node_has_fewer_cores_than_lanes(case: tuple[Topology, list[int]]) -> None:
    topology, serving = case
    plan = plan_cpus(topology, serving=serving)
    free = [cpu for cpu in topology.cpus if cpu.id not in serving]
    for node in {cpu.node for cpu in free}:
        here = [cpu for cpu in free if cpu.node == node]
        owners: dict[int, set[tuple[int, ...]]] = {}
        for cpu in here:
            owners.setdefault(cpu.core, set()).add(next(s for s in sets_of(plan) if cpu.id in s))
        residents = set().union(*owners.values())
        if len(residents) <= len(owners):
            assert all(len(sets) == 1 for sets in owners.values())
        elif any(len(sets) > 1 for sets in owners.values()):
            assert any("split between lanes" in note for note in plan.notes)


@given(machines())
def test_a_lane_spans_nodes_only_where_nodes_outnumber_lanes(case: tuple[Topology, list[int]]) -> None:
    topology, serving = case
    plan = plan_cpus(topology, serving=serving)
    node_of = {cpu.id: cpu.node for cpu in topology.cpus}
    homes = [{node_of[cpu] for cpu in cpus} for cpus in sets_of(plan)]
    used = set().union(*homes)
    assert sum(len(nodes) - 1 for nodes in homes) == max(0, len(used) - len(homes))


@given(machines(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_its_input(
    case: tuple[Topology, list[int]], rng: random.Random
) -> None:
    topology, serving = case
    cpus = list(topology.cpus)
    rng.shuffle(cpus)
    assert plan_cpus(Topology(cpus=tuple(cpus)), serving=serving[::-1]) == plan_cpus(topology, serving=serving)


@given(st.integers(12, 256))
def test_shares_follow_the_weights_on_one_node(cores: int) -> None:
    plan = plan_cpus(machine(cores))
    total = sum(WEIGHTS.values())
    for lane in Lane:  # D'Hondt favours the heavy by at most a few seats
        assert abs(len(plan.lanes[lane]) - cores * WEIGHTS[lane] / total) <= 2.5


def test_known_machines() -> None:
    assert plan_cpus(machine(1)).merged == (tuple(Lane),)
    two = plan_cpus(machine(2))
    assert (two.lanes[Lane.COMMAND], two.lanes[Lane.VERIFY]) == ((0,), (1,))
    assert two.merged_with(Lane.VERIFY) == ()
    dual = plan_cpus(machine(16, smt=2, nodes=2))  # two sockets of eight cores
    assert {lane: format_cpus(cpus) for lane, cpus in dual.lanes.items()} == {
        Lane.RESET: "8,24",
        Lane.COMMAND: "0-5,16-21",
        Lane.PACKAGE: "9-14,25-30",
        Lane.VERIFY: "6-7,22-23",
        Lane.CLEANUP: "15,31",
    }
    assert dual.notes == ()


@given(machines())
def test_one_pool_is_no_lanes_at_all(case: tuple[Topology, list[int]]) -> None:
    everything = tuple(cpu.id for cpu in case[0].cpus)
    assert one_pool(case[0]).lanes == dict.fromkeys(Lane, everything)


def test_bad_serving_lists_are_the_users_fault() -> None:
    with pytest.raises(UserError, match="leave none"):
        plan_cpus(machine(2), serving=(0, 1))
    with pytest.raises(UserError, match="7 are not among"):
        plan_cpus(machine(2), serving=(7,))


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(sorted(cpus))) == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0-3;4", "1--2", "99999999999"])
def test_bad_cpu_lists(text: str) -> None:
    with pytest.raises(UserError, match="CPU list"):
        parse_cpus(text)


def test_this_machine_has_a_topology_and_a_plan() -> None:
    topology = read_topology()
    assert topology.cpus
    assert all(plan_cpus(topology).lanes.values())

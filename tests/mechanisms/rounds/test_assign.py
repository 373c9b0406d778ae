"""Decisions for a live cluster: devices by name, what is up, and a state that can be stored."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.allocators import Allocator, allocator_named
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.mechanisms.round_state import RoundRules, RoundState, resumed, stored
from hetflow.clusters.mechanisms.rounds import next_round, receive
from hetflow.clusters.mechanisms.seats import Device, Seat
from hetflow.schema.errors import ProblemError
from hetflow.schema.jobs import Job, MixThroughput, ModelThroughput, Throughputs
from hetflow.tests.profiles import examples

RULES = RoundRules(round_seconds=10.0, reset_seconds=10.0)
SIZES = ((2, 2), (4,))
DEVICES = [(k, p, i) for k, row in enumerate(SIZES) for p, size in enumerate(row)
           for i in range(size)]  # fmt: skip
TABLE = Throughputs(
    models=tuple(
        ModelThroughput(
            model=model, scale_factor=scale, steps_per_second={"fast": fast, "slow": slow}
        )
        for model, fast, slow in (("conv", 4.0, 1.0), ("rnn", 2.0, 1.5))
        for scale in (1, 2, 4)
    )
)


def pool() -> ClusterPool:
    return ClusterPool(throughputs=TABLE, num_devices={"fast": 4, "slow": 4})


def job(name: str, scale: int = 1, weight: float = 1.0, model: str = "conv") -> Job:
    return Job(id=name, model=model, steps=1e5, scale_factor=scale, priority_weight=weight)


@dataclass
class Cluster:
    """What a live scheduler does between two decisions."""

    allocator: Allocator
    state: RoundState = field(default_factory=lambda: RoundState.empty(pool(), SIZES))
    held: dict[str, Seat] = field(default_factory=dict)
    now: float = 0.0

    def round(self, down: set[Device], *, stores: bool = False) -> dict[str, Seat]:
        if stores:
            self.state = resumed(json.loads(json.dumps(stored(self.state))), pool())
        self.held = next_round(
            self.state, self.allocator, self.now, RULES, sizes=SIZES, down=down, held=self.held
        )
        places = [i for i, one in enumerate(self.state.active.jobs) if one.id in self.held]
        kinds = [self.held[self.state.active.jobs[i].id][0][0] for i in places]
        receive(self.state, np.array(kinds, dtype=np.int64), np.array(places, dtype=np.int64),
                np.full(len(places), RULES.round_seconds))  # fmt: skip
        self.now += RULES.round_seconds
        return self.held

    def admit(self, jobs: list[Job]) -> None:
        self.state.admit(jobs, RULES.head_start_seconds)

    def end(self, names: set[str]) -> None:
        self.state.leave(names)
        self.held = {name: seat for name, seat in self.held.items() if name not in names}


JOBS = st.lists(
    st.tuples(st.sampled_from((1, 1, 2, 4)), st.sampled_from((1.0, 4.0)),
              st.sampled_from(("conv", "rnn"))), max_size=4,
)  # fmt: skip
ROUNDS = st.lists(
    st.tuples(JOBS, st.sets(st.sampled_from(DEVICES)), st.sets(st.integers(0, 9), max_size=3)),
    min_size=1, max_size=8,
)  # fmt: skip
POLICIES = ("las", "fifo_greedy", "finish_time_fairness")


@given(ROUNDS, st.sampled_from(POLICIES))
@settings(max_examples=examples(100))
def test_any_history_is_decided_soundly_and_alike_after_every_restart(
    rounds: list[tuple[list[tuple[int, float, str]], set[Device], set[int]]], policy: str
) -> None:
    whole = Cluster(allocator_named(policy, agnostic=policy == "las"))
    again = Cluster(allocator_named(policy, agnostic=policy == "las"))
    present: list[Job] = []
    for number, (arrive, down, end) in enumerate(rounds):
        fresh = [job(f"{number}-{i}", *given) for i, given in enumerate(arrive)]
        gone = {present[i].id for i in end if i < len(present)}
        present = [one for one in [*present, *fresh] if one.id not in gone]
        for cluster in (whole, again):
            cluster.admit(fresh)
            cluster.end(gone)
        found = whole.round(down)
        assert found == again.round(down, stores=True)
        held = Counter(device for seat in found.values() for device in seat)
        assert set(held) <= set(DEVICES) - down
        assert not [device for device, times in held.items() if times > 1]
        scales = {one.id: one.scale_factor for one in present}
        for name, seat in found.items():
            assert len(seat) == scales[name]
            assert len({kind for kind, _, _ in seat}) == 1
        if policy != "fifo_greedy":  # nobody waits for devices that are free
            free = Counter(kind for kind, _, _ in set(DEVICES) - down - set(held))
            waiting = [scale for name, scale in scales.items() if name not in found]
            assert all(scale > max(free.values(), default=0) for scale in waiting)


def test_nobody_and_nothing_up() -> None:
    cluster = Cluster(allocator_named("las"))
    assert cluster.round(set()) == {}
    cluster.admit([job("a")])
    assert cluster.round(set(DEVICES)) == {}
    assert set(cluster.round(set())) == {"a"}


def test_a_job_that_does_not_fit_now_waits_until_it_does() -> None:
    cluster = Cluster(allocator_named("las"))
    cluster.admit([job("large", scale=4), job("small")])
    one_each = {device for device in DEVICES if device[2] or device[:2] == (0, 1)}
    assert set(cluster.round(one_each)) == {"small"}
    assert set(cluster.round(set())) == {"large", "small"}


def test_a_job_keeps_its_devices_from_round_to_round() -> None:
    cluster = Cluster(allocator_named("las"))
    cluster.admit([job("a", scale=2), job("b", model="rnn")])
    first = cluster.round(set())
    assert [cluster.round(set()) for _ in range(5)] == [first] * 5


def test_time_is_shared_by_weight() -> None:
    """Figure 5.4 in small: what jobs received approaches what the policy intends."""
    table = Throughputs(models=(ModelThroughput(model="conv", steps_per_second={"fast": 1.0}),))
    one = ClusterPool(throughputs=table, num_devices={"fast": 1})
    state = RoundState.empty(one)
    rules = RoundRules(round_seconds=10.0, reset_seconds=0.0)
    state.admit([job("heavy", weight=3.0), job("light")], rules.head_start_seconds)
    allocator, ran = allocator_named("las_weighted"), Counter[str]()
    for number in range(400):
        [name] = next_round(state, allocator, number * 10.0, rules, sizes=((1,),))
        ran[name] += 1
        place = [job.id for job in state.active.jobs].index(name)
        receive(state, np.array([0]), np.array([place]), np.array([10.0]))
    assert ran["heavy"] / 400 == pytest.approx(0.75, abs=0.01)


def test_mixes_come_and_go_with_their_jobs() -> None:
    """A state that was stored with a mix goes on without it, and the other way round."""
    mix = MixThroughput(
        model="conv", scale_factor=2, devices={"fast": 1, "slow": 1}, steps_per_second=5.0
    )
    devices = {"fast": 4, "slow": 4}
    mixed = ClusterPool(
        throughputs=replace(TABLE, mixes=(mix,)), num_devices=devices, uses_mixes=True
    )
    assert mixed.column_of({1: 1, 0: 1}) == 2
    assert mixed.column_of({1: 3}) == 1
    with pytest.raises(ProblemError, match="several device types"):
        mixed.column_of({0: 2, 1: 1})
    sizes = ((4,), (4,))
    state, allocator = RoundState.empty(pool()), allocator_named("las", columns=True)
    state.admit([job("one"), job("two", scale=2)], RULES.head_start_seconds)
    next_round(state, allocator, 0.0, RULES, sizes=sizes)
    receive(state, np.array([0]), np.array([1]), np.array([10.0]))
    grown = resumed(json.loads(json.dumps(stored(state))), mixed)
    seats = next_round(grown, allocator, 10.0, RULES, sizes=sizes)
    assert Counter(kind for kind, _, _ in seats["two"]) in ({0: 1, 1: 1}, {0: 2})
    kept = resumed(json.loads(json.dumps(stored(grown))), pool())
    assert kept.active.held.shape == (2, 2)
    assert kept.active.received[0, 1] == grown.active.received[0, 1]
    assert next_round(kept, allocator_named("las"), 20.0, RULES, sizes=sizes).keys() == {
        "one", "two"
    }  # fmt: skip


def test_policies_that_pair_jobs_and_other_pools_are_refused() -> None:
    state = RoundState.empty(pool(), SIZES)
    with pytest.raises(ProblemError, match="two jobs on a device"):
        next_round(state, allocator_named("gandiva"), 0.0, RULES, sizes=SIZES)
    other = ClusterPool(throughputs=TABLE, num_devices={"slow": 4})
    with pytest.raises(ProblemError, match="same device types"):
        resumed(stored(state), other)
    with pytest.raises(ProblemError, match="hetflow.rounds/1"):
        resumed({"schema": "hetflow.rounds/0"}, pool())

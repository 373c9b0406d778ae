"""Compiled rounds make the same choices as the readable ones, to the last digit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.allocators import allocator_named
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.simulator.arrivals import Queue
from hetflow.clusters.simulator.cases import simulate_rounds
from hetflow.clusters.simulator.metrics import Simulation
from hetflow.clusters.simulator.rounds import RoundOptions, Rounds
from hetflow.schema.errors import ProblemError
from hetflow.schema.jobs import Job, Throughputs
from hetflow.tests.profiles import examples

compiled = pytest.importorskip(
    "hetflow.clusters.simulator.compiled_rounds", reason="numba is not installed"
)

POLICIES = [
    ("las", False), ("las", True), ("fifo_greedy", False), ("fifo_any_type", False),
    ("makespan", False), ("finish_time_fairness", True),
]  # fmt: skip


def _run(cluster: Rounds) -> Simulation:
    while cluster.step():
        pass
    cluster.settle()
    return cluster.result()


@st.composite
def _traces(draw: st.DrawFn) -> list[Job]:
    gaps = draw(st.lists(st.sampled_from([0.0, 100.0, 2500.0, 15000.0]), min_size=1, max_size=14))
    now, jobs = 0.0, []
    for number, gap in enumerate(gaps):
        now += gap
        jobs.append(
            Job(
                id=str(number),
                model=draw(st.sampled_from(["conv", "rnn"])),
                steps=draw(st.one_of(st.floats(1, 20000), st.sampled_from([1440.0, 1e5]))),
                scale_factor=draw(st.sampled_from([1, 1, 2, 4])),
                arrival_seconds=now,
            )
        )
    return jobs


@pytest.mark.parametrize(("policy", "agnostic"), POLICIES)
@settings(max_examples=examples(15))
@given(
    jobs=_traces(),
    published=st.booleans(),
    restart_seconds=st.sampled_from([0.0, 40.0]),
    resize_seconds=st.sampled_from([None, 0.0, 15.0]),
    ends_early=st.booleans(),
    fills_idle=st.booleans(),
    devices=st.sampled_from([(4, 4), (1, 4), (12, 8)]),
)
def test_same_digits(
    table: Throughputs, policy: str, agnostic: bool, jobs: list[Job], published: bool,
    restart_seconds: float, resize_seconds: float | None, ends_early: bool, fills_idle: bool,
    devices: tuple[int, int],
) -> None:  # fmt: skip
    if devices[0] < 4 and policy != "las":
        jobs = [job for job in jobs if job.scale_factor == 1] or [replace(jobs[0], scale_factor=1)]
    pool = ClusterPool(
        throughputs=table,
        num_devices={"fast": devices[0], "slow": devices[1]},
        dollars_per_hour={"fast": 2.0, "slow": 1.0},
    )
    options = RoundOptions(
        convention="published" if published else "text",
        restart_seconds=restart_seconds,
        resize_seconds=resize_seconds,
        ends_early=ends_early,
        fills_idle=fills_idle,
    )
    assert options.is_plain

    def run(kind: type[Rounds]) -> Simulation:
        allocator = allocator_named(policy, agnostic=agnostic)
        return _run(kind(Queue(jobs, pool), pool, allocator, options))

    assert run(compiled.CompiledRounds) == run(Rounds)


def test_a_long_wait_is_one_stretch(table: Throughputs) -> None:
    """Steps for months: one call, though every round is counted."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4, "slow": 4})
    jobs = [Job(id="0", model="conv", steps=4e6, scale_factor=2, arrival_seconds=0.0)]
    cluster = compiled.CompiledRounds(
        Queue(jobs, pool), pool, allocator_named("las"), RoundOptions()
    )
    steps = 0
    while cluster.step():
        steps += 1
    cluster.settle()
    assert steps == 1
    assert cluster.result().num_rounds > 1000


def test_rounds_without_end_are_counted(table: Throughputs) -> None:
    """The limit on rounds holds in the middle of a stretch too."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4, "slow": 4})
    jobs = [Job(id="0", model="conv", steps=4e6, scale_factor=2, arrival_seconds=0.0)]
    options = RoundOptions(max_rounds=10)
    cluster = compiled.CompiledRounds(Queue(jobs, pool), pool, allocator_named("las"), options)
    with pytest.raises(ProblemError, match="not done after 10 rounds"):
        _run(cluster)


def test_simulations_are_compiled_where_they_can_be(table: Throughputs) -> None:
    """A plain run takes the compiled rounds, one with spans the readable ones: equal jobs."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4, "slow": 4})
    jobs = [Job(id="0", model="conv", steps=4e5, scale_factor=2, arrival_seconds=0.0)]
    calls = list[int]()
    plain = simulate_rounds(
        jobs, pool, allocator_named("las"), on_progress=lambda done, _: calls.append(done)
    )
    spans = simulate_rounds(jobs, pool, allocator_named("las"), RoundOptions(records_spans=True))
    assert calls == [1]
    assert plain.num_rounds > 100
    assert (plain.jobs, plain.busy_seconds) == (spans.jobs, spans.busy_seconds)

"""Space sharing in rounds: a pair takes one slot, nobody runs twice (thesis 5.3.1, 5.5)."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.allocators import allocator_named
from hetflow.clusters.mechanisms.pool import Active, ClusterPool
from hetflow.clusters.simulator.cases import Case, report, run_case, simulate_rounds
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.formats.importers.gavel import read_gavel_throughputs, read_gavel_trace
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, PairThroughput, Throughputs
from hetflow.schema.simulation import Span
from hetflow.tests.profiles import examples

MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def shared_table(table: Throughputs) -> Throughputs:
    """Pairs at three quarters of either one's speed; two rnn do not get on."""
    alone = {(m.model, m.scale_factor): m.steps_per_second for m in table.models}
    pairs = tuple(
        PairThroughput(
            models=(one, two),
            scale_factor=scale,
            steps_per_second={
                name: (part * alone[one, scale][name], part * alone[two, scale][name])
                for name in ("fast", "slow")
            },
        )
        for one, two, part in (("conv", "conv", 0.75), ("conv", "rnn", 0.75), ("rnn", "rnn", 0.4))
        for scale in (1, 2, 4)
    )
    return Throughputs(models=table.models, pairs=pairs)


def one_device(table: Throughputs) -> ClusterPool:
    return ClusterPool(throughputs=table, num_devices={"fast": 1}, dollars_per_hour={"fast": 2.0})


@pytest.mark.parametrize("warm", [True, False])
def test_a_pair_takes_one_slot(shared_table: Throughputs, job: MakeJob, warm: bool) -> None:
    allocator = allocator_named("las", shares_space=True, warm=warm)
    jobs = [job(0, steps=3000.0), job(1, steps=3000.0)]
    run = simulate_rounds(jobs, one_device(shared_table), allocator)
    # 3 of 4 steps a second each: 1,000 s together, 1,500 s one after another.
    assert [done.finish_seconds for done in run.jobs] == pytest.approx([1000.0, 1000.0])
    assert [done.device_seconds for done in run.jobs] == pytest.approx([500.0, 500.0])
    assert sum(done.dollars or 0.0 for done in run.jobs) == pytest.approx(1000.0 / 3600.0 * 2.0)
    assert run.busy_seconds == {"fast": pytest.approx(1000.0)}


@pytest.mark.parametrize(
    ("convention", "ends"),
    [
        # Job 1 ends at 300 s; job 0 makes 900 + 60 * 4 steps in the first round, then 1,860.
        ("text", {"1": 300.0, "0": 825.0}),
        # Both are done with the round at 360 s, job 0 with 1,080 steps, then 1,920.
        ("published", {"1": 360.0, "0": 840.0}),
    ],
)
def test_the_partner_of_a_job_that_ends(
    shared_table: Throughputs, job: MakeJob, convention: str, ends: dict[str, float]
) -> None:
    options = RoundOptions(convention=convention)  # type: ignore[arg-type]
    jobs = [job(0, steps=3000.0), job(1, steps=900.0)]
    allocator = allocator_named("las", shares_space=True)
    run = simulate_rounds(jobs, one_device(shared_table), allocator, options)
    assert {done.id: done.finish_seconds for done in run.jobs} == pytest.approx(ends)


def test_pairs_that_lose_are_not_formed(shared_table: Throughputs, job: MakeJob) -> None:
    jobs = [job(0, model="rnn", steps=1440.0), job(1, model="rnn", steps=1440.0)]
    allocator = allocator_named("las", shares_space=True)
    options = RoundOptions(records_spans=True)
    run = simulate_rounds(jobs, one_device(shared_table), allocator, options)
    assert {span.shared_with for span in run.spans} == {None}
    assert run.end_seconds == pytest.approx(1440.0)


def test_restart_is_paid_by_each_of_a_pair(shared_table: Throughputs, job: MakeJob) -> None:
    allocator = allocator_named("las", shares_space=True)
    jobs = [job(0, steps=3000.0), job(1, steps=3000.0)]
    options = RoundOptions(restart_seconds=30.0)
    run = simulate_rounds(jobs, one_device(shared_table), allocator, options)
    assert [done.finish_seconds for done in run.jobs] == pytest.approx([1030.0, 1030.0])


def test_sharing_needs_pairs(table: Throughputs) -> None:
    case = Case(throughputs=table, num_devices={"fast": 1}, space_sharing=True)
    with pytest.raises(HetflowError, match="needs throughputs of pairs"):
        run_case(case, [Job(id="0", model="conv", steps=1.0)])
    with pytest.raises(HetflowError, match="runs every job alone"):
        allocator_named("fifo_greedy", shares_space=True)
    with pytest.raises(HetflowError, match="space sharing is for rounds"):
        Case(throughputs=table, num_devices={"fast": 1}, scheduler="yarn", space_sharing=True)


def _level(active: Active, warm: bool) -> float:
    """The least normalised throughput that an allocator's shares promise."""
    shares = allocator_named("las", shares_space=True, warm=warm).allocate(active, 0.0)
    reached = (active.rate * shares.x).sum(axis=0)
    used = (shares.x * active.scale).sum(axis=1)
    time = shares.x.sum(axis=0)
    assert shares.pairs is not None
    p = shares.pairs
    keys = [(one.model, one.scale_factor) for one in active.jobs]
    for a, b, c, part in zip(p.a, p.b, p.column, p.time, strict=True):
        assert a != b
        first, second = active.pool.pair_rates(keys[a], keys[b])[:, c]
        reached[a] += first * part
        reached[b] += second * part
        used[c] += part * active.scale[a]
        time[[a, b]] += part
    assert (used <= active.pool.capacity * (1 + 1e-9)).all()
    assert (time <= 1 + 1e-9).all()
    equal = active.pool.capacity @ active.rate / active.pool.capacity.sum()
    return float((reached / equal * active.scale).min())


@settings(max_examples=examples(40))
@given(
    models=st.lists(
        st.tuples(st.sampled_from(["conv", "rnn"]), st.sampled_from([1, 2, 4])),
        min_size=1,
        max_size=14,
    )
)
def test_warm_and_cold_reach_one_level(
    shared_table: Throughputs, models: list[tuple[str, int]]
) -> None:
    active = Active(ClusterPool(throughputs=shared_table, num_devices={"fast": 4, "slow": 4}))
    jobs = [
        Job(id=str(i), model=model, scale_factor=scale, steps=1.0)
        for i, (model, scale) in enumerate(models)
    ]
    active.add(jobs, 0.0)
    assert _level(active, warm=True) == pytest.approx(_level(active, warm=False), rel=1e-6)


@settings(max_examples=examples(25))
@given(
    steps=st.lists(st.floats(1, 20000), min_size=2, max_size=14),
    published=st.booleans(),
    policy=st.sampled_from(["las", "fifo", "finish_time_fairness"]),
    seed=st.integers(0, 99),
)
def test_no_job_runs_twice_and_no_device_thrice(
    shared_table: Throughputs, steps: list[float], published: bool, policy: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    pool = ClusterPool(throughputs=shared_table, num_devices={"fast": 4, "slow": 4})
    jobs = [
        Job(
            id=str(i),
            model=("conv", "rnn")[int(random.integers(2))],
            scale_factor=(1, 2, 4)[int(random.integers(3))],
            steps=one,
        )
        for i, one in enumerate(steps)
    ]
    options = RoundOptions(convention="published" if published else "text", records_spans=True)
    run = simulate_rounds(jobs, pool, allocator_named(policy, shares_space=True), options)
    assert sorted(done.id for done in run.jobs) == sorted(one.id for one in jobs)
    rounds: dict[float, list[Span]] = defaultdict(list)
    for span in run.spans:
        rounds[span.start_seconds].append(span)
    for spans in rounds.values():
        here = {span.job: span for span in spans}
        assert len(here) == len(spans)
        used: dict[str, float] = defaultdict(float)
        for span in spans:
            used[span.device_type] += span.num_devices * (0.5 if span.shared_with else 1.0)
            if span.shared_with:
                partner = here[span.shared_with]
                assert partner.shared_with == span.job
                assert partner.device_type == span.device_type
        assert all(number <= 4 for number in used.values())


@pytest.mark.slow
def test_agrees_with_the_published_simulator(gavel: Path) -> None:
    rows = json.loads((gavel / "simulated.json").read_text())
    [row] = [row for row in rows if row["policy"] == "max_min_fairness_packed"]
    table = read_gavel_throughputs(gavel / "throughputs" / "simulation_throughputs.json")
    case = Case(
        throughputs=table,
        num_devices={"v100": 4, "p100": 4, "k80": 4},
        scheduler="published-rounds",
        space_sharing=True,
    )
    run = run_case(case, read_gavel_trace(gavel / "traces" / row["trace"]))
    figures = report(case, run, row["trace"]).metrics
    assert figures.average_jct_seconds == pytest.approx(row["avg_jct_s"], rel=0.01)
    assert figures.makespan_seconds == pytest.approx(row["total_duration_s"], rel=0.01)
    assert figures.utilisation == pytest.approx(row["utilization"], rel=0.01)

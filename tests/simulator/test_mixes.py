"""Jobs on several device types at once (VirtualFlow 6.5.2): rates from the solver, rounds."""

from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.allocators import allocator_named
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.simulator.cases import Case, report, run_case, simulate_rounds
from hetflow.clusters.simulator.mixes import split_throughput
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, MixThroughput, ModelThroughput, Throughputs
from hetflow.schema.problem import DeviceOption
from hetflow.schema.profile import BatchPoint
from hetflow.tests.profiles import examples

MakeJob = Callable[..., Job]


def option(name: str, number: int, seconds_per_sample: float) -> DeviceOption:
    curve = tuple(
        BatchPoint(batch_size=b, step_seconds=b * seconds_per_sample, peak_memory_bytes=1)
        for b in (8, 16, 32, 64)
    )
    return DeviceOption(
        device_type=name, num_devices=number, batch_curve=curve, update_seconds=0.0, weight_bytes=1
    )


@pytest.fixture(scope="module")
def mixed_table() -> Throughputs:
    """A job of one device: 4 steps a second on fast, 2 on slow, 5 on both."""
    return Throughputs(
        models=(ModelThroughput(model="conv", steps_per_second={"fast": 4.0, "slow": 2.0}),),
        mixes=(
            MixThroughput(model="conv", devices={"fast": 1, "slow": 1}, steps_per_second=5.0),
            MixThroughput(model="conv", devices={"fast": 1, "slow": 9}, steps_per_second=50.0),
        ),
    )


def test_rates_come_from_the_batch_split() -> None:
    pool = (option("fast", 1, 0.25), option("slow", 2, 1.0))
    alone, mixes = split_throughput("conv", 40, pool, 1)
    # fast alone 40 / 4 = 10 s; slow alone 40 s; fast 32 and slow 8: 8 s; fast 32 of 48 ...
    assert alone.steps_per_second == pytest.approx({"fast": 0.1, "slow": 0.025})
    rates = {tuple(mix.devices.items()): mix.steps_per_second for mix in mixes}
    assert rates[("fast", 1), ("slow", 1)] == pytest.approx(1 / 8)
    # With two slow ones 24 + 8 + 8 takes 8 s as well: no faster, so no mix.
    assert set(rates) == {(("fast", 1), ("slow", 1))}


def test_a_mix_has_what_the_job_asks_for_on_some_type() -> None:
    pool = (option("fast", 2, 0.25), option("slow", 8, 1.0))
    alone, mixes = split_throughput("conv", 128, pool, 4)
    assert set(alone.steps_per_second) == {"slow"}
    assert all(m.devices.get("fast") == 2 or m.devices.get("slow") == 4 for m in mixes)
    assert {"fast": 2, "slow": 8} in [mix.devices for mix in mixes]


def test_a_job_alone_holds_the_mix(mixed_table: Throughputs, job: MakeJob) -> None:
    prices = {"fast": 2.0, "slow": 0.5}
    case = Case(
        throughputs=mixed_table,
        num_devices={"fast": 1, "slow": 1},
        dollars_per_hour=prices,
        records_spans=True,
    )
    run = run_case(case, [job(0, steps=4000.0)])
    assert run.end_seconds == pytest.approx(800.0)
    [done] = run.jobs
    assert done.device_seconds == pytest.approx(1600.0)
    assert done.dollars == pytest.approx(800.0 / 3600.0 * 2.5)
    assert run.busy_seconds == pytest.approx({"fast": 800.0, "slow": 800.0})
    assert {(span.device_type, span.num_devices) for span in run.spans} == {
        ("fast", 1), ("slow", 1)
    }  # fmt: skip


def test_a_mix_pays_only_where_it_beats_sharing(mixed_table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=mixed_table, num_devices={"fast": 1, "slow": 1}, uses_mixes=True)
    run = simulate_rounds(
        [job(n, steps=7200.0) for n in range(2)], pool, allocator_named("las", columns=True)
    )
    # Two jobs on one type each make 6 steps a second, on the mix in turn only 5: 14,400 / 6.
    assert run.end_seconds == pytest.approx(2400.0, rel=0.1)


def test_the_warm_solver_says_that_it_knows_no_mixes(
    mixed_table: Throughputs, job: MakeJob
) -> None:
    pool = ClusterPool(throughputs=mixed_table, num_devices={"fast": 1, "slow": 1}, uses_mixes=True)
    with pytest.raises(HetflowError, match="warm solver knows device types only"):
        simulate_rounds([job(0)], pool, allocator_named("las"))


def test_leftovers_extend_what_a_job_holds(mixed_table: Throughputs, job: MakeJob) -> None:
    """The policy shares fast devices only; the slow ones are left over."""

    class FastOnly:
        name, agnostic, shares_space = "fast_only", False, False

        def allocate(self, active: object, now_seconds: float) -> object:
            from hetflow.clusters.mechanisms.allocators import Shares

            share = 0.0 * active.rate  # type: ignore[attr-defined]
            share[0] = 1.0
            return Shares(share)

    pool = ClusterPool(throughputs=mixed_table, num_devices={"fast": 2, "slow": 1}, uses_mixes=True)
    jobs = [job(n, steps=3600.0) for n in range(2)]
    run = simulate_rounds(jobs, pool, FastOnly())  # type: ignore[arg-type]
    # Job 0 has the mix: 720 s; job 1 runs at 4 a second: 900 s, with the slow one from 720 s on:
    # 2,880 steps by then, the rest at 5.
    assert {done.id: done.finish_seconds for done in run.jobs} == pytest.approx(
        {"0": 720.0, "1": 864.0}
    )


@settings(max_examples=examples(25))
@given(
    steps=st.lists(st.floats(10, 20000), min_size=1, max_size=10),
    policy=st.sampled_from(["las", "makespan", "fifo"]),
)
def test_mixes_never_oversubscribe(
    mixed_table: Throughputs, steps: list[float], policy: str
) -> None:
    devices = {"fast": 2, "slow": 3}
    pool = ClusterPool(throughputs=mixed_table, num_devices=devices, uses_mixes=True)
    jobs = [Job(id=str(i), model="conv", steps=one) for i, one in enumerate(steps)]
    options = RoundOptions(records_spans=True)
    run = simulate_rounds(jobs, pool, allocator_named(policy, columns=True), options)
    assert sorted(done.id for done in run.jobs) == sorted(one.id for one in jobs)
    used: dict[tuple[float, str], int] = defaultdict(int)
    for span in run.spans:
        used[span.start_seconds, span.device_type] += span.num_devices
    assert all(number <= devices[name] for (_, name), number in used.items())


def test_mixes_help_when_devices_are_idle_and_cost_nothing_when_not() -> None:
    pool = (option("fast", 2, 0.05), option("slow", 4, 0.15))
    alone, mixes = split_throughput("conv", 128, pool, 2)
    plain, mixed = Throughputs(models=(alone,)), Throughputs(models=(alone,), mixes=mixes)
    assert mixes

    def average(table: Throughputs, gap: float) -> float:
        jobs = [
            Job(id=str(i), model="conv", scale_factor=2, steps=2000.0, arrival_seconds=gap * i)
            for i in range(12)
        ]
        case = Case(
            throughputs=table,
            num_devices={"fast": 2, "slow": 4},
            optimum="centre",
            selection="joint",
        )
        return report(case, run_case(case, jobs), "made").metrics.average_jct_seconds

    assert average(mixed, 12000.0) < 0.8 * average(plain, 12000.0)
    assert average(mixed, 500.0) < 1.05 * average(plain, 500.0)

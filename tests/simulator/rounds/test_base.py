"""Whole runs in rounds: what is conserved, what costs, what is refused."""

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.allocators import allocator_named
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.simulator.arrivals import DrawOptions, draw_jobs
from hetflow.clusters.simulator.cases import Case, run_case, simulate_rounds
from hetflow.clusters.simulator.failures import FailureOptions
from hetflow.clusters.simulator.metrics import summarise
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs
from hetflow.schema.simulation import Span
from hetflow.tests.profiles import examples

MakeJob = Callable[..., Job]


def test_one_job_alone_takes_its_steps_over_its_best_rate(pool: ClusterPool, job: MakeJob) -> None:
    run = simulate_rounds([job(0, steps=4000.0)], pool, allocator_named("las"))
    assert run.end_seconds == pytest.approx(1000.0)
    assert run.jobs[0].dollars == pytest.approx(1000.0 / 3600.0 * 2.0)
    assert run.busy_seconds == {"fast": pytest.approx(1000.0), "slow": 0.0}


def test_a_restart_costs_its_seconds_once(pool: ClusterPool, job: MakeJob) -> None:
    options = RoundOptions(restart_seconds=30.0)
    run = simulate_rounds([job(0, steps=4000.0)], pool, allocator_named("las"), options)
    assert run.end_seconds == pytest.approx(1030.0)  # leases are renewed after the first round
    assert run.jobs[0].num_restarts == 0


def test_a_round_ends_early_where_nobody_holds_a_device_any_more(
    table: Throughputs, job: MakeJob
) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 1})
    jobs = [
        job(0, steps=400.0), job(1, steps=800.0), job(2, steps=1600.0, arrival_seconds=350.0),
    ]  # fmt: skip

    def ends(**given: bool) -> list[float]:
        options = RoundOptions(**given)
        run = simulate_rounds(jobs, pool, allocator_named("fifo_greedy"), options)
        return [done.finish_seconds for done in run.jobs]

    assert ends() == pytest.approx([100.0, 560.0, 1120.0])
    # Job 1 follows job 0 at once, and job 2 begins when it comes: nobody is there by then.
    assert ends(ends_early=True) == pytest.approx([100.0, 300.0, 750.0])


def test_a_round_goes_on_while_somebody_holds_a_device(table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 2})
    jobs = [job(0, steps=400.0), job(1, steps=800.0), job(2, steps=400.0)]
    options = RoundOptions(ends_early=True)
    run = simulate_rounds(jobs, pool, allocator_named("fifo_greedy"), options)
    assert [done.finish_seconds for done in run.jobs] == pytest.approx([100.0, 200.0, 300.0])


def test_a_resize_costs_less_than_a_start(table: Throughputs, job: MakeJob) -> None:
    """All that a job makes beside its steps is what starts and resizes cost, at the rate there."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 1, "slow": 1})
    jobs = [job(0, steps=4000.0), job(1, steps=4000.0)]

    def lost(resize_seconds: float | None) -> list[tuple[float, float]]:
        options = RoundOptions(
            restart_seconds=30.0, resize_seconds=resize_seconds, reset_seconds=0.0,
            records_spans=True,
        )  # fmt: skip
        run = simulate_rounds(jobs, pool, allocator_named("las"), options)
        found = []
        for done in sorted(run.jobs, key=lambda done: done.id):
            spans = [span for span in run.spans if span.job == done.id]
            rates = [4.0 if span.device_type == "fast" else 1.0 for span in spans]
            made = sum(
                rate * (span.end_seconds - span.start_seconds)
                for span, rate in zip(spans, rates, strict=True)
            )
            assert done.num_restarts == len(spans) - 1 > 0
            found.append((made - 4000.0, rates[0] * 30.0 + sum(rates[1:]) * (resize_seconds or 0)))
        return found

    for resize_seconds in (0.0, 2.0):
        for was_lost, expected in lost(resize_seconds):
            assert was_lost == pytest.approx(expected)
    for was_lost, start in lost(None):
        assert was_lost > start + 1.0


def test_failures_lose_the_round_and_nothing_else(table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4})
    jobs = [job(n, steps=40000.0, scale_factor=2) for n in range(4)]
    quiet = simulate_rounds(jobs, pool, allocator_named("las"))
    failures = FailureOptions(mean_seconds=20000.0, repair_seconds=1000.0, seed=5)
    options = RoundOptions(failures=failures)
    failing = simulate_rounds(jobs, pool, allocator_named("las"), options)
    assert failing == simulate_rounds(jobs, pool, allocator_named("las"), options)
    assert failing.num_failures > 0
    assert len(failing.jobs) == 4
    assert failing.end_seconds > quiet.end_seconds
    assert sum(done.num_restarts for done in failing.jobs) > 0


def test_metrics_of_two_jobs(table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 1})
    jobs = [job(0, steps=1440.0, slo_seconds=400.0), job(1, steps=1440.0, slo_seconds=400.0)]
    options = RoundOptions(fills_idle=False, reset_seconds=0.0)
    run = simulate_rounds(jobs, pool, allocator_named("fifo_greedy"), options)
    figures = summarise(run)
    assert [done.completion_seconds for done in run.jobs] == pytest.approx([360.0, 720.0])
    assert figures.average_queueing_seconds == pytest.approx(180.0)
    assert figures.num_slo_violations == 1
    assert figures.utilisation == pytest.approx(1.0)


@pytest.mark.parametrize("policy", ["las", "makespan", "finish_time_fairness", "fifo_any_type"])
@pytest.mark.parametrize("scheduler", ["rounds", "published-rounds"])
def test_same_seed_same_digits(table: Throughputs, policy: str, scheduler: str) -> None:
    trace = DrawOptions(
        kind="continuous-multiple", num_jobs=12, jobs_per_hour=4, seed=3, reference_device="fast"
    )
    case = Case(
        throughputs=table,
        num_devices={"fast": 8, "slow": 8},
        trace=trace,
        scheduler=scheduler,
        policy=policy,
    )
    assert run_case(case) == run_case(case)


@st.composite
def _traces(draw: st.DrawFn) -> list[Job]:
    gaps = draw(st.lists(st.floats(0, 3000), min_size=1, max_size=12))
    now, jobs = 0.0, []
    for number, gap in enumerate(gaps):
        now += gap
        jobs.append(
            Job(
                id=str(number),
                model=draw(st.sampled_from(["conv", "rnn"])),
                steps=draw(st.floats(1, 20000)),
                scale_factor=draw(st.sampled_from([1, 2, 4])),
                arrival_seconds=now,
            )
        )
    return jobs


@settings(max_examples=examples(40))
@given(jobs=_traces(), published=st.booleans(), policy=st.sampled_from(["las", "fifo_greedy"]))
def test_all_work_is_done_within_the_pool(
    table: Throughputs, jobs: list[Job], published: bool, policy: str
) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4, "slow": 4})
    options = RoundOptions(convention="published" if published else "text", records_spans=True)
    run = simulate_rounds(jobs, pool, allocator_named(policy), options)
    assert sorted(done.id for done in run.jobs) == sorted(one.id for one in jobs)
    made: dict[str, float] = defaultdict(float)
    for span in run.spans:
        kind = pool.types.index(span.device_type)
        rate = float(pool.rate(jobs[int(span.job)])[kind])
        made[span.job] += rate * (span.end_seconds - span.start_seconds)
    for one in jobs:
        assert made[one.id] == pytest.approx(one.steps, rel=1e-6)
    _refuse_overlap(run.spans, dict(pool.num_devices))


def _refuse_overlap(spans: tuple[Span, ...], devices: dict[str, int]) -> None:
    starts = {span.start_seconds for span in spans}
    for time in starts:
        held: dict[str, int] = defaultdict(int)
        jobs = []
        for span in spans:
            if span.start_seconds <= time < span.end_seconds - 1e-9:
                held[span.device_type] += span.num_devices
                jobs.append(span.job)
        assert len(jobs) == len(set(jobs))
        assert all(number <= devices[name] for name, number in held.items())


def test_a_trace_is_read_as_a_stream(pool: ClusterPool, job: MakeJob) -> None:
    taken = []

    def stream() -> Iterator[Job]:
        for number in range(50):
            taken.append(number)
            yield job(number, arrival_seconds=5000.0 * number)

    lead: list[int] = []
    simulate_rounds(
        stream(),
        pool,
        allocator_named("las"),
        on_progress=lambda done, _: lead.append(len(taken) - done),
    )
    assert max(lead) <= 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrival_seconds": 10.0}, "sort the trace by arrival"),
        ({"id": "0", "arrival_seconds": 200.0}, "appears twice"),
        ({"model": "cnov", "arrival_seconds": 200.0}, "did you mean 'conv'"),
        ({"scale_factor": 3, "arrival_seconds": 200.0}, "no throughput of 'conv' with 3"),
    ],
)
def test_bad_traces(
    pool: ClusterPool, job: MakeJob, changes: dict[str, object], words: str
) -> None:
    jobs = [job(0, arrival_seconds=100.0), job(1, **changes)]
    with pytest.raises(HetflowError, match=words) as caught:
        simulate_rounds(jobs, pool, allocator_named("las"))
    assert "\n" not in caught.value.message


def test_unknown_names_get_the_nearest(table: Throughputs) -> None:
    with pytest.raises(HetflowError, match="did you mean 'makespan'"):
        allocator_named("makspan")
    with pytest.raises(HetflowError, match="did you mean 'easyscale'"):
        Case(throughputs=table, num_devices={"fast": 1}, scheduler="easyscal")
    with pytest.raises(HetflowError, match="nothing of a round"):
        RoundOptions(restart_seconds=400.0)
    with pytest.raises(HetflowError, match=r"a resize of 400\.0 s leaves nothing of a round"):
        RoundOptions(resize_seconds=400.0)


def test_drawn_traces_follow_the_rules(table: Throughputs) -> None:
    options = DrawOptions(
        kind="continuous-multiple",
        num_jobs=4000,
        jobs_per_hour=6.0,
        seed=1,
        reference_device="fast",
    )
    jobs = list(draw_jobs(options, table))
    assert jobs == list(draw_jobs(options, table))
    assert jobs[-1].arrival_seconds / 4000 == pytest.approx(600.0, rel=0.05)
    single = sum(job.scale_factor == 1 for job in jobs) / 4000
    assert single == pytest.approx(0.75, abs=0.03)  # 70 %, and the 8s that the table lacks
    rates = {"conv": 4.0, "rnn": 2.0}
    minutes = [j.steps / rates[j.model] / j.scale_factor / 60 for j in jobs]
    assert min(minutes) >= 31.0
    assert max(minutes) <= 10_000.0
    assert sum(m > 1000 for m in minutes) / 4000 == pytest.approx(0.2, abs=0.03)


def test_a_model_that_does_not_spread_leaves_the_share_of_large_jobs(table: Throughputs) -> None:
    lonely = ModelThroughput(model="lonely", steps_per_second={"fast": 1.0})
    wider = Throughputs(models=(*table.models, lonely))
    options = DrawOptions(kind="static-multiple", num_jobs=4000, seed=1, reference_device="fast")
    jobs = list(draw_jobs(options, wider))
    assert all(job.scale_factor == 1 for job in jobs if job.model == "lonely")
    for scale, share in ((1, 0.75), (2, 0.10), (4, 0.15)):
        found = sum(job.scale_factor == scale for job in jobs) / 4000
        assert found == pytest.approx(share, abs=0.02)

"""Failing devices and servers: who is hit, what policies see, who waits, what is refused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from hetflow.clusters.mechanisms.allocators import Allocator, Shares, allocator_named
from hetflow.clusters.mechanisms.pool import Active, ClusterPool
from hetflow.clusters.mechanisms.seats import DeviceLayout
from hetflow.clusters.simulator.cases import SCHEDULERS, Case, report, run_case, simulate_rounds
from hetflow.clusters.simulator.failures import FailureEvents, FailureOptions, Failures
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import HetflowError, InfeasibleError, ProblemError
from hetflow.schema.jobs import Job, MixThroughput, PairThroughput, Throughputs

MakeJob = Callable[..., Job]
HOUR = 3600.0


class Watched:
    """An allocator that keeps what it was shown, and what it answered."""

    def __init__(self, inner: Allocator) -> None:
        self.inner = inner
        self.name, self.agnostic = inner.name, inner.agnostic
        self.shares_space, self.leaves_idle = inner.shares_space, inner.leaves_idle
        self.seen: list[tuple[list[int], list[float]]] = []  # devices up, devices shared
        self.shown: list[set[str]] = []

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Pass on, and keep."""
        shares = self.inner.allocate(active, now_seconds)
        usage = np.array([active.usage(i) for i in range(len(active))]).T
        used = active.pool.resources @ (shares.x * usage).sum(axis=1)
        if shares.pairs is not None:
            p = shares.pairs
            np.add.at(used, p.column, p.time * active.scale[p.a])
        self.seen.append((active.capacity.tolist(), used.tolist()))
        self.shown.append({job.id for job in active.jobs})
        return shares


def with_pairs(table: Throughputs) -> Throughputs:
    pairs = tuple(
        PairThroughput(
            models=("conv", "rnn"), scale_factor=scale,
            steps_per_second={"fast": (3.0 * scale, 1.2 * scale), "slow": (0.8 * scale, scale)},
        )
        for scale in (1, 2, 4)
    )  # fmt: skip
    return replace(table, pairs=pairs)


def mixed_jobs(job: MakeJob, scales: tuple[int, ...] = (1, 2, 4)) -> list[Job]:
    return [
        job(n, model="conv" if n % 2 else "rnn", steps=20000.0 + 1000.0 * n,
            scale_factor=scales[n % len(scales)], arrival_seconds=300.0 * n,
            priority_weight=1.0 + n % 3)
        for n in range(12)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("las", {}),
        ("las", {"warm": False}),
        ("las", {"agnostic": True}),
        ("las_weighted", {"agnostic": True}),
        ("las_weighted", {}),
        ("las", {"shares_space": True}),
        ("makespan", {}),
        ("makespan", {"agnostic": True}),
        ("makespan", {"shares_space": True}),
        ("finish_time_fairness", {}),
        ("las_water_filling", {}),
        ("fifo", {}),
        ("min_cost", {}),
        ("fifo_greedy", {}),
        ("fifo_any_type", {}),
        ("allox", {}),
        ("gandiva", {}),
    ],
)
@pytest.mark.slow
def test_policies_share_what_is_up(
    table: Throughputs, job: MakeJob, policy: str, options: dict[str, bool]
) -> None:
    pool = ClusterPool(
        throughputs=with_pairs(table), num_devices={"fast": 4, "slow": 2},
        dollars_per_hour={"fast": 2.0, "slow": 0.5},
    )  # fmt: skip
    allocator = Watched(allocator_named(policy, **options))
    failures = FailureOptions(mean_seconds=6000.0, repair_seconds=5000.0, seed=3)
    jobs = mixed_jobs(job, (1,) if policy == "allox" else (1, 2, 4))
    run = simulate_rounds(jobs, pool, allocator, RoundOptions(failures=failures))
    assert len(run.jobs) == 12
    assert min(sum(up) for up, _ in allocator.seen) < 4
    assert any(0 in up for up, _ in allocator.seen)
    for up, used in allocator.seen:
        assert np.array(used) == pytest.approx(np.minimum(used, up), abs=1e-6)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("las", {}),
        ("las", {"warm": False}),
        ("las_weighted", {}),
        ("las", {"agnostic": True}),
        ("makespan", {}),
        ("las_water_filling", {}),
    ],
)
@pytest.mark.slow
def test_what_is_up_is_shared_as_if_it_were_the_whole_pool(
    table: Throughputs, job: MakeJob, policy: str, options: dict[str, bool]
) -> None:
    """Each answer is worth what scipy's HiGHS finds for a pool of just these devices."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4, "slow": 2})
    inner, checked = allocator_named(policy, **options), list[bool]()

    class Judged(Watched):
        def allocate(self, active: Active, now_seconds: float) -> Shares:
            shares = super().allocate(active, now_seconds)
            up, scale = active.capacity, active.scale
            rate = np.where(scale <= up[:, None], active.rate, 0.0)
            equal = up @ rate / up.sum()
            if self.agnostic:
                rate = np.where(rate > 0, equal, 0.0)
            level = active.left if policy == "makespan" else equal / scale
            if policy in ("las_weighted", "las_water_filling"):
                level = level * active.weight
            reached = float(((rate * shares.x).sum(axis=0) / level).min())
            assert reached == pytest.approx(best_level(rate, scale, up, level), rel=1e-6)
            checked.append(bool((up < active.pool.capacity).any()))
            return shares

    failures = FailureOptions(mean_seconds=6000.0, repair_seconds=5000.0, seed=3)
    simulate_rounds(mixed_jobs(job), pool, Judged(inner), RoundOptions(failures=failures))
    assert sum(checked) > 10


def best_level(rate: Any, scale: Any, up: Any, level: Any) -> float:
    """The largest least throughput per level, over time fractions of [types, jobs]."""
    types, jobs = rate.shape
    limits = np.zeros((jobs + types + jobs, types * jobs + 1))
    for m in range(jobs):
        limits[m, m : types * jobs : jobs] = 1.0
        limits[jobs + types + m, m : types * jobs : jobs] = -rate[:, m]
        limits[jobs + types + m, -1] = level[m]
    for kind in range(types):
        limits[jobs + kind, kind * jobs : (kind + 1) * jobs] = scale
    room = np.concatenate((np.ones(jobs), up, np.zeros(jobs)))
    cost = np.zeros(types * jobs + 1)
    cost[-1] = -1.0
    found = linprog(cost, A_ub=limits, b_ub=room, bounds=(0, None), method="highs")
    return float(-found.fun)


def test_a_job_that_does_not_fit_what_is_up_waits_and_the_others_go_on(
    table: Throughputs, job: MakeJob
) -> None:
    """With one of four devices down at any time, a job of four has no share then."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4})
    jobs = [job("large", steps=800000.0, scale_factor=4), job("small", steps=200000.0)]
    allocator = Watched(allocator_named("las"))
    failures = FailureOptions(mean_seconds=30000.0, repair_seconds=5000.0, seed=1)
    run = simulate_rounds(jobs, pool, allocator, RoundOptions(failures=failures))
    assert {done.id for done in run.jobs} == {"large", "small"}
    shown = list(zip(allocator.seen, allocator.shown, strict=True))
    assert {"small"} in [names for (up, _), names in shown if up[0] < 4]
    assert all("large" not in names for (up, _), names in shown if up[0] < 4)
    assert {"large", "small"} in allocator.shown


def test_consolidated_devices_and_mixes_are_those_that_are_up(
    table: Throughputs, job: MakeJob
) -> None:
    """Policies see no column that what is up cannot hold, and every job ends."""
    spread = tuple(
        replace(entry, unconsolidated_steps_per_second={"fast": entry.steps_per_second["fast"] / 2})
        for entry in table.models
    )
    mix = MixThroughput(model="conv", devices={"fast": 2, "slow": 2}, steps_per_second=9.0)
    case = Case(
        throughputs=replace(table, models=spread), num_devices={"fast": 4, "slow": 4},
        servers=((2, 2), (4,)), placement="mixed", policy="las_water_filling", seed=3,
        failure_seconds=30000.0, server_failure_seconds=30000.0, repair_seconds=5000.0,
    )  # fmt: skip
    placed = run_case(case, mixed_jobs(job))
    assert (len(placed.jobs), placed.num_failures > 0) == (12, True)
    assert placed.num_server_failures > 0
    mixes = replace(
        case, throughputs=replace(table, mixes=(mix,)), servers=None, placement="consolidated",
        server_failure_seconds=None, policy="makespan",
    )  # fmt: skip
    mixed = run_case(mixes, mixed_jobs(job))
    assert (len(mixed.jobs), mixed.num_failures > 0) == (12, True)


def test_every_device_and_every_server_fails_alike() -> None:
    """Not the last servers first; a holder is hit in proportion to what it holds."""
    layout = DeviceLayout.apart([[4, 2, 6]])
    failures = Failures(FailureOptions(mean_seconds=1000.0, repair_seconds=0.0, seed=2), layout)
    seats = [[(0, 0, 1)], [(0, 0, 3)], [(0, 1, 1), (0, 2, 4)]]
    hits: Counter[int] = Counter()
    failed = np.zeros(3)
    for number in range(20_000):
        now = 10.0 * number
        before = np.array(failures.standing(now)[0])
        hits.update(failures.strike(seats, now, 10.0).tolist())
        failed += before - failures.fleet.standing()[0]
    assert failed.sum() == pytest.approx(12 * 200, rel=0.1)
    assert failed / failed.sum() == pytest.approx(np.array([4, 2, 6]) / 12, abs=0.03)
    assert [hits[n] for n in range(3)] == pytest.approx([200, 600, 1000], rel=0.2)


def test_a_server_takes_all_its_devices_with_it() -> None:
    """Two servers of 2 fast and 1 slow devices, one of 3 slow: whoever sits there is hit."""
    pool = Cluster.parse("2x(2xfast,1xslow),1x(3xslow)")
    assert pool.sizes is not None
    assert pool.server_numbers == ((0, 1), (0, 1, 2))
    layout = DeviceLayout(pool.sizes, pool.server_numbers)
    options = FailureOptions(server_mean_seconds=1000.0, repair_seconds=50.0, seed=4)
    failures = Failures(options, layout)
    seats = [[(0, 0, 2)], [(0, 1, 1), (1, 1, 1)], [(1, 2, 3)]]
    kinds = Counter[tuple[tuple[int, ...], ...]]()
    for number in range(3000):
        now = 100.0 * number
        assert failures.standing(now) == [[2, 2], [1, 1, 3]]
        hit = failures.strike(seats, now, 10.0).tolist()
        standing = failures.fleet.standing()
        assert [standing[0][0], standing[1][0]] == ([0, 0] if 0 in hit else [2, 1])
        assert [standing[0][1], standing[1][1]] == ([0, 0] if 1 in hit else [2, 1])
        assert standing[1][2] == (0 if 2 in hit else 3)
        kinds[tuple(hit)] += 1
    for server in range(3):
        assert kinds[(server,)] == pytest.approx(30, abs=20)
    assert failures.fleet.num_servers_failed == sum(len(hit) * n for hit, n in kinds.items())


@pytest.mark.parametrize("scheduler", ["rounds", "elastic", "static-priority", "easyscale", "yarn"])
def test_whole_servers_fail_under_every_mechanism(
    table: Throughputs, job: MakeJob, scheduler: str
) -> None:
    case = Case(
        throughputs=table, num_devices={"fast": 8}, servers=((4, 4),), scheduler=scheduler,
        server_failure_seconds=20000.0, repair_seconds=3000.0, seed=2, records_spans=True,
    )  # fmt: skip
    jobs = [job(n, steps=360000.0, scale_factor=1 + n % 2, arrival_seconds=n) for n in range(6)]
    run = run_case(case, jobs)
    assert run == run_case(case, jobs)
    assert len(run.jobs) == 6
    assert (run.num_failures, run.num_server_failures > 1) == (0, True)
    assert sum(done.num_restarts for done in run.jobs) > run.num_server_failures
    down = FailureEvents(case.failures, case.failures.layout)
    if scheduler != "rounds":  # there it fails at its own second
        for now in np.linspace(0.0, run.end_seconds, 300):
            down.until(now)
            here = [s for s in run.spans if s.start_seconds <= now < s.end_seconds]
            assert sum(span.num_devices for span in here) <= down.up()[0]


def test_jobs_move_off_a_server_that_failed(table: Throughputs, job: MakeJob) -> None:
    """Nobody is placed where nothing works; two jobs of 4 on two servers take turns meanwhile."""
    case = Case(
        throughputs=table, num_devices={"fast": 8}, servers=((4, 4),), records_spans=True,
        server_failure_seconds=20000.0, repair_seconds=4000.0, seed=2,
    )  # fmt: skip
    run = run_case(case, [job(n, steps=900000.0, scale_factor=4) for n in range(2)])
    assert run.num_server_failures > 1
    held: Counter[float] = Counter()
    for span in run.spans:
        held[span.start_seconds] += span.num_devices
    assert {4, 8} <= set(held.values()) <= {0, 4, 8}


@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_failures_that_leave_next_to_nothing_are_refused(
    table: Throughputs, job: MakeJob, scheduler: str
) -> None:
    case = Case(
        throughputs=table, num_devices={"fast": 4}, scheduler=scheduler,
        failure_seconds=HOUR, repair_seconds=1000 * HOUR,
    )  # fmt: skip
    words = r"1 h between failures of a device, 1000 h of repair\), below the limit of 1 %"
    with pytest.raises(InfeasibleError, match=words) as caught:
        run_case(case, [job(n) for n in range(4)])
    assert caught.value.exit_code == 3


@pytest.mark.slow
def test_a_run_in_which_no_job_ends_is_given_up(table: Throughputs, job: MakeJob) -> None:
    """Four devices, each up half of the time, seldom work together for a round."""
    case = Case(
        throughputs=table, num_devices={"fast": 4}, failure_seconds=400.0, repair_seconds=400.0
    )
    with pytest.raises(InfeasibleError, match="job 'wide' needs 4 devices up at once") as caught:
        run_case(case, [job("wide", steps=160000.0, scale_factor=4)])
    assert "no job has ended for" in caught.value.message
    late = job("late", arrival_seconds=1e7)
    assert len(run_case(case, [job("early"), late]).jobs) == 2  # waiting for jobs is no stall


@pytest.mark.slow
def test_many_equal_jobs_that_end_together_are_no_stall(pool: ClusterPool, job: MakeJob) -> None:
    failures = FailureOptions(mean_seconds=1e6, repair_seconds=60.0)
    jobs = [job(n, steps=4e5) for n in range(200)]
    run = simulate_rounds(jobs, pool, allocator_named("las"), RoundOptions(failures=failures))
    assert len(run.jobs) == 200


@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_jobs_that_fit_nowhere_are_named_and_the_others_go_on(
    table: Throughputs, job: MakeJob, scheduler: str
) -> None:
    case = Case(throughputs=table, num_devices={"fast": 2}, scheduler=scheduler)
    fits = [job(n, steps=9000.0, arrival_seconds=10.0 * n) for n in range(5)]
    misfits = [job("w", scale_factor=4, arrival_seconds=5.0), job("v", scale_factor=64)]
    jobs = sorted([*fits, *misfits], key=lambda each: each.arrival_seconds)
    run, alone = run_case(case, jobs), run_case(case, fits)
    assert (run.jobs, run.busy_seconds) == (alone.jobs, alone.busy_seconds)
    assert run.left_out.keys() == {"v", "w"}
    assert "asks for 64 devices of one type" in run.left_out["v"]
    assert report(case, run, "t").left_out == run.left_out
    with pytest.raises(InfeasibleError, match="none of the 2 jobs fits the pool; job 'v'"):
        run_case(case, misfits[::-1])


@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_no_jobs_are_an_empty_run(table: Throughputs, scheduler: str) -> None:
    case = Case(throughputs=table, num_devices={"fast": 2}, scheduler=scheduler)
    found = report(case, run_case(case, []), "nothing")
    assert (found.metrics.num_jobs, found.metrics.makespan_seconds) == (0, 0.0)


def test_server_failures_need_servers(table: Throughputs) -> None:
    case = Case(throughputs=table, num_devices={"fast": 8}, servers=((4, 4),))
    for changes in ({"servers": None}, {"scheduler": "published-rounds"}):
        with pytest.raises(ProblemError, match="give servers, such as"):
            replace(case, server_failure_seconds=1e6, **changes)
    with pytest.raises(HetflowError, match="between failures of a server must be > 0 s"):
        replace(case, server_failure_seconds=-1.0)
    elsewhere = FailureOptions(server_mean_seconds=1e6, layout=DeviceLayout.apart([[4, 4]]))
    pool = ClusterPool(throughputs=table, num_devices={"fast": 8})
    with pytest.raises(ProblemError, match="place no jobs"):
        simulate_rounds([], pool, allocator_named("las"), RoundOptions(failures=elsewhere))

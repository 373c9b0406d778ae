"""Which devices spans name: never two placements on one, and who stays keeps his."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.seats import DeviceLayout, Placement, devices_down, seat
from hetflow.clusters.simulator.cases import SCHEDULERS, Case, run_case
from hetflow.clusters.simulator.metrics import Simulation, SpanBook
from hetflow.clusters.simulator.rounds import Rounds
from hetflow.schema.cluster import Cluster
from hetflow.schema.jobs import Job, ModelThroughput, PairThroughput, Throughputs
from hetflow.schema.simulation import Span
from hetflow.tests.profiles import examples

MakeJob = Callable[..., Job]
SERVERS = "1x(2xfast,2xslow),1x(4xslow),1x(4xfast)"


def _jobs(numbers: list[tuple[str, int, float, float]]) -> list[Job]:
    now, jobs = 0.0, []
    for i, (model, scale, steps, gap) in enumerate(numbers):
        now += gap
        jobs.append(
            Job(
                id=f"job{i}", model=model, scale_factor=scale, steps=steps, arrival_seconds=now
            )
        )  # fmt: skip
    return jobs


@st.composite
def _traces(draw: st.DrawFn, kinds: int = 2) -> list[Job]:
    one = st.tuples(
        st.sampled_from(["conv", "rnn"][:kinds]), st.sampled_from([1, 2, 4]),
        st.floats(100, 40000), st.sampled_from([0.0, 100.0, 3000.0]),
    )  # fmt: skip
    return _jobs(draw(st.lists(one, min_size=1, max_size=10)))


def _paired(table: Throughputs) -> Throughputs:
    pairs = tuple(
        PairThroughput(
            models=("conv", "rnn"),
            scale_factor=scale,
            steps_per_second={
                "fast": (3.0 * scale, 1.5 * scale),
                "slow": (0.8 * scale, 1.2 * scale),
            },
        )
        for scale in (1, 2, 4)
    )
    return replace(table, pairs=pairs)


def _pool(text: str, table: Throughputs, **given: object) -> Case:
    pool = Cluster.parse(text)
    return Case(
        throughputs=table, num_devices=pool.num_devices, servers=pool.sizes,
        server_numbers=pool.server_numbers, records_spans=True, **given,
    )  # type: ignore[arg-type]  # fmt: skip


def _names(case: Case) -> set[str]:
    """Every name that a device of the pool can have."""
    if case.layout is None:
        return {f"{name}:{i}" for name, n in case.num_devices.items() for i in range(n)}
    rows = zip(case.num_devices, case.layout.sizes, case.layout.servers, strict=True)
    return {
        f"server{number}/{name}:{i}"
        for name, sizes, numbers in rows
        for size, number in zip(sizes, numbers, strict=True)
        for i in range(size)
    }


def _refuse_wrong_seats(run: Simulation, case: Case) -> None:
    pool, by_device = _names(case), defaultdict[str, list[Span]](list)
    for span in run.spans:
        assert len(set(span.devices)) == span.num_devices
        assert set(span.devices) <= pool
        assert all(f"/{span.device_type}:" in f"/{name}" for name in span.devices)
        for name in span.devices:
            by_device[name].append(span)
    for spans in by_device.values():
        for a, b in itertools.combinations(spans, 2):
            both = min(a.end_seconds, b.end_seconds) - max(a.start_seconds, b.start_seconds)
            if both > 1e-6:
                assert a.shared_with == b.job
                assert b.shared_with == a.job
                assert a.devices == b.devices


@pytest.mark.parametrize("servers", [False, True])
@pytest.mark.parametrize(
    "scheduler", [s for s in SCHEDULERS.names() if s not in ("elastic", "static-priority")]
)
@settings(max_examples=examples(8))
@given(jobs=_traces(), fails=st.booleans(), seed=st.integers(0, 9))
def test_no_device_has_two_placements(
    table: Throughputs, scheduler: str, servers: bool, jobs: list[Job], fails: bool, seed: int
) -> None:
    case = _pool(
        SERVERS if servers else "6xfast,6xslow", table, scheduler=scheduler, seed=seed,
        failure_seconds=40000.0 if fails else None, repair_seconds=4000.0,
    )  # fmt: skip
    run = run_case(case, jobs)
    _refuse_wrong_seats(run, case)
    plain = run_case(replace(case, records_spans=False), jobs)
    assert plain.spans == ()
    assert replace(run, spans=()) == plain  # the digits do not depend on it


@pytest.mark.parametrize("scheduler", ["elastic", "static-priority"])
@settings(max_examples=examples(8))
@given(jobs=_traces(), fails=st.booleans())
def test_nor_has_one_of_jobs_that_are_resized(
    table: Throughputs, scheduler: str, jobs: list[Job], fails: bool
) -> None:
    case = _pool(
        "2x(4xfast)", table, scheduler=scheduler,
        server_failure_seconds=20000.0 if fails else None, repair_seconds=4000.0,
    )  # fmt: skip
    _refuse_wrong_seats(run_case(case, jobs), case)


@pytest.mark.parametrize("servers", [False, True])
@settings(max_examples=examples(15))
@given(jobs=_traces(), fails=st.booleans())
def test_pairs_are_on_the_same_devices(
    table: Throughputs, servers: bool, jobs: list[Job], fails: bool
) -> None:
    case = _pool(
        SERVERS if servers else "6xfast,6xslow", _paired(table), space_sharing=True,
        failure_seconds=40000.0 if fails else None, repair_seconds=4000.0,
    )  # fmt: skip
    run = run_case(case, jobs)
    _refuse_wrong_seats(run, case)
    assert replace(run, spans=()) == run_case(replace(case, records_spans=False), jobs)


@settings(max_examples=examples(15))
@given(jobs=_traces(), fails=st.booleans())
def test_names_agree_with_the_servers_that_the_simulator_chose(
    table: Throughputs, jobs: list[Job], fails: bool
) -> None:
    """Device by device they are counted as the rounds counted, and who is not moved keeps names."""
    case = _pool(
        SERVERS, table, server_failure_seconds=60000.0 if fails else None, repair_seconds=4000.0
    )
    rounds: list[tuple[float, dict[str, tuple[int, dict[int, int]]]]] = []
    held = Rounds.hold

    def spy(self: Rounds, *given: object) -> None:
        servers = self.state.servers
        assert servers is not None
        rounds.append((self.now, dict(servers.held)))
        held(self, *given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "hold", spy)
        run = run_case(case, jobs)
    assert case.layout is not None
    names = list(case.num_devices)
    for now, placed in rounds:
        here = {s.job: s for s in run.spans if s.start_seconds <= now < s.end_seconds}
        assert here.keys() == placed.keys()
        for job, (kind, seats) in placed.items():
            wanted = {
                f"server{case.layout.servers[kind][p]}/{names[kind]}": n for p, n in seats.items()
            }
            assert Counter(name.rpartition(":")[0] for name in here[job].devices) == wanted
    if not fails:  # a struck job may lose the very device
        for (before, had), (now, has) in itertools.pairwise(rounds):
            for job in had.keys() & has.keys():
                if had[job] == has[job]:
                    assert _at(run, job, before) == _at(run, job, now)


def _at(run: Simulation, job: str, now: float) -> tuple[str, ...]:
    [span] = [s for s in run.spans if s.job == job and s.start_seconds <= now < s.end_seconds]
    return span.devices


def test_rounds_on_the_same_devices_are_one_span(table: Throughputs, job: MakeJob) -> None:
    """A thousand rounds alone: one span, on one server, of consecutive numbers."""
    case = _pool("1x(1xfast,1xslow),1x(4xfast)", table)
    run = run_case(case, [job(0, steps=2880000.0, scale_factor=2)])
    assert run.num_rounds > 900
    [span] = run.spans
    assert span.devices == ("server1/fast:0", "server1/fast:1")
    assert (span.start_seconds, span.end_seconds) == (0.0, run.end_seconds)


def test_a_mix_is_named_by_type(job: MakeJob) -> None:
    from hetflow.schema.jobs import MixThroughput

    table = Throughputs(
        models=(ModelThroughput(model="conv", steps_per_second={"fast": 4.0, "slow": 1.0}),),
        mixes=(MixThroughput(model="conv", devices={"fast": 1, "slow": 2}, steps_per_second=6.0),),
    )
    case = Case(throughputs=table, num_devices={"fast": 1, "slow": 2}, records_spans=True)
    run = run_case(case, [job(0)])
    assert {span.devices for span in run.spans} == {("fast:0",), ("slow:0", "slow:1")}


def test_who_stays_keeps_his_and_others_take_the_lowest_on_one_server() -> None:
    before = {"a": ((0, 1, 2), (0, 1, 3)), "b": ((0, 0, 0),)}
    placements = [
        Placement(("c",), ((0, 2),)), Placement(("b",), ((0, 1),)), Placement(("a",), ((0, 1),))
    ]  # fmt: skip
    seats = seat([[2, 4]], placements, before)
    assert seats == [((0, 1, 0), (0, 1, 1)), ((0, 0, 0),), ((0, 1, 2),)]
    grown = seat([[2, 4]], [Placement(("b",), ((0, 3),))], before)
    assert grown == [((0, 0, 0), (0, 0, 1), (0, 1, 0))]


def test_of_a_pair_that_parts_the_first_keeps_the_devices() -> None:
    before = {"a": ((0, 0, 1),), "b": ((0, 0, 1),)}
    apart = seat([[3]], [Placement(("b",), ((0, 1),)), Placement(("a",), ((0, 1),))], before)
    assert apart == [((0, 0, 1),), ((0, 0, 0),)]


def test_a_failure_takes_a_device_of_who_was_hit() -> None:
    struck, held = [(0, 0, 2)], [(0, 0, 0)]
    assert devices_down([[4]], [[3]], [], struck, held) == [(0, 0, 2)]
    assert devices_down([[4]], [[2]], [(0, 0, 2)], [], held) == [(0, 0, 2), (0, 0, 1)]
    assert devices_down([[4]], [[3]], [(0, 0, 2), (0, 0, 1)], [], held) == [(0, 0, 1)]
    book = SpanBook(["fast"], [4], DeviceLayout.apart([[4]]))
    both = [Placement(("a",), ((0, 1),)), Placement(("b",), ((0, 1),))]
    book.hold(both, 0.0, [(5.0,), (5.0,)])
    book.strike(["a"])
    book.hold(both, 5.0, [(9.0,), (9.0,)], [[3]])
    assert [(s.job, s.devices, s.end_seconds) for s in book.spans()] == [
        ("a", ("server0/fast:0",), 5.0),
        ("b", ("server0/fast:1",), 9.0),
        ("a", ("server0/fast:2",), 9.0),
    ]

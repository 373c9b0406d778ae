"""Placement on servers (thesis 5.3.1, 5.5): who sits together, who moves, what it costs."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.allocators import allocator_named
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.mechanisms.seats import DeviceLayout, Servers
from hetflow.clusters.simulator.cases import simulate_rounds
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, MixThroughput, ModelThroughput, PairThroughput, Throughputs
from hetflow.tests.profiles import examples

MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def spread_table() -> Throughputs:
    """A model that makes 4 steps a second a device together, half as many spread out."""
    return Throughputs(
        models=tuple(
            ModelThroughput(
                model="conv",
                scale_factor=scale,
                steps_per_second={"fast": 4.0 * scale},
                unconsolidated_steps_per_second={"fast": 2.0 * scale} if scale > 1 else None,
            )
            for scale in (1, 2, 3, 4)
        ),
        pairs=tuple(
            PairThroughput(
                models=("conv", "conv"), scale_factor=n, steps_per_second={"fast": (3.0 * n,) * 2}
            )
            for n in (1, 2, 3, 4)
        ),
    )


def place(servers: Servers, jobs: dict[str, int]) -> dict[str, bool]:
    ids = [(name,) for name in jobs]
    close, _ = servers.place(ids, [0] * len(jobs), list(jobs.values()), servers.sizes)
    return dict(zip(jobs, close, strict=True))


def test_large_jobs_first_and_the_fullest_server_that_fits() -> None:
    servers = Servers([[4, 4]])
    assert place(servers, {"a": 1, "b": 4, "c": 3}) == {"a": True, "b": True, "c": True}
    assert servers.held == {"b": (0, {0: 4}), "c": (0, {1: 3}), "a": (0, {1: 1})}


def test_a_job_larger_than_a_server_is_consolidated_on_two() -> None:
    assert place(Servers([[4, 4]]), {"a": 6}) == {"a": True}
    assert place(Servers([[2, 2, 2]]), {"a": 3, "b": 3}) == {"a": True, "b": True}
    assert place(Servers([[3, 3]]), {"a": 2, "b": 2, "c": 2}) == {"a": True, "b": True, "c": False}


def test_a_lease_is_kept_and_others_keep_off_it() -> None:
    servers = Servers([[4, 4]])
    place(servers, {"a": 1, "b": 1})
    assert servers.held["a"] == servers.held["b"] == (0, {0: 1})
    place(servers, {"b": 1, "c": 3})  # the three would fit beside b too, and do
    assert servers.held == {"b": (0, {0: 1}), "c": (0, {0: 3})}
    place(servers, {"b": 1, "d": 4})
    assert servers.held == {"b": (0, {0: 1}), "d": (0, {1: 4})}


def test_a_spread_job_closes_up_when_it_can() -> None:
    servers = Servers([[3, 3]])
    place(servers, {"a": 2, "b": 2, "c": 2})
    assert place(servers, {"b": 2, "c": 2}) == {"b": True, "c": True}


def test_broken_devices_are_not_given_away() -> None:
    servers = Servers([[2, 2]])
    close, _ = servers.place([("a",), ("b",)], [0, 0], [2, 1], [[2, 1]])
    assert close == [True, True]
    assert servers.held == {"a": (0, {0: 2}), "b": (0, {1: 1})}


def test_spread_jobs_run_at_the_unconsolidated_rate(
    spread_table: Throughputs, job: MakeJob
) -> None:
    pool = ClusterPool(throughputs=spread_table, num_devices={"fast": 4})
    jobs = [job(0, steps=7200.0, scale_factor=2), job(1, steps=7200.0, scale_factor=2)]

    def ends(*sizes: int) -> list[float]:
        options = RoundOptions(servers=(sizes,))
        run = simulate_rounds(jobs, pool, allocator_named("las"), options)
        return sorted(done.finish_seconds for done in run.jobs)

    assert ends(4) == pytest.approx([900.0, 900.0])
    assert ends(2, 2) == pytest.approx([900.0, 900.0])
    # 3 + 1: the second is spread, half as fast, until the first is gone at 900 s and the round
    # ends at 1,080 s: 4 * 1,080 steps by then, the rest together at 8.
    assert ends(3, 1) == pytest.approx([900.0, 1080.0 + 2880.0 / 8.0])


def test_moving_costs_a_restart(spread_table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=spread_table, num_devices={"fast": 4})
    jobs = [job(0, steps=7200.0, scale_factor=2), job(1, steps=7200.0, scale_factor=2)]
    options = RoundOptions(servers=((3, 1),), restart_seconds=10.0)
    run = simulate_rounds(jobs, pool, allocator_named("las"), options)
    assert {done.id: done.num_restarts for done in run.jobs} == {"0": 0, "1": 1}


@pytest.mark.parametrize(("numbers", "ends"), [((0, 1), 1282.5), ((0, 0), 1277.5)])
def test_only_a_move_on_one_server_is_a_resize(
    table: Throughputs, job: MakeJob, numbers: tuple[int, int], ends: float
) -> None:
    """A job goes over to the fast device when the first one ends, from a server that is another."""
    pool = ClusterPool(throughputs=table, num_devices={"fast": 1, "slow": 1})
    jobs = [job(0, steps=1400.0), job(1, steps=4000.0)]
    options = RoundOptions(
        servers=((1,), (1,)), layout=DeviceLayout(((1,), (1,)), ((numbers[0],), (numbers[1],))),
        restart_seconds=10.0, resize_seconds=5.0, reset_seconds=0.0,
    )  # fmt: skip
    run = simulate_rounds(jobs, pool, allocator_named("fifo"), options)
    # Job 0 ends in the first round, where job 1 makes 350 steps on the slow device.
    assert [done.finish_seconds for done in run.jobs] == pytest.approx([360.0, ends])


def test_a_spread_pair_is_slowed_alike(spread_table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=spread_table, num_devices={"fast": 2})
    jobs = [job(0, steps=3000.0, scale_factor=2), job(1, steps=3000.0, scale_factor=2)]
    options = RoundOptions(servers=((1, 1),))
    # As few servers as the type allows is consolidated, even if these are two.
    allocator = allocator_named("las", shares_space=True)
    run = simulate_rounds(jobs, pool, allocator, options)
    assert run.end_seconds == pytest.approx(500.0)
    wide = ClusterPool(throughputs=spread_table, num_devices={"fast": 3})
    jobs = [job(0, steps=9e4), *(job(n, steps=3000.0, scale_factor=2) for n in (1, 2))]
    allocator = allocator_named("las", shares_space=True)
    run = simulate_rounds(jobs, wide, allocator, RoundOptions(servers=((2, 1),)))
    assert {done.finish_seconds for done in run.jobs if done.id != "0"} == {500.0}


def test_mixes_are_not_placed(spread_table: Throughputs, job: MakeJob) -> None:
    mix = MixThroughput(model="conv", devices={"fast": 1}, steps_per_second=1.0)
    table = Throughputs(models=spread_table.models, mixes=(mix,))
    pool = ClusterPool(throughputs=table, num_devices={"fast": 4}, uses_mixes=True)
    with pytest.raises(HetflowError, match="not placed on servers"):
        simulate_rounds([job(0)], pool, allocator_named("las"), RoundOptions(servers=((2, 2),)))


@settings(max_examples=examples(60))
@given(st.data())
def test_every_placement_fits(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    servers = Servers([sizes])
    for _ in range(3):
        left, jobs = sum(sizes), {}
        for name in data.draw(st.permutations("abcdefgh")):
            need = data.draw(st.sampled_from([1, 1, 2, 4, 8]))
            if need <= left:
                jobs[name] = need
                left -= need
        close = place(servers, jobs)
        used = [0] * len(sizes)
        for name, need in jobs.items():
            seats = servers.held[name][1]
            assert sum(seats.values()) == need
            assert close[name] == (len(seats) <= servers.fewest(0, need))
            for server, number in seats.items():
                used[server] += number
        assert all(number <= size for number, size in zip(used, sizes, strict=True))

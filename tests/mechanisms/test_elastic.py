"""Weighted fair sharing with ranges of devices, and the devices of jobs that it moves."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.elastic import Claim, fair_shares, next_shares, share_elastically
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.mechanisms.round_state import RoundState, resumed, stored
from hetflow.clusters.mechanisms.seats import Seat
from hetflow.clusters.simulator.events import simulate_fair_share
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs
from hetflow.tests.profiles import examples

NUMBER = 4
SIZES = ((NUMBER,),)
POOL = ClusterPool(
    throughputs=Throughputs(
        models=tuple(
            ModelThroughput(model="m", scale_factor=scale, steps_per_second={"gpu": 2.0 * scale})
            for scale in range(1, NUMBER + 1)
        )
    ),
    num_devices={"gpu": NUMBER},
)


def test_jobs_within_their_ranges() -> None:
    """Four devices; each row by hand."""
    pair = (2, 4)
    rows: list[tuple[list[Claim], list[Claim], list[int]]] = [
        ([Claim(3, 4, 3), Claim(1, 4, 1)], [], [3, 1]),
        ([Claim(3, 4, 2, pair), Claim(1, 4, 2)], [], [2, 2]),  # 3 is none of its numbers
        ([Claim(1, 4, 4, pair)], [Claim(1, 4, 0, pair)], [2, 2]),
        ([Claim(1, 2, 2, (2,)), Claim(1, 4, 2)], [Claim(1, 4)], [2, 1, 1]),  # a fixed one
        ([Claim(1, 4, 4)], [Claim(1, 4, 0, (4,))], [4]),  # who runs has its least first
        ([Claim(1, 4, 4)], [Claim(2, 4, 0, (4,))], [0, 4]),  # but for heavier jobs
        ([Claim(3, 4, 4)], [Claim(1, 2, 0, (2,))], [4]),  # which a lighter one does not shrink
        ([Claim(1, 4, 2, (2, 3, 4)), Claim(1, 4, 2, (2, 3, 4))], [Claim(1, 3, 0, (3,))], [2, 2]),
    ]
    for running, waiting, wanted in rows:
        assert share_elastically(running, waiting, NUMBER) == wanted


_RANGES = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda r: (r[0], r[0] + r[1]))


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.floats(0.1, 10), _RANGES, st.booleans()), min_size=1, max_size=7),
    st.integers(0, 16),
)
def test_shares_are_numbers_that_jobs_can_run_on(
    jobs: list[tuple[float, tuple[int, int], bool]], free: int
) -> None:
    claims = [
        Claim(weight, most, 0, tuple(range(least, most + 1, 1 if every else 2)))
        for weight, (least, most), every in jobs
    ]
    claims = [Claim(one.weight, one.numbers[-1], 0, one.numbers) for one in claims if one.numbers]
    shares = share_elastically(claims, [], free)
    assert sum(shares) <= free
    for share, claim in zip(shares, claims, strict=True):
        assert share == 0 or share in (claim.numbers or ())
    if sum(claim.least for claim in claims) <= free:
        assert all(share for share, claim in zip(shares, claims, strict=True) if claim.least > 1)
    if all(every for _, _, every in jobs) and all(shares):
        assert sum(shares) == min(free, sum(claim.demand for claim in claims))


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(
            st.integers(0, 20), st.sampled_from([1.0, 2.0, 5.0]), st.integers(1, NUMBER),
            st.integers(1, 60),
        ),
        min_size=1, max_size=7,
    )
)  # fmt: skip
def test_what_is_decided_for_a_live_cluster_is_what_is_simulated(
    drawn: list[tuple[int, float, int, int]],
) -> None:
    """At each arrival and each end of the simulation, by a state that is stored in between."""
    jobs = [
        Job(id=str(i), model="m", steps=float(steps), scale_factor=most,
            arrival_seconds=float(arrival), priority_weight=weight)
        for i, (arrival, weight, most, steps) in enumerate(sorted(drawn))
    ]  # fmt: skip
    run = simulate_fair_share(jobs, POOL)
    events = sorted({one.arrival_seconds for one in jobs} | {o.finish_seconds for o in run.jobs})
    state = RoundState.empty(POOL)
    seats: dict[str, Seat] = {}
    for now, then in itertools.pairwise(events):
        state.leave({done.id for done in run.jobs if done.finish_seconds == now})
        state.admit([job for job in jobs if job.arrival_seconds == now], 5.0)
        here = {job.id for job in state.active.jobs}
        held = {job: seat for job, seat in seats.items() if job in here}
        seats = next_shares(state, {}, now, sizes=SIZES, held=held)
        middle = (now + then) / 2
        assert {job: len(seat) for job, seat in seats.items()} == {
            span.job: span.num_devices
            for span in run.spans
            if span.start_seconds <= middle < span.end_seconds
        }
        for job in seats.keys() & held.keys():  # who shrinks keeps some, who grows keeps all
            few, many = sorted((seats[job], held[job]), key=len)
            assert set(few) <= set(many)
        state = resumed(json.loads(json.dumps(stored(state))), POOL)


def test_a_device_that_is_down_is_given_to_nobody() -> None:
    state = RoundState.empty(POOL)
    state.admit([Job(id=name, model="m", steps=9.0, scale_factor=2) for name in "ab"], 5.0)
    seats = next_shares(state, {}, 0.0, sizes=SIZES)
    assert [len(seat) for seat in seats.values()] == [2, 2]
    [first, second] = seats.values()
    seats = next_shares(state, {"b": (2,)}, 1.0, sizes=SIZES, down=[first[0]], held=seats)
    assert seats == {"a": first[1:], "b": second}
    assert state.active.share.sum(axis=0) * state.active.scale == pytest.approx([1, 2])


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.integers(1, NUMBER)),  # a job comes
        st.integers(0, 6),  # one ends, of those that are there
    ),
    min_size=1, max_size=10,
)  # fmt: skip


@settings(max_examples=examples(80))
@given(st.lists(st.integers(1, NUMBER), min_size=1, max_size=3), _EVENTS)
def test_each_server_shares_its_devices_by_weight_among_the_jobs_on_it(
    row: list[int], events: list[tuple[float, int] | int]
) -> None:
    state, seats, left = RoundState.empty(POOL, (tuple(row),)), dict[str, Seat](), dict[str, Job]()
    for now, event in enumerate(events):
        if isinstance(event, tuple):
            weight, most = event
            job = Job(id=f"{now}", model="m", steps=9.0, scale_factor=most,
                      arrival_seconds=float(now), priority_weight=weight)  # fmt: skip
            left[job.id] = job
            state.admit([job], 5.0)
        elif left:
            gone = list(left)[event % len(left)]
            del left[gone]
            state.leave({gone})
        before = {job: seat for job, seat in seats.items() if job in left}
        seats = next_shares(state, {}, float(now), sizes=(tuple(row),), held=before)
        home = {job: {place for _, place, _ in seat} for job, seat in seats.items()}
        assert all(len(places) == 1 for places in home.values())
        for job in before.keys() & home.keys():  # it moves only for twice what it could have there
            place = before[job][0][1]
            if home[job] != {place}:
                were = [j for j, seat in before.items() if seat[0][1] == place]
                others = {*were, *(j for j, places in home.items() if place in places)} - {job}
                there = [*sorted(others), job]  # last: of equals the others may have one more
                weights = [left[j].priority_weight for j in there]
                most = [left[j].scale_factor for j in there]
                assert len(seats[job]) >= 2 * fair_shares(weights, most, row[place])[-1]
        taken = [device for seat in seats.values() for device in seat]
        assert len(taken) == len(set(taken))
        for place, size in enumerate(row):
            here = [left[job] for job, places in home.items() if place in places]
            weights, most = [j.priority_weight for j in here], [j.scale_factor for j in here]
            shares = zip(fair_shares(weights, most, size), weights, strict=True)
            held = [(len(seats[j.id]), j.priority_weight) for j in here]
            assert sorted(shares) == sorted(held)  # of equals either may have one more
        if len(left) <= sum(row) and len({job.priority_weight for job in left.values()}) <= 1:
            assert seats.keys() == left.keys()  # nobody waits while somebody could share


def test_jobs_go_where_they_get_most_and_stay_where_a_server_rests() -> None:
    sizes = ((2, 2),)
    state = RoundState.empty(POOL, sizes)
    jobs = [Job(id=name, model="m", steps=9.0, scale_factor=2) for name in "abc"]
    state.admit(jobs[:1], 5.0)
    first = next_shares(state, {}, 0.0, sizes=sizes)
    state.admit(jobs[1:2], 5.0)
    two = next_shares(state, {}, 1.0, sizes=sizes, held=first)
    assert two == {"a": ((0, 0, 0), (0, 0, 1)), "b": ((0, 1, 0), (0, 1, 1))}
    state.admit(jobs[2:], 5.0)
    rests = [(0, 0, 0), (0, 0, 1)]
    kept = {"a": two["a"]}
    three = next_shares(state, {}, 2.0, sizes=sizes, held=two, down=rests, kept=kept)
    assert three == {"a": two["a"], "b": ((0, 1, 0),), "c": ((0, 1, 1),)}
    assert state.active.share.sum(axis=0) * state.active.scale == pytest.approx([2, 1, 1])
    lost = next_shares(state, {}, 3.0, sizes=sizes, held=three, down=rests)
    assert {place for seat in lost.values() for _, place, _ in seat} == {1}
    back = next_shares(state, {}, 4.0, sizes=sizes, held=lost)
    assert {job: len(seat) for job, seat in back.items()} == {"a": 2, "b": 1, "c": 1}
    state.leave({"a"})
    alone = next_shares(state, {}, 5.0, sizes=sizes, held={**back, "a": ()})
    assert alone == {"b": ((0, 0, 0), (0, 0, 1)), "c": ((0, 1, 0), (0, 1, 1))}

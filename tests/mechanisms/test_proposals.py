"""EasyScale's schedulers: proposals against a plain search, and the devices of live jobs."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.easyscale import (
    VARIANTS,
    Bidder,
    Counts,
    Decision,
    Elastic,
    Fixed,
    Stock,
    Variant,
    Wish,
    admit_gangs,
    alone,
    decide,
    next_devices,
)
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.mechanisms.round_state import RoundState, resumed, stored
from hetflow.clusters.mechanisms.seats import Device, DeviceLayout, Seat
from hetflow.clusters.simulator.events import ProposalOptions, est_rate, simulate_proposals
from hetflow.papers.easyscale.taking import take
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs
from hetflow.tests.profiles import examples

STOCKS = (Stock(0, 0), Stock(1, 0), Stock(0, 1))
LAYOUT = DeviceLayout(((3, 2), (3,)), ((0, 1), (0,)))  # the same, by type


def drawn_rate(seed: int) -> Callable[[Counts], float]:
    """More devices are mostly faster; some numbers have no plan, and some add nothing."""

    def rate(counts: Counts) -> float:
        fast, slow = counts[0] + counts[2], counts[1]
        mixed = random.Random(f"{seed} {fast} {slow}")
        if not any(counts) or mixed.random() < 0.15:
            return 0.0
        return ((1 + seed % 3) * fast + (1 + seed % 2) * slow) * mixed.choice([0.5, 1.0, 1.0])

    return rate


_BIDDERS = st.lists(
    st.tuples(st.integers(0, 99), st.integers(1, 3), st.integers(0, 4), st.booleans()),
    min_size=1, max_size=6,
)  # fmt: skip


def bidders_of(drawn: list[tuple[int, int, int, bool]]) -> list[Bidder]:
    return [
        Bidder(
            id=f"job{i}", arrival_seconds=float(i // 2), held=(0, 0, 0), most=least + more,
            rate=drawn_rate(seed), full_rate=4.0, least=least, mixes=mixes,
        )
        for i, (seed, least, more, mixes) in enumerate(drawn)
    ]  # fmt: skip


def again(found: Decision, bidders: list[Bidder]) -> tuple[list[Bidder], list[Bidder]]:
    """Who runs and who waits after a decision."""
    by_id = {one.id: one for one in bidders}
    running = [_with(by_id[name], counts) for name, counts in found.held.items()]
    return running, [_with(one, (0, 0, 0)) for one in bidders if one.id not in found.held]


def _with(one: Bidder, counts: Counts) -> Bidder:
    return Bidder(
        id=one.id, arrival_seconds=one.arrival_seconds, held=counts, most=one.most, rate=one.rate,
        full_rate=one.full_rate, least=one.least, mixes=one.mixes,
    )  # fmt: skip


def check(found: Decision, bidders: list[Bidder], room: tuple[int, ...]) -> None:
    """What every decision keeps."""
    for stock, most in enumerate(room):
        assert sum(counts[stock] for counts in found.held.values()) <= most
    for one in bidders:
        counts = found.held.get(one.id)
        if counts is None:
            continue
        assert one.least <= sum(counts) <= one.most
        assert one.rate(counts) > 0
        used = [STOCKS[s] for s, number in enumerate(counts) if number]
        assert len({stock.server for stock in used}) == 1
        assert one.mixes or len({stock.kind for stock in used}) == 1


def by_search(
    bidders: list[Bidder], held: dict[str, Counts], room: tuple[int, ...]
) -> dict[str, Counts]:
    """Greedy acceptance from its definition: after each one all jobs propose anew."""
    held = dict(held)
    while True:
        free = [r - sum(c[s] for c in held.values()) for s, r in enumerate(room)]
        offers = []
        for i, one in enumerate(bidders):
            now = held[one.id]
            single = []
            for s, n in itertools.product(range(3), range(1, 9)):
                counts = tuple(c + n if k == s else c for k, c in enumerate(now))
                used = [STOCKS[k] for k, c in enumerate(counts) if c]
                if n > free[s] or not one.least <= sum(counts) <= one.most:
                    continue
                if len({u.server for u in used}) > 1:
                    continue
                if not one.mixes and len({u.kind for u in used}) > 1:
                    continue
                gain = (one.rate(counts) - one.rate(now)) / one.full_rate / n
                if gain > 1e-12:
                    single.append((-gain, -n, one.arrival_seconds, i, s, one.id, counts))
            offers += single
        if not offers:
            return held
        *_, name, counts = min(offers)
        held[name] = counts


@settings(max_examples=examples(150))
@given(_BIDDERS, st.tuples(*[st.integers(0, 4)] * 3), st.tuples(*[st.integers(0, 4)] * 3))
def test_proposals_are_accepted_as_by_plain_search_and_speed_no_job_down(
    drawn: list[tuple[int, int, int, bool]], room: tuple[int, ...], more: tuple[int, ...]
) -> None:
    bidders = bidders_of(drawn)
    single = [_with(one, one.held) for one in bidders if one.least == 1 or not one.mixes]
    wanted = by_search(single, {one.id: (0, 0, 0) for one in single}, room)
    found = decide(STOCKS, room, [], single)
    assert found.held == {name: counts for name, counts in wanted.items() if any(counts)}
    found = decide(STOCKS, room, [], bidders)  # who begins on several types, too
    check(found, bidders, room)
    running, waiting = again(found, bidders)
    grown = tuple(a + b for a, b in zip(room, more, strict=True))
    after = decide(STOCKS, grown, running, waiting)
    check(after, bidders, grown)
    for one in running:
        assert one.rate(after.held[one.id]) >= one.rate(one.held)
        assert all(a >= b for a, b in zip(after.held[one.id], one.held, strict=True))


@settings(max_examples=examples(150))
@given(
    _BIDDERS,
    st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=2, max_size=4),
    st.booleans(),
)
def test_jobs_that_give_back_or_take_keep_to_their_ranges(
    drawn: list[tuple[int, int, int, bool]], rooms: list[tuple[int, ...]], takes: bool
) -> None:
    bidders = bidders_of(drawn)
    running, waiting = list[Bidder](), bidders
    for room in rooms:
        before = decide(STOCKS, room, running, waiting)
        found = decide(STOCKS, room, running, waiting, trade=take if takes else None)
        check(found, bidders, room)
        if takes:  # nobody stops, and the product of all rates grows
            assert before.held.keys() <= found.held.keys()
            product = [1.0, 1.0]
            for one in bidders:
                if one.id in before.held:
                    product[0] *= one.rate(before.held[one.id])
                    product[1] *= one.rate(found.held[one.id])
            if before.held.keys() == found.held.keys():
                assert product[1] >= product[0] * (1 - 1e-9)
        running, waiting = again(found, bidders)


def curved(speed: float, power: float) -> Callable[[Counts], float]:
    """More devices are always faster, each by less."""
    return lambda counts: float((speed * counts[0] + sum(counts[1:])) ** power)


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(st.floats(1, 3), st.floats(0.3, 0.9), st.integers(1, 4)), min_size=1, max_size=5
    ),
    st.tuples(*[st.integers(0, 5)] * 2),
)
def test_where_jobs_take_no_exchange_of_a_device_is_left_that_gains(
    drawn: list[tuple[float, float, int]], room: tuple[int, ...]
) -> None:
    """On one server, by rates without gaps; the first to wait is let in while some job has two."""
    bidders = [
        Bidder(id=str(i), arrival_seconds=float(i), held=(0, 0), most=most, full_rate=speed**power,
               rate=curved(speed, power))
        for i, (speed, power, most) in enumerate(drawn)
    ]  # fmt: skip
    held = decide(STOCKS[:2], room, [], bidders, trade=take).held
    for giver, taker in itertools.permutations([one for one in bidders if one.id in held], 2):
        for stock in (0, 1):
            less, more = list(held[giver.id]), list(held[taker.id])
            less[stock], more[stock] = less[stock] - 1, more[stock] + 1
            if less[stock] >= 0 and sum(less) and sum(more) <= taker.most:
                before = giver.rate(held[giver.id]) * taker.rate(held[taker.id])
                after = giver.rate(tuple(less)) * taker.rate(tuple(more))
                assert after <= before * (1 + 1e-8)
    if len(held) < len(bidders):
        assert all(sum(counts) == 1 for counts in held.values())


def test_the_job_that_loses_least_gives_a_device_back() -> None:
    rates = {"even": curved(1.0, 1.0), "flat": curved(1.0, 0.5)}
    running = [  # with one device less even loses 1 of 4, flat 0.27 of 2
        Bidder(id=name, arrival_seconds=0.0, held=(4,), most=4, rate=rate, full_rate=rate((4,)))
        for name, rate in rates.items()
    ]
    for order in (running, running[::-1]):
        assert decide(STOCKS[:1], (6,), order, []).held == {"even": (4,), "flat": (2,)}
    assert decide(STOCKS[:1], (4,), running, []).held == {"even": (3,), "flat": (1,)}


def test_a_queue_of_gangs_is_not_passed() -> None:
    assert admit_gangs([2, 4], [[(2, 0), (0, 2)], [(2, 0), (0, 2)], [(2, 0)], [(0, 1)]]) == [
        (2, 0), (0, 2),
    ]  # fmt: skip


def linear(*speeds: float) -> Callable[[Counts], float]:
    return lambda counts: sum(v * n for v, n in zip(speeds, counts, strict=True))


def elastic(least: int, most: int, *, mixes: bool = True) -> Elastic:
    """Twice as fast on the first type."""
    return Elastic(least=least, most=most, rate=linear(2.0, 1.0), full_rate=8.0, mixes=mixes)


POOL = ClusterPool(
    throughputs=Throughputs(
        models=(ModelThroughput(model="m", steps_per_second={"fast": 2.0, "slow": 1.0}),)
    ),
    num_devices={"fast": 5, "slow": 3},
)


class Live:
    """What a scheduler does between decisions."""

    def __init__(self, wishes: dict[str, Wish], variant: str = "easyscale") -> None:
        self.wishes, self.variant = wishes, VARIANTS.get(variant)
        self.state = RoundState.empty(POOL)
        self.seats: dict[str, Seat] = {}
        self.now = 0.0

    def come(self, *names: str, weight: float = 1.0) -> None:
        self.now += 1.0
        self.state.admit(
            [Job(id=n, model="m", steps=9.0, arrival_seconds=self.now, priority_weight=weight)
             for n in names], 5.0,
        )  # fmt: skip

    def leave(self, *names: str) -> None:
        self.state.leave(set(names))
        self.seats = {job: its for job, its in self.seats.items() if job not in names}

    def decide(self, *down: Device, kept: tuple[str, ...] = ()) -> dict[str, str]:
        """The devices of each job: f on the first server, F on the second, s are slow."""
        self.now += 1.0
        self.state = resumed(json.loads(json.dumps(stored(self.state))), POOL)
        self.seats = next_devices(
            self.state, self.wishes, self.now, variant=self.variant, layout=LAYOUT, down=down,
            held=self.seats, kept={job: self.seats[job] for job in kept},
        )  # fmt: skip
        every = [device for its in self.seats.values() for device in its]
        assert len(every) == len(set(every))
        shares = self.state.active.share * self.state.active.scale
        for place, job in enumerate(self.state.active.jobs):
            held = Counter(kind for kind, _, _ in self.seats.get(job.id, ()))
            assert shares[:, place].tolist() == pytest.approx([held[0], held[1]])
        return {
            job: "".join("fFs"[2 if kind else place] for kind, place, _ in its)
            for job, its in sorted(self.seats.items())
        }


def test_elastic_jobs_use_what_fixed_jobs_leave_and_give_it_back() -> None:
    live = Live({"a": elastic(1, 6), "b": elastic(2, 2), "fixed": Fixed(((3, 0),)),
                 "light": Fixed(((1, 0), (0, 1))), "heavy": Fixed(((0, 3),))})  # fmt: skip
    live.come("a")
    assert live.decide() == {"a": "fffsss"}  # all of one server
    before = live.seats["a"]
    live.come("b")
    assert live.decide() == {"a": "fffsss", "b": "FF"}
    live.come("fixed")
    assert live.decide() == {"a": "sss", "b": "FF", "fixed": "fff"}
    assert set(live.seats["a"]) < set(before)
    live.come("light")
    assert live.decide() == {"a": "sss", "fixed": "fff", "light": "F"}  # b has less than its least
    live.come("heavy", weight=2.0)
    assert live.decide() == {"fixed": "fff", "heavy": "sss", "light": "F"} | {"a": "F"}
    live.leave("fixed")
    assert live.decide() == {"a": "F", "b": "ff", "heavy": "sss", "light": "F"}
    live.leave("heavy", "light", "b")
    assert live.decide() == {"a": "FF"}  # it stays on its server


def test_fixed_jobs_are_let_in_by_weight_and_wait_where_too_few_devices_work() -> None:
    both = Fixed(((3, 0),))
    live = Live({"early": both, "heavy": both, "other": Fixed(((2, 0),)), "a": elastic(1, 2)})
    live.come("early")
    live.come("heavy", weight=2.0)
    assert live.decide() == {"heavy": "fff"}
    live.come("other")
    assert live.decide() == {"heavy": "fff"}  # the first one waits, and all behind it
    live.leave("early")
    assert live.decide() == {"heavy": "fff", "other": "FF"}
    assert live.decide(live.seats["heavy"][1]) == {"other": "FF"}
    live.come("a")
    assert live.decide((0, 0, 1)) == {"a": "ff", "other": "FF"}
    assert live.decide() == {"heavy": "fff", "other": "FF", "a": "ss"}


def test_a_job_that_may_not_mix_keeps_to_its_type_and_a_large_one_begins_on_two() -> None:
    live = Live({"a": elastic(1, 6, mixes=False), "big": elastic(5, 6), "b": elastic(4, 4)})
    live.come("a", "big")
    assert live.decide() == {"a": "fff"}
    live.leave("a")
    assert live.decide() == {"big": "fffsss"}
    homogeneous = Live({"big": elastic(5, 6), "b": elastic(3, 6)}, "easyscale-homogeneous")
    homogeneous.come("big", "b")
    assert homogeneous.decide() == {"b": "fff"}
    assert alone(elastic(4, 5), LAYOUT, Variant()) == (3, 2)
    assert alone(elastic(4, 5), LAYOUT, Variant(mixes=False)) is None
    assert alone(elastic(7, 7), LAYOUT, Variant()) is None
    assert alone(Fixed(((4, 0),)), LAYOUT, Variant()) is None
    assert alone(Fixed(((4, 0), (2, 1))), LAYOUT, Variant()) == (2, 1)


def test_a_waiting_job_takes_devices_only_where_jobs_may() -> None:
    for variant, taken in (("easyscale", ""), ("easyscale-taking", "ff")):
        wishes: dict[str, Wish] = {"a": elastic(1, 3), "c": elastic(1, 3), "d": elastic(1, 2)}
        live = Live(wishes | {"b": elastic(2, 2)}, variant)
        live.come("a")
        live.come("c")
        live.come("d")
        assert live.decide() == {"a": "fff", "c": "FF", "d": "ss"}
        live.come("b")
        found = live.decide()
        assert found.get("b", "") == taken
        assert len(found["a"]) == 3 - len(taken)


def test_devices_that_fail_are_given_to_nobody_and_jobs_on_a_resting_server_stay() -> None:
    live = Live({"a": elastic(1, 6), "fixed": Fixed(((2, 0),)), "b": elastic(3, 3)})
    live.come("fixed")
    assert live.decide() == {"fixed": "ff"}
    live.come("a")
    assert live.decide() == {"a": "FF", "fixed": "ff"} or live.decide()["a"] == "fsss"
    lost = live.seats["fixed"][0]
    found = live.decide(lost)
    assert lost not in {device for its in live.seats.values() for device in its}
    assert len(found["fixed"]) == 2  # all at once, elsewhere or with another one
    first = [(0, 0, i) for i in range(3)] + [(1, 0, i) for i in range(3)]
    there = [job for job, its in live.seats.items() if its[0] in first]
    seats = {job: live.seats[job] for job in there}
    live.come("b")
    live.decide(*first, kept=tuple(there))
    assert {job: live.seats[job] for job in there} == seats
    assert "b" not in live.seats


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 1), st.integers(1, 4), st.integers(1, 60)),
        min_size=1, max_size=7, unique_by=lambda one: one[0],
    ),
    st.booleans(),
)  # fmt: skip
def test_what_is_decided_for_a_live_cluster_is_what_is_simulated(
    drawn: list[tuple[int, int, int, int]], mixes: bool
) -> None:
    """At each arrival and each end of the simulation, by a state that is stored in between."""
    num_devices = {"fast": 4, "slow": 4}
    pool = ClusterPool(
        throughputs=Throughputs(
            models=tuple(
                ModelThroughput(model=f"m{m}", scale_factor=scale,
                                steps_per_second={"fast": 2.0 + m, "slow": 1.0})
                for m in range(2) for scale in range(1, 5)
            )
        ),
        num_devices=num_devices,
    )  # fmt: skip
    jobs = [
        Job(id=str(i), model=f"m{model}", steps=float(steps), scale_factor=most,
            arrival_seconds=float(arrival))
        for i, (arrival, model, most, steps) in enumerate(sorted(drawn))
    ]  # fmt: skip

    def wish(job: Job) -> Elastic:
        speeds = pool.rate_per_device(job)
        return Elastic(
            least=1, most=job.scale_factor, full_rate=max(speeds), mixes=True,
            rate=lambda counts: est_rate(speeds, counts, job.scale_factor),
        )  # fmt: skip

    run = simulate_proposals(jobs, pool, ProposalOptions(variant=Variant(mixes)))
    events = sorted({one.arrival_seconds for one in jobs} | {o.finish_seconds for o in run.jobs})
    state, seats = RoundState.empty(pool), dict[str, Seat]()
    for now, then in itertools.pairwise(events):
        state.leave({done.id for done in run.jobs if done.finish_seconds == now})
        state.admit([job for job in jobs if job.arrival_seconds == now], 5.0)
        here = {job.id for job in state.active.jobs}
        seats = next_devices(
            state, {job.id: wish(job) for job in state.active.jobs}, now, variant=Variant(mixes),
            layout=DeviceLayout(((4,), (4,)), ((0,), (0,))),
            held={job: its for job, its in seats.items() if job in here},
        )  # fmt: skip
        middle = (now + then) / 2
        simulated = Counter[tuple[str, str]]()
        for span in run.spans:
            if span.start_seconds <= middle < span.end_seconds:
                simulated[span.job, span.device_type] += span.num_devices
        live = Counter((job, pool.types[kind]) for job, its in seats.items() for kind, _, _ in its)
        assert live == simulated
        state = resumed(json.loads(json.dumps(stored(state))), pool)

"""Splits that share states: equal to enumeration, proved by a certificate that replays."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import product

import pytest

from hetflow.planning.checks.sharded_split import check
from hetflow.schema import files
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.layers import PassMoment
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.plan import Plan, SharesCertificate
from hetflow.schema.problem import ShardedDevices, ShardedProblem
from hetflow.schema.profile import BatchPoint
from hetflow.solvers.split.sharded import missing_bytes, solve

INSTANCES = 300


def moments(draw: random.Random, weights: int, most: int) -> tuple[PassMoment, ...]:
    """Some of a pass, in half of the draws."""
    return tuple(
        PassMoment(
            taken_bytes=draw.randint(0, most),
            weight_bytes=draw.randint(0, weights // 2),
            gradient_bytes=draw.randint(0, weights // 2),
            summed_bytes=draw.randint(0, 10),
        )
        for _ in range(draw.choice([0, 0, 1, 3]))
    )


def drawn(seed: int) -> ShardedProblem:
    """A small problem: few devices of one or two types, some without room for all states."""
    draw = random.Random(seed)
    weights, told = draw.choice([40, 97]), draw.random() < 0.7
    masters = random.Random(f"masters {seed}").random() < 0.3
    states = (9 if masters else 4) * weights  # the most, with weights and gradients
    kinds = []
    for name in "AB"[: draw.randint(1, 2)]:
        slowness, sample = draw.uniform(0.5, 3), draw.randint(5, 30)
        curve = tuple(
            BatchPoint(
                batch_size=size,
                step_seconds=slowness * (0.3 + size * draw.uniform(0.8, 1.2)),
                peak_memory_bytes=states + max(size * sample, 2 * weights * told),
                pass_bytes=size * sample if told else None,
                update_bytes=draw.choice([0, 2 * weights]) if told else None,
                first_pass_bytes=draw.choice([None, size * sample + 7]) if told else None,
                moments=moments(random.Random(f"{size}{seed}"), weights, size * sample)
                if told
                else (),
            )
            for size in sorted(draw.sample([1, 2, 3, 4], draw.randint(1, 3)))
        )
        again = random.Random(f"{name}{seed}")  # of half of the types passes with less memory
        recomputed = tuple(
            BatchPoint(
                batch_size=size,
                step_seconds=slowness * (0.4 + size * again.uniform(1.1, 1.5)),
                peak_memory_bytes=states + size * (sample // 3),
            )
            for size in sorted(again.sample([1, 2, 3, 4, 6], again.choice([0, 0, 1, 2])))
        )
        offloaded = tuple(
            BatchPoint(
                batch_size=size,
                step_seconds=slowness * (0.3 + size * again.uniform(0.9, 1.7)),
                peak_memory_bytes=states + size * (sample // 2),
            )
            for size in sorted(again.sample([1, 2, 3, 4, 6], again.choice([0, 0, 1, 2])))
        )
        kinds.append(
            ShardedDevices(
                device_type=name,
                recomputed_curve=recomputed,
                offloaded_curve=offloaded,
                num_devices=draw.randint(1, 2) if name == "B" else 2,
                memory_bytes=draw.randint(weights, 7 * weights) * (1 + masters),
                batch_curve=curve,
                update_seconds=draw.random(),
                weight_bytes=weights,
                fixed_seconds=draw.random(),
            )
        )
    batch = draw.choice([4, 6, 8])
    optimizer = OptimizerState(
        state_bytes_per_weight_byte=draw.choice([0.0, 0.5, 1.0, 2.0]),
        workspace_bytes_per_weight_byte=draw.choice([None, 2.0, 3.0]),
    )
    return ShardedProblem(
        model="m",
        global_batch_size=batch,
        devices=tuple(kinds),
        optimizer=optimizer.with_masters() if masters else optimizer,
        shards=draw.choice([("optimizer", "gradients", "all"), ("all",), ("gradients",)]),
        weight_bytes=weights,
        gathered_bytes=draw.randint(0, weights // 2),
        edge_bytes=draw.randint(0, 20),
        num_units=4,
        bytes_per_second=draw.choice([None, 30.0, 1000.0]),
        latency_seconds=draw.choice([0, 0.001]),
        frozen_bytes=draw.choice([0, 0, weights // 2, weights - 10]),
        gathered_trained_bytes=draw.choice([None, 3]),
        second_trained_bytes=draw.choice([0, 2]),
    )


def step(problem: ShardedProblem, shard: str, rounds: int, compute: float, end: float) -> float:
    """The step by docs/sharding.md."""
    whole = edge = reduced = last = 0.0
    if problem.bytes_per_second is not None:
        late = problem.latency_seconds * sum(kind.num_devices for kind in problem.devices)
        whole = problem.num_units * late + problem.weight_bytes / problem.bytes_per_second
        edge = late + problem.edge_bytes / problem.bytes_per_second
        trained = problem.weight_bytes - problem.frozen_bytes
        reduced = problem.num_units * late + trained / problem.bytes_per_second
        last = late + min(trained, problem.edge_bytes) / problem.bytes_per_second
    if shard == "all":
        return rounds * (max(compute, 2 * whole + reduced) + edge + last) + end
    return rounds * (max(compute, reduced) + last) + whole + end


def shortest_end(kinds: list[ShardedDevices], shares: list[int], weights: int) -> float:
    """The least end over all shares of these devices: of single bytes, the cheapest ones."""
    costs = sorted(
        kind.fixed_seconds + kind.update_seconds * number / weights
        for kind, most in zip(kinds, shares, strict=True)
        for number in range(1, most + 1)
    )
    return max(costs[weights - 1], *(kind.fixed_seconds for kind in kinds))


def most_share(
    problem: ShardedProblem,
    kind: ShardedDevices,
    point: BatchPoint,
    shard: str,
    is_one_round: bool,
) -> int | None:
    """The most bytes of weights whose states fit; None: not even none do."""
    weights, trained = problem.weight_bytes, problem.weight_bytes - problem.frozen_bytes
    most = problem.gathered_trained_bytes
    gradients = min(trained, problem.gathered_bytes if most is None else most)

    def peak(share: int) -> Fraction:
        rest = weights - share  # the other devices'; of the frozen weights there is nothing else
        own = Fraction(share * trained, weights)
        states = Fraction(problem.optimizer.state_bytes_per_weight_byte)
        found = point.peak_memory_bytes - states * (trained - own)
        if shard in ("gradients", "all"):
            found -= trained - own
        if shard == "all":
            found -= rest
        wide = 2 if problem.optimizer.masters else 1
        if wide == 2 and shard != "gradients":
            # Masters are in place of weights. Gradients that are whole are as wide as these.
            found -= own
        beside = gradients if shard in ("gradients", "all") else 0
        beside += min(weights, problem.gathered_bytes) if shard == "all" else 0
        if point.pass_bytes is None or point.update_bytes is None:
            return found + beside
        found -= max(point.pass_bytes, point.update_bytes)  # between the parts of a step
        passes = found + beside + point.pass_bytes
        if point.moments and shard in ("gradients", "all"):
            passes = max(
                found
                + moment.taken_bytes
                + moment.gradient_bytes
                + (moment.weight_bytes if shard == "all" else 0)
                - is_one_round * wide * Fraction(share, weights) * (trained - moment.summed_bytes)
                for moment in point.moments
            )
        elif is_one_round and point.first_pass_bytes is not None:
            coming = point.first_pass_bytes - point.pass_bytes - problem.second_trained_bytes
            kept = (states + 1) * trained + (weights if shard == "all" else 0)
            passes += Fraction(share, weights) * max(wide * (coming - trained), -kept)
        workspace = problem.optimizer.workspace_bytes_per_weight_byte
        scaled = Fraction(point.update_bytes if workspace is None else workspace) * own
        update = point.update_bytes if workspace is None else min(point.update_bytes, scaled)
        update *= wide  # the optimizer's temporary tensors are of the masters' type
        if shard != "optimizer":
            return max(passes, found + update)
        one, summed = min(trained, problem.edge_bytes), found - (trained - wide * own)
        first = found + wide * Fraction(share, weights) * one  # its sum beside all gradients
        last = summed + one if wide == 2 else first  # all sums beside its gradients
        return max(passes, first, last, summed + update)

    return next((s for s in range(weights, -1, -1) if peak(s) <= kind.memory_bytes), None)


def steps(problem: ShardedProblem) -> Iterator[float]:
    """The step of every plan."""
    batch, weights = problem.global_batch_size, problem.weight_bytes
    share_of = cache(partial(most_share, problem))
    for shard in problem.shards:
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        for rounds in [None] if shard == "optimizer" else divisors:
            kinds = []
            for kind in problem.devices:
                taken: list[tuple[int, float, int, ShardedDevices | None]] = [(0, 0.0, 0, None)]
                for point in problem.allowed(tuple(point for _, point in kind.passes)):
                    share = share_of(kind, point, shard, rounds == 1)
                    for passes in [rounds] if rounds else range(1, batch + 1):
                        if share is not None:
                            seconds = passes * point.step_seconds / (rounds or 1)
                            taken.append((passes * point.batch_size, seconds, share, kind))
                kinds += [taken] * kind.num_devices
            for devices in product(*kinds):
                samples, seconds, shares, _ = zip(*devices, strict=True)
                if sum(samples) == batch and sum(shares) >= weights:
                    used = [(kind, share) for _, _, share, kind in devices if kind is not None]
                    end = shortest_end(*map(list, zip(*used, strict=True)), weights)
                    yield step(problem, shard, rounds or 1, max(seconds), end)


def solved(problem: ShardedProblem) -> Plan | None:
    try:
        return solve(problem)
    except InfeasibleError:
        return None


@pytest.mark.parametrize("part", range(3))
def test_equals_enumeration_and_the_certificate_replays(part: int) -> None:
    num_plans, chosen = 0, Counter[str | None]()
    for seed in range(part, INSTANCES, 3):
        problem = drawn(seed)
        least, plan = min(steps(problem), default=None), solved(problem)
        assert (plan is None) == (least is None), seed
        if plan is not None and least is not None:
            assert plan.proof.objective == pytest.approx(least, rel=1e-8), seed
            verdict = check(plan, problem)
            assert (list(verdict), verdict.bound) == ([], "replayed"), seed
            num_plans += 1
            used = {group.activations for group in plan.groups} - {None}
            chosen.update(used)
            if used:  # they are kept where that is as fast
                kinds = tuple(
                    replace(kind, recomputed_curve=(), offloaded_curve=())
                    for kind in problem.devices
                )
                kept = solved(replace(problem, devices=kinds))
                assert kept is None or kept.proof.objective > plan.proof.objective, seed
    assert num_plans > INSTANCES / 8
    assert min(chosen["recomputed"], chosen["offloaded"]) > 5


def test_earlier_plans_say_recompute_of_activations() -> None:
    plans = (found for seed in range(INSTANCES) if (found := solved(drawn(seed))) is not None)
    plan = next(p for p in plans if any(group.activations == "recomputed" for group in p.groups))
    text = files.to_json(plan)
    earlier = text.replace('"activations": "recomputed"', '"recompute": "full"')
    assert earlier != text
    assert files.from_json(earlier, Plan) == files.from_json(text, Plan) == plan


def large() -> ShardedProblem:
    """64 devices of 6 types, a batch of 4096, and states that no device holds."""
    gib = 1 << 30
    kinds = tuple(
        ShardedDevices(
            device_type=f"T{k}",
            num_devices=10 + (k < 4),
            memory_bytes=(8 + 6 * k) * gib,
            batch_curve=tuple(
                BatchPoint(
                    batch_size=size,
                    step_seconds=(1 + 0.37 * (5 * k % 6)) * (0.02 + 0.01 * size**0.95),
                    peak_memory_bytes=80 * gib + size * (700 << 20),
                )
                for size in (1, 2, 3, 4, 6, 8, 12, 16, 32)
            ),
            weight_bytes=1,
            update_seconds=0.2 * (k + 1),
            fixed_seconds=0.001 * (7 - k),
        )
        for k in range(6)
    )
    return ShardedProblem(
        model="m",
        global_batch_size=4096,
        devices=kinds,
        optimizer=OptimizerState(state_bytes_per_weight_byte=2.0),
        shards=("optimizer", "gradients", "all"),
        weight_bytes=20 * gib,
        gathered_bytes=gib,
        edge_bytes=300 << 20,
        num_units=33,
        bytes_per_second=2e10,
        latency_seconds=1e-5,
    )


def test_64_devices_of_6_types_that_hold_no_states_whole() -> None:
    problem = large()
    plan = solve(problem)
    verdict = check(plan, problem)
    assert (list(verdict), verdict.bound) == ([], "replayed")
    assert plan.shard == "all"


def test_of_devices_that_end_together_any_may_be_told() -> None:
    """Their ends are equal but for rounding, and the planner's and the judge's round apart."""
    plan = solve(problem := large())
    ends = {}
    for group in plan.groups:
        kind = next(k for k in problem.devices if k.device_type == group.device_type)
        update = kind.update_seconds * (group.state_share_bytes or 0) / problem.weight_bytes
        ends[group.device_type] = (update, kind.fixed_seconds)
    longest = max(map(sum, ends.values()))
    for update, fixed in ends.values():
        told = replace(plan.predicted, update_seconds=update * (1 + 1e-12), fixed_seconds=fixed)
        is_right = update + fixed > longest * (1 - 1e-9)
        assert is_right == (list(check(replace(plan, predicted=told), problem)) == [])


def test_a_certificate_that_leaves_out_or_overstates_is_refused() -> None:
    problem = next(p for p in map(drawn, range(50)) if solved(p) and len(p.shards) == 3)
    plan = solve(problem)
    stated = plan.proof.certificate
    assert isinstance(stated, SharesCertificate)
    less = replace(stated, refuted=stated.refuted[:-1])
    assert check(replace(plan, proof=replace(plan.proof, certificate=less)), problem)
    more = 1.01 * plan.proof.objective
    slow = replace(plan.proof, lower_bound=more, gap=0.0)
    assert check(replace(plan, proof=slow), problem)
    wrong = tuple(replace(one, bytes_per_sample=-1e12) for one in stated.refuted)
    forged = replace(plan.proof, certificate=replace(stated, refuted=wrong))
    assert check(replace(plan, proof=forged), problem)


def with_more(problem: ShardedProblem, more_bytes: int) -> ShardedProblem:
    """The problem on devices of so much more memory."""
    kinds = (replace(kind, memory_bytes=kind.memory_bytes + more_bytes) for kind in problem.devices)
    return replace(problem, devices=tuple(kinds))


def test_with_the_bytes_that_devices_lack_a_plan_fits_and_with_one_less_none() -> None:
    """By enumeration, of problems in which nothing fits."""
    lacking = hopeless = 0
    for seed in range(0, INSTANCES, 6):
        problem = drawn(seed)
        if solved(problem) is not None:
            assert missing_bytes(problem) == 0
            continue
        missing = missing_bytes(problem)
        if missing is None:
            assert next(steps(with_more(problem, 1 << 40)), None) is None, seed
            hopeless += 1
            continue
        assert next(steps(with_more(problem, missing)), None) is not None, seed
        assert next(steps(with_more(problem, missing - 1)), None) is None, seed
        with pytest.raises(InfeasibleError, match=f"lacks at least {missing} bytes"):
            solve(problem)
        lacking += 1
    assert lacking > 5
    assert hopeless

"""Small problems of three dimensions, and every plan of their space, counted by the checker."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from hetflow.planning.checks.parallel import counted_memory, counted_step
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.parallel import (
    CostRule,
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    Recompute,
    ShardSizes,
    ShardTimes,
    TypesLink,
)
from hetflow.schema.plan import Plan, Prediction, Proof, Stage
from hetflow.solvers.parallel.solve import shares_of
from hetflow.tests.plan_parts import parallel_plan_of, replica_group

UNPROVED = Proof(
    termination="feasible", objective=0.0, lower_bound=None, gap=None, method="", space=""
)
ADAM = OptimizerState(state_bytes_per_weight_byte=2.0)  # of the 4 bytes that problems count
NOTHING = Prediction(step_seconds=0.0, samples_per_second=0.0)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many layers into stages."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def fastest(problem: ParallelProblem) -> float | None:
    """The least step over every plan of the stated space: each is built and counted."""
    if len(problem.shards) > 1:
        each = [fastest(own) for own in problem.by_shard]
        return min((step for step in each if step is not None), default=None)
    best = None
    devices = sum(pool.num_devices for pool in problem.pools)
    for size in sorted({t.microbatch_size for pool in problem.pools for t in pool.times}):
        for replicas in range(1, min(devices, -(-problem.global_batch_size // size)) + 1):
            for plan in plans(problem, size, replicas):
                if fits(plan, problem):
                    step = counted_step(plan, problem)
                    best = step if best is None else min(best, step)
    return best


def plans(problem: ParallelProblem, size: int, replicas: int) -> Iterator[Plan]:
    choices = []
    for pool in problem.pools:
        degrees = [
            t.tensor_parallel_size
            for t in pool.times
            if t.microbatch_size == size and pool.devices_per_server >= t.tensor_parallel_size
        ]
        choices += [(pool.device_type, degree) for degree in degrees]
    groups: list[tuple[tuple[tuple[str, int], int], ...]] = [((one, replicas),) for one in choices]
    for one, other in product(choices, repeat=2):
        if one[0] < other[0] and (one[1] == other[1] or problem.shard is None):
            groups += [((one, count), (other, replicas - count)) for count in range(1, replicas)]
    rounds = -(-problem.global_batch_size // (size * replicas))
    if size > problem.global_batch_size:
        return
    if problem.shard == "all" and -(-problem.global_batch_size // size) % replicas:
        return
    for cuts in compositions(len(problem.layers)):
        if len(cuts) > (problem.most_stages or len(cuts)):
            continue
        if len(cuts) * replicas > sum(pool.num_devices for pool in problem.pools):
            continue
        for chosen in product(product(groups, problem.recompute), repeat=len(cuts)):
            used: dict[str, int] = {}
            for dealt, _ in chosen:
                for (name, degree), count in dealt:
                    used[name] = used.get(name, 0) + degree * count
            if any(used.get(p.device_type, 0) > p.num_devices for p in problem.pools):
                continue
            if not all(has_places([dealt for dealt, _ in chosen], pool) for pool in problem.pools):
                continue
            yield shared(built(problem, size, rounds, cuts, chosen), problem)


def has_places(stages: list[tuple[tuple[tuple[str, int], int], ...]], pool: ParallelPool) -> bool:
    """Whether servers hold groups, and stages counted inside one: each placing is tried."""
    sets: list[int] = []
    for dealt in stages:
        for (name, degree), count in dealt:
            if name == pool.device_type:
                is_near = pool.inside is not None and len(dealt) == 1
                is_one = is_near and pool.devices_per_server % (degree * count) == 0
                sets += [degree * count] if is_one else [degree] * count
    full, rest = divmod(pool.num_devices, pool.devices_per_server)

    def placed(left: list[int], room: tuple[int, ...]) -> bool:
        return not left or any(
            placed(left[1:], (*room[:n], free - left[0], *room[n + 1 :]))
            for n, free in enumerate(room)
            if free >= left[0]
        )

    return placed(sets, (pool.devices_per_server,) * full + (rest,) * (rest > 0))


def built(problem, size, rounds, cuts, chosen) -> Plan:  # type: ignore[no-untyped-def]
    stages, start = [], 0
    for length, (dealt, recompute) in zip(cuts, chosen, strict=True):
        shares = shares_of(
            problem.global_batch_size, tuple(count for _, count in dealt), rounds * size
        )
        stages.append(
            Stage(
                layers=problem.layers[start : start + length],
                recompute=recompute,
                replicas=tuple(
                    replica_group(
                        device_type=name,
                        tensor_parallel_size=degree,
                        num_replicas=count,
                        samples=share,
                    )
                    for ((name, degree), count), share in zip(dealt, shares, strict=True)
                ),
            )
        )
        start += length
    return parallel_plan_of(
        model=problem.model,
        global_batch_size=problem.global_batch_size,
        microbatch_size=size,
        num_microbatches=rounds,
        schedule="1f1b",
        num_model_chunks=1,
        stages=tuple(stages),
        shard_optimizer=problem.shard in ("optimizer", "gradients") or None,
        shard_gradients=problem.shard == "gradients" or None,
        predicted=NOTHING,
        proof=UNPROVED,
    )


def shared(plan: Plan, problem: ParallelProblem) -> Plan:
    """The plan with unlike shares in stages of two types that equal ones do not fit.

    The type with less memory keeps what it has room for, byte by byte, and the other the rest.
    """
    room = {pool.device_type: pool.memory_bytes or 1 << 40 for pool in problem.pools}

    def is_too_much(plan: Plan, number: int) -> list[bool]:
        counted = counted_memory(plan, problem, number)
        groups = plan.stages[number].replicas
        return [
            held > room[group.device_type] * (1 + 1e-9)
            for group, held in zip(groups, counted, strict=True)
        ]

    def given(number: int, small: int, share: int) -> Plan:
        stage, groups = plan.stages[number], list(plan.stages[number].replicas)
        whole = weights_of(stage, problem)
        rest = -(-(whole - groups[small].num_replicas * share) // groups[1 - small].num_replicas)
        for place, own in ((small, share), (1 - small, max(rest, 0))):
            groups[place] = replace(groups[place], state_share_bytes=own)
        stages = list(plan.stages)
        stages[number] = replace(stage, replicas=tuple(groups))
        return replace(plan, stages=tuple(stages))

    for number, stage in enumerate(plan.stages):
        if problem.shard == "all" and stage.num_replicas > 1:
            equal = -(-weights_of(stage, problem) // stage.num_replicas)
            groups = tuple(replace(group, state_share_bytes=equal) for group in stage.replicas)
            stages = list(plan.stages)
            stages[number] = replace(stage, shard="all", replicas=groups)
            plan = replace(plan, stages=stages)
    for number, stage in enumerate(plan.stages):
        types = [group.device_type for group in stage.replicas]
        if problem.shard is None or len(types) < 2 or room[types[0]] == room[types[1]]:
            continue
        small = types.index(min(types, key=room.__getitem__))
        if is_too_much(plan, number)[small]:
            fitting = [
                share
                for share in range(25)  # the most weights of a problem are 24 bytes
                if not is_too_much(given(number, small, share), number)[small]
            ]
            plan = given(number, small, max(fitting)) if fitting else plan
    return plan


def weights_of(stage: Stage, problem: ParallelProblem) -> int:
    sizes = problem.sizes_of(stage.replicas[0].tensor_parallel_size)
    assert sizes is not None
    return sum(sizes.weight_bytes[problem.layers.index(name)] for name in stage.layers)


def fits(plan: Plan, problem: ParallelProblem) -> bool:
    room = {pool.device_type: pool.memory_bytes for pool in problem.pools}
    return all(
        needed <= (room[group.device_type] or float("inf")) * (1 + 1e-9)
        for number, stage in enumerate(plan.stages)
        for group, needed in zip(stage.replicas, counted_memory(plan, problem, number), strict=True)
    )


RECOMPUTE: tuple[tuple[Recompute, ...], ...] = (
    ("none",), ("none", "full"), ("none", "selective"), ("none", "selective", "full"),
)  # fmt: skip
SECONDS = st.integers(0, 20).map(lambda value: value / 16)


@st.composite
def problems(draw: st.DrawFn) -> ParallelProblem:
    num_layers = draw(st.integers(1, 3))
    degrees = draw(st.sampled_from([(1,), (1, 2)]))
    sizes = draw(st.sampled_from([(1,), (1, 2)]))
    recompute = draw(st.sampled_from(RECOMPUTE))
    has_cores = "selective" in recompute
    knows_workspaces, is_tied = draw(st.booleans()), num_layers > 1 and draw(st.booleans())

    def row(values: st.SearchStrategy) -> tuple:  # type: ignore[type-arg]
        return tuple(draw(values) for _ in range(num_layers))

    def timed(degrees: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, int]]:
        """The tables of a type: all, or some (large microbatches may need a higher degree)."""
        every = list(product(degrees, sizes))
        return draw(st.just(every) | st.lists(st.sampled_from(every), min_size=1, unique=True))

    pools = tuple(
        ParallelPool(
            device_type=name,
            num_devices=draw(st.integers(1, 4 - 2 * number)),
            devices_per_server=draw(st.sampled_from([2, 3, 4])),
            inside=draw(
                st.sampled_from([None, LinkCurve(coefficients=(64.0,), latency_seconds=0.015625)])
            ),
            memory_bytes=draw(st.sampled_from([None, 40, 60, 100])),
            times=tuple(
                ShardTimes(
                    tensor_parallel_size=degree,
                    microbatch_size=size,
                    forward_seconds=row(SECONDS.map(lambda value: value + 1 / 16)),
                    backward_seconds=row(SECONDS),
                    update_seconds=row(SECONDS),
                    core_seconds=row(SECONDS) if has_cores else (),
                    workspace_bytes=row(st.integers(0, 16)) if knows_workspaces else (),
                )
                for degree, size in timed(degrees, sizes)
            ),
            links=tuple(
                DegreeLink(
                    tensor_parallel_size=degree,
                    curve=LinkCurve(
                        coefficients=(draw(st.sampled_from([8.0, 32.0])),), latency_seconds=0.125
                    ),
                )
                for degree in degrees
            ),
        )
        for number, name in enumerate(("A", "B")[: draw(st.integers(1, 2))])
    )
    shards = st.sampled_from([(None,), (None,), ("optimizer",), ("gradients",)])
    cost_rule: CostRule = draw(st.sampled_from(["hetflow", "sailor"]))
    return ParallelProblem(
        model="m",
        global_batch_size=draw(st.integers(1, 9)),
        layers=tuple(f"l{i}" for i in range(num_layers)),
        output_bytes=row(st.integers(0, 8)),
        pools=pools,
        sizes=tuple(
            ShardSizes(
                tensor_parallel_size=degree,
                weight_bytes=row(st.integers(0, 8)),
                stashed_bytes=row(st.integers(0, 12).map(float)),
                selective_bytes=row(st.integers(0, 8).map(float)) if has_cores else (),
                core_bytes=row(st.integers(0, 8).map(float)) if has_cores else (),
                tied_bytes=row(st.integers(0, 4)) if is_tied else (),
            )
            for degree in degrees
        ),
        reserved_bytes=4,
        bucket_bytes=draw(st.sampled_from([None, 5])),
        recompute=recompute,
        cost_rule=cost_rule,
        boundary_rule=draw(st.sampled_from(["scattered", "whole", "blocking"])),
        optimizer=replace(ADAM, workspace_bytes_per_weight_byte=draw(st.sampled_from([None, 3.0]))),
        shards=draw(shards),
        tied_to=((),) * (num_layers - 1) + ((0,),) if is_tied else (),
        waiting_bytes=draw(st.sampled_from([0, 6])),
        most_stages=draw(st.sampled_from([None, None, 2])),
        between=tuple(
            TypesLink(
                device_types=("A", "B"),
                curve=LinkCurve(coefficients=(rate,), latency_seconds=0.125),
            )
            for rate in draw(st.sampled_from([(), (2.0,)]))
            if len(pools) > 1 and cost_rule == "hetflow"
        ),
    )


def two_types() -> ParallelProblem:
    def pool(name: str, slowness: float) -> ParallelPool:
        times = tuple(
            ShardTimes(
                tensor_parallel_size=degree,
                microbatch_size=1,
                forward_seconds=(slowness / degree,) * 4,
                backward_seconds=(2 * slowness / degree,) * 4,
                update_seconds=(0.1,) * 4,
            )
            for degree in (1, 2)
        )
        links = tuple(
            DegreeLink(tensor_parallel_size=d, curve=LinkCurve(coefficients=(1e9,))) for d in (1, 2)
        )
        return ParallelPool(
            device_type=name, num_devices=4, devices_per_server=4, times=times, links=links
        )

    return ParallelProblem(
        model="m",
        global_batch_size=16,
        layers=("a", "b", "c", "d"),
        output_bytes=(1000,) * 4,
        pools=(pool("fast", 1.0), pool("slow", 2.0)),
        sizes=tuple(
            ShardSizes(
                tensor_parallel_size=d, weight_bytes=(1 << 20,) * 4, stashed_bytes=(1e6,) * 4
            )
            for d in (1, 2)
        ),
    )

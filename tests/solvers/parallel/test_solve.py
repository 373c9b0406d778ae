"""The planner of three dimensions against every plan of small problems, counted by the checker."""

import gc
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetflow.planning.checks.parallel import check
from hetflow.planning.checks.parallel_bound import is_proved
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.options import Shard
from hetflow.schema.parallel import (
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    ShardSizes,
    ShardTimes,
)
from hetflow.schema.plan import ParallelCertificate, Plan
from hetflow.solvers.parallel import labels
from hetflow.solvers.parallel.counts import UndecidedError, deal
from hetflow.solvers.parallel.solve import missing_bytes, smallest_pools, solve
from hetflow.solvers.parallel.space import StageOption, microbatch_sizes
from hetflow.tests.profiles import examples
from hetflow.tests.solvers.parallel.every_plan import ADAM, fastest, problems, two_types


def as_fast_as_any(problem: ParallelProblem) -> tuple[Plan, float] | None:
    """The solver's plan and the least step of all plans, which it has; None if there are none."""
    expected = fastest(problem)
    if expected is None:
        with pytest.raises((InfeasibleError, ProblemError)):
            solve(problem)
        return None
    plan = solve(problem)
    assert plan.predicted.step_seconds == pytest.approx(expected, rel=1e-9)
    return plan, expected


@settings(max_examples=examples(60))
@given(problems())
def test_no_plan_of_the_space_is_faster(problem: ParallelProblem) -> None:
    found = as_fast_as_any(problem)
    if found is not None:
        plan, _ = found
        assert check(plan, problem) == []
        assert plan.proof.termination == "optimal"


def test_as_many_microbatches_on_more_replicas_may_reduce_inside_a_server() -> None:
    """Batch 9: three replicas and four run 3 microbatches each; only four fill a server of 4."""
    problem = two_types()
    sizes = replace(problem.sizes[0], weight_bytes=(1 << 20,), stashed_bytes=(1e6,))
    times = replace(
        problem.pools[0].times[0],
        forward_seconds=(1.0,),
        backward_seconds=(2.0,),
        update_seconds=(0.1,),
    )
    slow = DegreeLink(tensor_parallel_size=1, curve=LinkCurve(coefficients=(1e6,)))
    pool = replace(problem.pools[0], times=(times,), links=(slow,))
    problem = replace(
        problem,
        global_batch_size=9,
        layers=("a",),
        output_bytes=(0,),
        sizes=(sizes,),
        pools=(pool,),
    )
    assert solve(problem).stages[0].num_replicas == 3
    near = replace(problem, pools=(replace(pool, inside=LinkCurve(coefficients=(1e9,))),))
    plan = solve(near)
    assert plan.stages[0].num_replicas == 4
    assert plan.predicted.step_seconds == pytest.approx(fastest(near), rel=1e-9)


def test_replicas_that_share_the_state_need_less_memory() -> None:
    """Of 4 layers each device holds weights and gradients (2 a byte) and the state (2 a byte)."""
    problem = replace(two_types(), optimizer=ADAM, recompute=("none",), most_stages=1)
    (pool, _), mib = problem.pools, 1 << 20
    pool = replace(pool, times=pool.times[:1])  # degree 1
    # Two share 8 MiB of state, by layers of 2 MiB: 5 MiB at most on one; a sample keeps 4e6 bytes.
    room = 8 * mib + 5 * mib + 4_000_000
    problem = replace(problem, pools=(replace(pool, num_devices=2, memory_bytes=room),))
    with pytest.raises(InfeasibleError, match="every device lacks") as refused:
        solve(problem)
    assert 'shard="auto"' in (refused.value.hint or "")
    sharded = replace(problem, shards=("optimizer",))
    plan = solve(sharded)
    assert check(plan, sharded) == []
    assert plan.shard_optimizer
    assert plan.stages[0].num_replicas == 2
    assert [stage.memory_bytes for stage in plan.stages] == [room]
    half = 2 * mib / 1e9  # seconds of a message of half of the parameters
    assert plan.stages[0].reduce_seconds == pytest.approx(2 * half)
    assert plan.stages[0].update_seconds == pytest.approx(0.4 / 2 + half)
    assert "the problem has them share nothing" in check(plan, problem)[0]
    both = replace(sharded, shards=("gradients",))
    plan = solve(both)
    assert check(plan, both).bound == "replayed"
    assert plan.stages[0].memory_bytes == room  # all gradients are there at the last microbatch
    assert plan.stages[0].reduce_seconds == pytest.approx(half)
    assert plan.stages[0].update_seconds == pytest.approx(0.4 / 2 + half)
    assert "replicas share optimizer" in check(replace(plan, shard_gradients=None), both)[0]
    less = replace(sharded, pools=(replace(sharded.pools[0], memory_bytes=room - 1),))
    with pytest.raises(InfeasibleError):
        solve(less)


def is_exact_and_judged_so(problem: ParallelProblem) -> None:
    """The plan is as fast as any, its proof replays, and no judge proves more."""
    found = as_fast_as_any(problem)
    if found is None:
        return
    plan, expected = found
    verdict = check(plan, problem)
    assert verdict == []
    assert verdict.bound == ("replayed" if problem.hides_messages else "stated")
    priced = plan.proof.certificate
    assert isinstance(priced, ParallelCertificate)
    assert not is_proved(problem, expected * (1 + 1e-6), priced.priced)


@st.composite
def of_unlike_memory(draw: st.DrawFn) -> ParallelProblem:
    """Two types of few devices, whose replicas share the optimizer's state."""
    problem = draw(problems().filter(lambda problem: len(problem.pools) == 2))
    memory = draw(st.sampled_from([(30, 60), (25, 100), (40, 20), (50, 16)]))
    pools = tuple(
        replace(pool, num_devices=draw(st.integers(1, 3)), memory_bytes=room)
        for pool, room in zip(problem.pools, memory, strict=True)
    )
    return replace(
        problem, pools=pools, shards=(draw(st.sampled_from(["optimizer", "gradients"])),)
    )


@settings(max_examples=examples(40))
@given(of_unlike_memory())
def test_unlike_replicas_share_the_state_by_memory(problem: ParallelProblem) -> None:
    """Exact, and no judge proves more: every dealing of replicas, and share byte by byte."""
    is_exact_and_judged_so(problem)


@st.composite
def that_share_weights(draw: st.DrawFn) -> ParallelProblem:
    """Of few bytes of memory, with some layers in the same repeated one; also of unlike memory."""
    problem = draw(problems().filter(lambda problem: problem.cost_rule == "hetflow"))
    kinds = st.sampled_from(["{}", "h.0.{}", "h.1.{}", "h.2.{}"])
    memory = draw(st.sampled_from([(30, 60), (25, 60), (40, 20), (50, 26), (24, 24), (35, 35)]))
    quick = LinkCurve(coefficients=(256.0,), latency_seconds=draw(st.sampled_from([0.0, 0.03125])))
    pools = tuple(
        replace(
            pool,
            num_devices=draw(st.integers(2, 4 - n)),
            memory_bytes=room,
            links=tuple(replace(link, curve=quick) for link in pool.links),
        )
        for n, (pool, room) in enumerate(zip(problem.pools, memory, strict=False))
    )
    shards = draw(st.sampled_from([("all",), (None, "gradients", "all")]))
    batch = draw(st.integers(2, 9))
    names = tuple(draw(kinds).format(name) for name in problem.layers)
    stashed = draw(st.sampled_from([0.0, 1.0]))
    sizes = tuple(
        replace(each, stashed_bytes=tuple(stashed * size for size in each.stashed_bytes))
        for each in problem.sizes
    )
    return replace(
        problem, layers=names, pools=pools, shards=shards, sizes=sizes, global_batch_size=batch
    )


@settings(max_examples=examples(40))
@given(that_share_weights())
def test_replicas_share_weights_where_it_is_fastest(problem: ParallelProblem) -> None:
    """Exact, and no judge proves more, for one way to share and for several to choose from."""
    is_exact_and_judged_so(problem)


def test_a_stage_holds_most_at_one_of_its_layers_or_in_an_update() -> None:
    """One device: layers free what they kept, and each takes its own workspace."""
    problem, mb = two_types(), 10**6
    pool = replace(problem.pools[0], num_devices=1)
    weights = problem.sizes[0].weight_bytes
    for layers_take, ratio, most in (
        ((0, 6 * mb, 0, 0), 0.0, 2 * mb + 6 * mb),  # the last two layers went back before
        ((0, 0, 0, 3 * mb), 0.0, 4 * mb + 3 * mb),
        ((0, 0, 0, 3 * mb), 2.0, 2 * sum(weights)),  # no activations are there then
    ):
        times = replace(pool.times[0], workspace_bytes=layers_take)
        asked = replace(
            problem,
            pools=(replace(pool, times=(times,)),),
            optimizer=replace(ADAM, workspace_bytes_per_weight_byte=ratio),
        )
        plan = solve(asked)
        assert check(plan, asked) == []
        assert plan.stages[0].memory_bytes == 4 * sum(weights) + most


def test_first_gradients_wait_where_there_are_other_replicas() -> None:
    problem = two_types()
    timed = replace(problem.pools[0].times[0], workspace_bytes=(4 * 10**6, 0, 0, 0))
    pool = replace(problem.pools[0], times=(timed,))
    held = {}
    for waiting in (0, 1 << 19):
        asked = replace(problem, pools=(pool,), waiting_bytes=waiting, most_stages=1)
        plan = solve(asked)
        assert check(plan, asked) == []
        assert plan.stages[0].num_replicas == 4
        held[waiting] = plan.stages[0].memory_bytes or 0
    assert held[1 << 19] == held[0] + (1 << 19)


def test_what_is_missing_counts_as_many_replicas_as_share_weights() -> None:
    """A layer of 1 MiB takes 4 with its states alone; 4/d and 2 where d replicas share all."""
    problem = replace(two_types(), optimizer=ADAM, recompute=("none",), shards=("all",))
    (pool, _), (sizes, _), mib = problem.pools, problem.sizes, 1 << 20
    pool = replace(pool, times=pool.times[:1], num_devices=12, memory_bytes=3 * mib)
    sizes = replace(sizes, stashed_bytes=(0.0,) * 4)
    problem = replace(problem, sizes=(sizes,), pools=(pool,))
    with pytest.raises(InfeasibleError, match="every device lacks") as refused:
        solve(problem)
    assert "take 16 fast (the fewest that do)" in (refused.value.hint or "")
    enough = replace(problem, pools=(replace(pool, num_devices=16),))
    plan = solve(enough)
    assert check(plan, enough).bound == "replayed"
    assert [stage.num_replicas for stage in plan.stages] == [4] * 4
    less = replace(pool, memory_bytes=2 * mib + mib // 8)  # sixteen replicas, one for each sample
    with pytest.raises(InfeasibleError, match=f"alone needs {mib // 8:,} bytes more than any"):
        solve(replace(problem, pools=(less,)))


def test_a_small_device_beside_a_large_one_keeps_less_of_the_state() -> None:
    """Of 4 layers each device holds weights and gradients (8 MiB) and what a sample keeps."""
    problem = replace(two_types(), optimizer=ADAM, shards=("optimizer",), most_stages=1)
    mib, (fast, slow) = 1 << 20, problem.pools
    rooms = (8 + 8, 8 + 2.5)  # beside that: all of the state; 1 MiB and 3/4 of a layer's 2
    pools = tuple(
        replace(pool, num_devices=1, times=pool.times[:1], memory_bytes=int(room * mib) + 4_000_000)
        for pool, room in zip((fast, slow), rooms, strict=True)
    )
    problem = replace(problem, pools=pools)
    plan = solve(problem)
    assert check(plan, problem).bound == "replayed"
    assert not is_proved(problem, plan.predicted.step_seconds * (1 + 1e-6), ())
    shares = {group.device_type: group for group in plan.stages[0].replicas}
    assert shares["slow"].memory_bytes == pools[1].memory_bytes
    assert shares["slow"].state_share_bytes == int(0.75 * mib)  # of 4 MiB of weights, 2 bytes each
    assert shares["fast"].state_share_bytes == int(3.25 * mib)
    half = 2 * mib / 1e9
    assert plan.stages[0].update_seconds == pytest.approx(0.4 * 3.25 / 4 + half)
    too_little = tuple(
        replace(group, state_share_bytes=(group.state_share_bytes or 0) - 1)
        for group in plan.stages[0].replicas
    )
    stage = replace(plan.stages[0], replicas=too_little)
    assert "the shares hold the states of" in check(replace(plan, stages=(stage,)), problem)[0]
    smaller = replace(pools[1], memory_bytes=8 * mib + 4_000_000 - 1)  # not even without state
    alone = solve(replace(problem, pools=(pools[0], smaller)))
    assert alone.num_devices == 1


def test_more_devices_never_hurt_and_faster_ones_scale() -> None:
    problem = two_types()
    step = solve(problem).predicted.step_seconds
    more = tuple(replace(pool, num_devices=pool.num_devices + 2) for pool in problem.pools)
    assert solve(replace(problem, pools=more)).predicted.step_seconds <= step
    assert solve(problem) == solve(problem)


def test_unlike_types_share_by_layers_or_degree() -> None:
    plan = solve(two_types())
    used = {group.device_type for stage in plan.stages for group in stage.replicas}
    assert used == {"fast", "slow"}
    # 4 fast and 4 slow are worth 6 fast ones: 16 samples of 4 layers x 3 s take 32 s on those.
    assert 32 < plan.predicted.step_seconds < 48


def test_a_model_too_big_says_so() -> None:
    problem = two_types()
    small = tuple(replace(pool, memory_bytes=1 << 20) for pool in problem.pools)
    # Weights, gradients and state, and what a sample keeps, on the only MiB.
    missing = 4 * (1 << 20) + 1_000_000 - (1 << 20)
    with pytest.raises(InfeasibleError, match=f"needs {missing:,} bytes more than any device"):
        solve(replace(problem, pools=small))
    times = tuple(replace(t, microbatch_size=32) for t in problem.pools[0].times)
    large = replace(problem, pools=(replace(problem.pools[0], times=times),))
    with pytest.raises(ProblemError, match="no microbatch size"):
        solve(large)


def test_many_equal_layers_are_split_equally() -> None:
    """32 layers on 64 devices: descents alone found 11 unequal stages, twice as slow as 8 equal."""
    times = tuple(
        ShardTimes(
            tensor_parallel_size=degree,
            microbatch_size=size,
            forward_seconds=((0.12 / degree + 0.001) * size,) * 32,
            backward_seconds=((0.24 / degree + 0.001) * size,) * 32,
            update_seconds=(0.05 / degree,) * 32,
        )
        for degree in (1, 2, 4, 8)
        for size in (1, 2, 4, 8)
    )
    pool = ParallelPool(
        device_type="A",
        num_devices=64,
        devices_per_server=8,
        memory_bytes=80_000,
        times=times,
        links=tuple(
            DegreeLink(tensor_parallel_size=d, curve=LinkCurve(coefficients=(20_000.0 * d,)))
            for d in (1, 2, 4, 8)
        ),
    )
    problem = ParallelProblem(
        model="m",
        global_batch_size=128,
        layers=tuple(f"l{i}" for i in range(32)),
        output_bytes=(84,) * 32,
        pools=(pool,),
        sizes=tuple(
            ShardSizes(
                tensor_parallel_size=d,
                weight_bytes=(10_066 // d,) * 32,
                stashed_bytes=(420 + 3_690 / d,) * 32,
            )
            for d in (1, 2, 4, 8)
        ),
        bytes_per_weight_byte=9.0,
        recompute=("none", "full"),
    )
    plan = solve(problem)
    assert check(plan, problem) == []
    # 8 stages of 4 layers on groups of 8: 128 + 7 microbatches, with the messages of two ends.
    layer = 0.36 / 8 + 0.002
    slowest, message = 4 * layer, 84 / 160_000
    equal = 127 * (slowest + 2 * message) + 8 * slowest + 14 * message + 4 * 0.05 / 8
    assert plan.predicted.step_seconds <= equal * (1 + 1e-9)


@settings(max_examples=examples(60))
@given(problems())
def test_what_a_pool_lacks(problem: ParallelProblem) -> None:
    """The fewest devices of a type are the fewest that ``solve`` finds a plan for."""
    pool = replace(problem.pools[0], devices_per_server=1)
    degree_1 = tuple(t for t in pool.times if t.tensor_parallel_size == 1)
    alone = replace(problem, pools=(replace(pool, times=degree_1),))
    fewest = smallest_pools(alone).get(pool.device_type)

    def is_enough(number: int, more_bytes: int = 0) -> bool:
        memory = None if pool.memory_bytes is None else pool.memory_bytes + more_bytes
        pools = (replace(alone.pools[0], num_devices=number, memory_bytes=memory),)
        try:
            solve(replace(alone, pools=pools))
        except InfeasibleError:
            return False
        return True

    if not microbatch_sizes(alone):
        return
    most = 3 * problem.global_batch_size
    assert fewest == next((n for n in range(1, most + 1) if is_enough(n)), None)
    if not is_enough(1):
        missing = missing_bytes(replace(alone, pools=(replace(alone.pools[0], num_devices=1),)))
        assert missing is not None
        assert is_enough(1, missing)
        assert not is_enough(1, missing - 1)


@settings(max_examples=examples(60))
@given(
    problems(),
    st.sampled_from(
        [(None,), ("optimizer",), ("gradients",), ("all",), (None, "optimizer", "gradients", "all")]
    ),
)
def test_with_the_bytes_that_devices_lack_a_plan_fits_and_with_one_less_none(
    problem: ParallelProblem, shards: tuple[Shard | None, ...]
) -> None:
    """Where no plan fits a quarter of the memory, by ``solve``, which equals enumeration."""
    assume(microbatch_sizes(problem))
    asked = replace(problem, cost_rule="hetflow", shards=shards)

    def with_more(more_bytes: int) -> ParallelProblem:
        pools = tuple(
            pool
            if pool.memory_bytes is None
            else replace(pool, memory_bytes=pool.memory_bytes // 4 + more_bytes)
            for pool in asked.pools
        )
        return replace(asked, pools=pools)

    def fits(more_bytes: int) -> bool:
        try:
            solve(with_more(more_bytes))
        except InfeasibleError:
            return False
        return True

    if fits(0):
        return
    missing = missing_bytes(with_more(0))
    if missing is None:
        assert not fits(1 << 50)
    else:
        assert fits(missing)
        assert not fits(missing - 1)


def test_dealing_takes_what_the_pool_has() -> None:
    # Two mixed stages of 3 replicas: 3 devices of the first type in all, 2 a replica of the other.
    stages = [((0, 1), (1, 2)), ((0, 1), (1, 2))]
    assert deal(stages, 3, [3, 6]) in (((1, 2), (2, 1)), ((2, 1), (1, 2)))
    assert deal(stages, 3, [3, 5]) is None
    # One of them with shares by memory has as many of each type as its memory wants.
    assert deal(stages, 3, [3, 6], [1, 0]) == ((1, 2), (2, 1))
    assert deal(stages, 3, [3, 6], [1, 1]) is None


def test_two_types_in_a_line_are_found() -> None:
    """26 unlike layers on 8 fast and 8 slow devices: descents alone left a gap of 13 %."""
    drawn = random.Random(1)
    work = [drawn.choice([1.0, 1.0, 0.2, 2.5]) for _ in range(26)]

    def pool(name: str, slowness: float, memory: int) -> ParallelPool:
        times = [
            (degree, size, slowness * (0.8 * size + 0.2) * (0.9 + 0.1 * degree) / degree / 1e3)
            for degree in (1, 2, 4)
            for size in (1, 2, 4)
        ]
        return ParallelPool(
            device_type=name,
            num_devices=8,
            devices_per_server=4,
            memory_bytes=memory << 30,
            times=tuple(
                ShardTimes(
                    tensor_parallel_size=degree,
                    microbatch_size=size,
                    forward_seconds=tuple(w * factor for w in work),
                    backward_seconds=tuple(2 * w * factor for w in work),
                    update_seconds=tuple(1e-4 * w / degree for w in work),
                )
                for degree, size, factor in times
            ),
            links=tuple(
                DegreeLink(tensor_parallel_size=d, curve=LinkCurve(coefficients=(6e9,)))
                for d in (1, 2, 4)
            ),
        )

    problem = ParallelProblem(
        model="m",
        global_batch_size=256,
        layers=tuple(f"l{i}" for i in range(26)),
        output_bytes=(16 << 20,) * 26,
        pools=(pool("fast", 1.0, 40), pool("slow", 2.7, 16)),
        sizes=tuple(
            ShardSizes(
                tensor_parallel_size=d,
                weight_bytes=tuple(int((60 << 20) * w / d) for w in work),
                stashed_bytes=tuple((30 << 20) * w / d for w in work),
            )
            for d in (1, 2, 4)
        ),
        recompute=("none", "full"),
    )
    plan = solve(problem)
    assert check(plan, problem) == []
    assert {group.device_type for stage in plan.stages for group in stage.replicas} == {
        "fast", "slow",
    }  # fmt: skip
    assert plan.proof.termination == "optimal"


@settings(max_examples=examples(60))
@given(problems())
def test_a_search_ends_where_no_dealing_is_certain(problem: ParallelProblem) -> None:
    """Plans whose replicas may have places or not stay open, and are not looked at again."""

    def undecided(*_: object) -> None:
        raise UndecidedError

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(labels, "deal_to_places", undecided)
        try:
            found = solve(problem)
        except (InfeasibleError, ProblemError):
            return
    assert found.proof.lower_bound is not None
    best = fastest(problem)
    assert best is not None
    assert found.proof.lower_bound <= best * (1 + 1e-9)


def test_a_solve_keeps_no_table_of_a_stage() -> None:
    """Of 200 layers they took 1.4 GB, and no other solve has the same options."""
    solve(replace(two_types(), shards=("all",), optimizer=ADAM, num_model_chunks=(1, 2)))
    gc.collect()
    assert not any(isinstance(each, StageOption) for each in gc.get_objects())

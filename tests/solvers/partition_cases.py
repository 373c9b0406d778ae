"""Small pipeline problems and every plan there is for them."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from hetflow.formats.importers.pipedream import read_graph, without_placeholders
from hetflow.planning.checks.pipeline import (
    check,
    price_with_boundary,
    seconds_per_input,
    stage_memory,
    timed_stage,
)
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.schema.plan import NestedBlock, Plan, Prediction, Proof, Stage
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.data import reference
from hetflow.tests.plan_parts import pipeline_plan, pipeline_stage


def levels(*pairs: tuple[int, float]) -> tuple[TopologyLevel, ...]:
    return tuple(TopologyLevel(num_components=m, bytes_per_second=b) for m, b in pairs)


def chain(
    times: list[tuple[float, float]],
    sizes: list[tuple[int, int]],
    topology: tuple[TopologyLevel, ...],
    *,
    memory_bytes: int | None = None,
    **options,
) -> PipelineProblem:
    """A chain on one pool; ``sizes`` are (activation, weight) bytes."""
    layers = tuple(
        PipelineLayer(id=f"l{i}", activation_bytes=a, weight_bytes=w)
        for i, (a, w) in enumerate(sizes)
    )
    pool = DevicePool(
        device_type="V100",
        levels=topology,
        forward_seconds=tuple(f for f, _ in times),
        backward_seconds=tuple(b for _, b in times),
        memory_bytes=memory_bytes,
    )
    filled = {
        "model": "m", "microbatch_size": 1, "num_microbatches": 8, "optimizer": SGD, **options,
    }  # fmt: skip
    return PipelineProblem(layers=layers, pools=(pool,), **filled)


Placed = Sequence[tuple[str, int, int] | tuple[str, int, int, tuple[int, ...]]]
"""[stages] device type, first device, replicas; and all its devices where these are no run."""

SGD = OptimizerState(name="sgd", state_bytes_per_weight_byte=0.0)
TIMES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0])
BYTES = st.sampled_from([0, 1, 2, 3, 5, 8, 13])
RATES = st.sampled_from([0.5, 1.0, 2.0, 8.0, 64.0])
OWN = st.sampled_from([0.0, 0.0, 0.25, 1.0, 4.0])
"""What passes, messages and steps cost themselves: nothing, a little, more than layers."""

PASSES = st.sampled_from(
    [
        {},
        {"pass_seconds": 0.25},
        {"pass_seconds": 4.0},
        {"pass_seconds": 4.0, "lone_pass_seconds": 0.0},
        {"pass_seconds": 1.0, "lone_pass_seconds": 0.5},
    ]
)
"""What passes cost beside layers; less in one stage of all layers."""
REDUCTIONS = st.sampled_from(
    [
        {},
        {},
        {"reduce_bytes_per_second": 0.25},
        {"reduce_bytes_per_second": 4.0, "reduce_latency_seconds": 1.0},
    ]
)
"""All-reduces: rings over links, slower than any link, slow to begin."""
FOR_A_WHILE = st.sampled_from(
    [
        {},
        {},
        {"update_bytes_per_weight_byte": 2.0},
        {"waiting_bytes": 4},
        {"copies_messages": True},
        {"update_bytes_per_weight_byte": 1.0, "waiting_bytes": 9, "copies_messages": True},
    ]
)
"""What updates, first gradients and messages take of the memory for a while."""


@st.composite
def flat_problems(draw, *, graphs: bool = True) -> PipelineProblem:
    size = draw(st.integers(1, 5))
    edges = None
    if graphs and size > 2 and draw(st.booleans()):
        edges = [(draw(st.integers(0, layer - 1)), layer) for layer in range(1, size)]
        extra = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))))
        edges = tuple(sorted({*edges, *((a, b) for a, b in extra if a < b)}))
    pools = []
    for name in draw(st.sampled_from([("V100",), ("V100", "P100")])):
        shapes = [(1,), (2,), (3,), (2, 2), (4,)] if len(pools) == 0 else [(1,), (2,)]
        shape = draw(st.sampled_from(shapes))
        pools.append(
            DevicePool(
                device_type=name,
                levels=levels(*((m, draw(RATES)) for m in shape)),
                forward_seconds=tuple(draw(TIMES) for _ in range(size)),
                backward_seconds=tuple(draw(TIMES) for _ in range(size)),
                update_seconds=draw(st.sampled_from([0.0, 0.5])),
                memory_bytes=draw(st.sampled_from([None, 20, 40, 80])),
                workspace_bytes=draw(st.sampled_from([0, 0, 3])),
                fixed_seconds=draw(OWN),
                **draw(PASSES),
                **draw(REDUCTIONS),
                **draw(FOR_A_WHILE),
                layer_workspace_bytes=draw(st.sampled_from([(), (0, 3, 1, 7, 2)[:size]])),
            )
        )
    return PipelineProblem(
        model="m",
        layers=tuple(
            PipelineLayer(
                id=f"l{i}",
                activation_bytes=draw(BYTES),
                weight_bytes=draw(BYTES),
                halved_bytes=i,
                **draw(BESIDE),
                **saved_by(draw(st.integers(0, size)), i, size),
            )
            for i in range(size)
        ),  # fmt: skip
        sample_bytes=draw(st.sampled_from([0, 0, 2])),
        edges=edges,
        pools=tuple(pools),
        inter_bytes_per_second=draw(RATES),
        microbatch_size=2,
        num_microbatches=draw(st.sampled_from([1, 2, 3, 8])),
        optimizer=OptimizerState(
            state_bytes_per_weight_byte=draw(st.sampled_from([0.0, 1.0, 2.5]))
        ),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "pipedream", "2bw"])),
        stage_cost=draw(st.sampled_from(["ring", "thesis"])),
        workers=draw(st.sampled_from(["at_most", "at_most", "exactly"])),
        replication=draw(st.sampled_from([True, True, False])),
        recompute=draw(st.sampled_from([False, True, None])),
        launchable=draw(st.booleans()),
        message_seconds=draw(OWN),
    )


BESIDE = st.sampled_from([{}, {}, {"padding_bytes": 2, "buffer_bytes": 3, "statistics_bytes": 1}])


def saved_by(saver: int, maker: int, size: int) -> dict[str, Any]:
    """An output of which a later layer, if there is such a one, saves 7 bytes first."""
    if not maker < saver < size:
        return {}
    return {"stashed_bytes": 9, "saved_later": ((saver, 7),)}


def partitions(problem: PipelineProblem) -> Iterator[list[tuple[str, ...]]]:
    """Every way to deal the layers into numbered stages with no edge going back.

    Each stage holds a device, so there are no more of them.
    """
    size = len(problem.layers)
    sources = [[s for s, t in problem.links if t == layer] for layer in range(size)]

    def extend(stage_of: list[int], count: int) -> Iterator[list[int]]:
        layer = len(stage_of)
        if layer == size:
            if len(set(stage_of)) == count:
                yield stage_of
            return
        first = max((stage_of[source] for source in sources[layer]), default=0)
        for stage in range(first, count):
            yield from extend([*stage_of, stage], count)

    for count in range(1, min(size, problem.num_devices) + 1):
        for stage_of in extend([], count):
            yield [
                tuple(problem.layers[i].id for i in range(size) if stage_of[i] == stage)
                for stage in range(count)
            ]


def runs(problem: PipelineProblem, count: int) -> Iterator[list[tuple[str, int, int]]]:
    """Every (type, first device, replicas) for each stage; runs may leave any devices idle."""

    def extend(done: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
        if len(done) == count:
            yield done
            return
        for pool in problem.pools:
            mine = [(first, m) for name, first, m in done if name == pool.device_type]
            free = max((first + m for first, m in mine), default=0)
            for first in range(free, pool.num_devices):
                most = pool.num_devices - first if problem.replication else 1
                for m in range(1, most + 1):
                    yield from extend([*done, (pool.device_type, first, m)])

    yield from extend([])


def any_placements(
    problem: PipelineProblem, count: int
) -> Iterator[list[tuple[str, int, int, tuple[int, ...]]]]:
    """Every choice of devices of one type for each stage, in any order and on any servers.

    Devices of a lowest component are alike, so its first free ones stand for all. So are such
    components of which none is taken, where there are no more than two levels.
    """
    assert all(len(pool.levels) <= 2 for pool in problem.pools)
    widths = {pool.device_type: pool.levels[0].num_components for pool in problem.pools}

    def chosen(
        free: tuple[int, ...], wanted: int, width: int, most: int
    ) -> Iterator[tuple[int, ...]]:
        """How many devices of each component; of whole ones, most of the first."""
        if not free:
            if wanted == 0:
                yield ()
            return
        is_whole = free[0] == width
        for taken in range(min(free[0], wanted, most if is_whole else width) + 1):
            for rest in chosen(free[1:], wanted - taken, width, taken if is_whole else most):
                yield (taken, *rest)

    def extend(
        free: dict[str, tuple[int, ...]], done: list[tuple[str, int, int, tuple[int, ...]]]
    ) -> Iterator[list[tuple[str, int, int, tuple[int, ...]]]]:
        if len(done) == count:
            yield done
            return
        for name, left in free.items():
            most = sum(left) if problem.replication else min(1, sum(left))
            for m in range(1, most + 1):
                width = widths[name]
                for taken in chosen(left, m, width, width):
                    devices = tuple(
                        width * (server + 1) - left[server] + number
                        for server, some in enumerate(taken)
                        for number in range(some)
                    )
                    rest = tuple(one - some for one, some in zip(left, taken, strict=True))
                    stage = (name, devices[0], m, devices)
                    yield from extend({**free, name: rest}, [*done, stage])

    components = {
        pool.device_type: (widths[pool.device_type],)
        * (pool.num_devices // widths[pool.device_type])
        for pool in problem.pools
    }
    yield from extend(components, [])


_stage = lru_cache(maxsize=4096)(pipeline_stage)


def plan_of(
    problem: PipelineProblem,
    stages: list[tuple[str, ...]],
    placed: Placed,
    recompute: bool,
    nesting: list[tuple[NestedBlock, ...]] | None = None,
) -> Plan:
    """A plan with nothing but its stages; the numbers are for the checker to find."""
    return pipeline_plan(
        model=problem.model,
        global_batch_size=problem.global_batch_size,
        microbatch_size=problem.microbatch_size,
        num_microbatches=problem.num_microbatches,
        schedule=problem.schedule,
        recompute=recompute,
        stages=tuple(
            _stage(
                layers=names, num_replicas=m, device_type=kind, first_device=first,
                devices=devices[0] if devices else (),
                num_in_flight=1, weight_versions=1, seconds_per_input=0.0, compute_seconds=0.0,
                output_seconds=0.0, memory_bytes=0, nesting=nesting[i] if nesting else (),
            )
            for i, (names, (kind, first, m, *devices)) in enumerate(
                zip(stages, placed, strict=True)
            )
        ),
        predicted=Prediction(step_seconds=0.0, samples_per_second=0.0),
        proof=Proof(termination="feasible", objective=0.0, lower_bound=None, gap=None, method=""),
        noam=1,
        stage_cost=problem.stage_cost,
        solved=problem.solved,
        objective=problem.minimises,
    )  # fmt: skip


def fits(plan: Plan, problem: PipelineProblem, index: int) -> bool:
    stage = plan.stages[index]
    [pool] = (pool for pool in problem.pools if pool.device_type == stage.device_type)
    if pool.memory_bytes is None:
        return True
    used = stage_memory(plan, problem, index)[1]
    return used + pool.workspace_bytes <= pool.memory_bytes


def replayed_step(plan: Plan, problem: PipelineProblem) -> float:
    """The step of a plan's stages, pass by pass; ``makespan/test_solve`` holds it to the timer's.

    The step's fixed cost included.
    """
    stages = (timed_stage(plan, problem, index) for index in range(len(plan.stages)))
    return replayed(problem, [times_of(stage) for stage in stages]) + fixed_cost(plan, problem)


class Times(NamedTuple):
    """What a replay asks of a stage."""

    num_replicas: int
    forward: float
    backward: float
    one_way: float
    end: float


def times_of(stage: Stage) -> Times:
    end = stage.reduce_seconds if stage.num_replicas > 1 else 0.0
    return Times(
        num_replicas=stage.num_replicas,
        forward=stage.forward_seconds,
        backward=stage.compute_seconds - stage.forward_seconds,
        one_way=stage.output_seconds / 2,
        end=end + stage.update_seconds + (stage.tied_seconds or 0.0),
    )


def replayed(problem: PipelineProblem, stages: Sequence[Times]) -> float:
    """The step of stages, pass by pass, without its fixed cost."""
    left = _passes(problem, [stage.num_replicas for stage in stages])
    ready = {("F", 0, k): 0.0 for k in range(problem.num_microbatches)}
    now, links = dict.fromkeys(left, 0.0), {}
    last = len(stages) - 1
    while any(left.values()):
        for (index, replica), passes in left.items():
            stage = stages[index]
            while (
                passes and (arrived := ready.get((passes[0][0], index, passes[0][1]))) is not None
            ):
                kind, k = passes.pop(0)
                seconds = stage.forward if kind == "F" else stage.backward
                end = now[index, replica] = max(now[index, replica], arrived) + seconds
                if kind == "F" and index == last:
                    ready["B", index, k] = end
                    continue
                other = index + 1 if kind == "F" else index - 1
                if other < 0:
                    continue
                link = (index, replica, other, k % stages[other].num_replicas)
                one_way = stages[min(index, other)].one_way
                links[link] = max(end, links.get(link, 0.0)) + one_way
                ready[kind, other, k] = links[link]
    return max(
        max(now[index, replica] for replica in range(stage.num_replicas)) + stage.end
        for index, stage in enumerate(stages)
    )


def fixed_cost(plan: Plan, problem: PipelineProblem) -> float:
    """Of a step on the device types of a plan: the dearest one's; the papers' prices know none."""
    return _fixed_cost(problem, {stage.device_type for stage in plan.stages})


def _fixed_cost(problem: PipelineProblem, used: set[str]) -> float:
    costs = [pool.fixed_seconds for pool in problem.pools if pool.device_type in used]
    return max(costs) if problem.stage_cost == "ring" else 0.0


def _passes(
    problem: PipelineProblem, replicas: list[int]
) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """(stage, replica) -> forward and backward passes in order, by 1F1B's or GPipe's rule."""
    found = {}
    for index, count in enumerate(replicas):
        warm = -(-sum(replicas[index:]) // count) - 1
        for replica in range(count):
            mine = list(range(replica, problem.num_microbatches, count))
            ahead = len(mine) if problem.schedule == "gpipe" else min(warm, len(mine))
            order = [("F", k) for k in mine[:ahead]]
            for backward, forward in itertools.zip_longest(mine, mine[ahead:]):
                order += [] if forward is None else [("F", forward)]
                order.append(("B", backward))
            found[index, replica] = order
    return found


def launches(problem: PipelineProblem, replicas: tuple[int, ...]) -> bool:
    """Whether the runtime takes stages of so many replicas."""
    return _launches(problem.schedule, problem.num_microbatches, replicas)


@cache
def _launches(schedule: str, num_microbatches: int, replicas: tuple[int, ...]) -> bool:
    topology = levels((sum(replicas), 1.0))
    line = chain(
        [(1.0, 1.0)] * len(replicas),
        [(1, 1)] * len(replicas),
        topology,
        schedule=schedule,
        num_microbatches=num_microbatches,
    )
    names = [(layer.id,) for layer in line.layers]
    placed = [("V100", sum(replicas[:i]), count) for i, count in enumerate(replicas)]
    try:
        lower(plan_of(line, names, placed, recompute=False))
    except ProblemError:
        return False
    return True


def best_flat(problem: PipelineProblem, placements=any_placements) -> float | None:
    """The least objective over every plan, or None where none fits.

    ``placements`` gives the devices of so many stages: any (the default), or ``runs`` in order.
    """
    best = None
    options = (False, True) if problem.recompute is None else (problem.recompute,)
    for stages in partitions(problem):
        if not problem.traits.flushes and splits_tied_weights(problem, stages):
            continue
        if problem.num_stages not in (None, len(stages)):
            continue
        if problem.most_stages is not None and len(stages) > problem.most_stages:
            continue
        judges = [_Counted(problem, stages, recompute) for recompute in options]
        for placed in placements(problem, len(stages)):
            counts = tuple(entry[2] for entry in placed)
            if problem.workers == "exactly" and sum(counts) < problem.num_devices:
                continue
            if problem.most_devices is not None and sum(counts) > problem.most_devices:
                continue
            if problem.launchable and not launches(problem, counts):
                continue
            for judge in judges:
                seconds = judge.seconds(placed)
                if (best is None or seconds < best) and judge.fits(placed):
                    best = seconds
    return best


class _Counted:
    """What the judge counts in all plans of the same layers a stage.

    A stage is asked for once for all plans in which the same devices hold it and its neighbour:
    nothing that it takes depends on others. Its memory does on how many devices follow.
    """

    def __init__(
        self, problem: PipelineProblem, stages: list[tuple[str, ...]], recompute: bool
    ) -> None:
        self.problem, self.stages, self.recompute = problem, stages, recompute
        self.known: dict[Any, Any] = {}

    def _each(self, of: Callable, placed: Placed, keys: list[Any]) -> list[Any]:
        """[stages] what a function says of each, by what it depends on."""
        plan = None
        for index, key in enumerate(keys):
            if (of, index, key) not in self.known:
                plan = plan or plan_of(self.problem, self.stages, placed, self.recompute)
                self.known[of, index, key] = of(plan, self.problem, index)
        return [self.known[of, index, key] for index, key in enumerate(keys)]

    def seconds(self, placed: Placed) -> float:
        numbers = range(len(placed))
        if self.problem.minimises != "step_seconds":
            before = [tuple(placed[max(index - 1, 0) : index + 1]) for index in numbers]
            return max(self._each(price_with_boundary, placed, before))
        behind = [tuple(placed[index : index + 2]) for index in numbers]
        times = tuple(map(times_of, self._each(timed_stage, placed, behind)))
        if times not in self.known:
            self.known[times] = replayed(self.problem, times)
        return self.known[times] + _fixed_cost(self.problem, {kind for kind, *_ in placed})

    def fits(self, placed: Placed) -> bool:
        counts = tuple(entry[2] for entry in placed)
        keys = [(kind, counts[index:]) for index, (kind, *_) in enumerate(placed)]
        return all(self._each(fits, placed, keys))


def splits_tied_weights(problem: PipelineProblem, stages: list[tuple[str, ...]]) -> bool:
    pairs = [(layer.id, other) for layer in problem.layers for other in layer.shared_with]
    return any(len({one, other} & set(names)) == 1 for names in stages for one, other in pairs)


def best_nested(problem: PipelineProblem) -> float | None:
    """The least objective over every nested plan of one or two levels."""
    shape = [level.num_components for level in problem.pools[0].levels]
    exactly = problem.workers == "exactly"
    best = None
    for stages in partitions(problem):
        for nesting in _nestings(len(stages), shape[::-1], exactly, problem.replication):
            totals = [1] * len(stages)
            for index, path in enumerate(nesting):
                for block in path:
                    totals[index] *= block.num_replicas
            placed = [("V100", 0, m) for m in totals]
            seconds = seconds_per_input(plan_of(problem, stages, placed, False, nesting), problem)
            best = seconds if best is None else min(best, seconds)
    return best


def _nestings(
    count: int, shape: list[int], exactly: bool, replication: bool
) -> Iterator[list[tuple[NestedBlock, ...]]]:
    """Group ``count`` stages into blocks of the highest level, and each block below likewise."""
    if not shape:
        if count == 1:
            yield [()]
        return
    components, *below = shape
    for sizes in _compositions(count):
        for replicas in itertools.product(range(1, components + 1), repeat=len(sizes)):
            used = sum(replicas)
            if used > components or (exactly and used < components):
                continue
            if not replication and max(replicas) > 1:
                continue
            inner = [list(_nestings(size, below, exactly, replication)) for size in sizes]
            for chosen in itertools.product(*inner):
                yield [
                    (NestedBlock(index=index, num_replicas=replicas[index]), *path)
                    for index, paths in enumerate(chosen)
                    for path in paths
                ]


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in _compositions(total - first):
            yield (first, *rest)


def published_cases(model: str) -> list[dict]:
    """The stored answers of the released optimizer for a model."""
    path = reference.folder() / "pipedream" / f"pipedream_{model}.json"
    return [case for case in json.loads(path.read_text())["cases"] if case["expected"]]


def published_graph(model: str):
    """A published profile without what the released optimizer drops."""
    path = reference.folder() / "pipedream" / f"{model}.graph.txt"
    return without_placeholders(read_graph(path.read_text()))


def objective(problem: PipelineProblem, method: str = "auto") -> float | None:
    try:
        plan = solve(problem, method=method)
    except InfeasibleError:
        return None
    assert check(plan, problem) == []
    return plan.proof.objective


def same(found: float | None, expected: float | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def enlarged(problem: PipelineProblem, what: str) -> PipelineProblem:
    pool = problem.pools[0]
    first, last = pool.levels[0], pool.levels[-1]
    if what == "bandwidth":
        faster = tuple(
            dataclasses.replace(level, bytes_per_second=level.bytes_per_second * 2)
            for level in pool.levels
        )
        pool = dataclasses.replace(pool, levels=faster)
    elif what == "memory" and pool.memory_bytes is not None:
        pool = dataclasses.replace(pool, memory_bytes=pool.memory_bytes + 15)
    elif what == "devices":
        more = dataclasses.replace(first, num_components=first.num_components + 1)
        pool = dataclasses.replace(pool, levels=(more, *pool.levels[1:]))
    elif what == "servers":
        more = dataclasses.replace(last, num_components=last.num_components + 1)
        pool = dataclasses.replace(pool, levels=(*pool.levels[:-1], more))
    return dataclasses.replace(problem, pools=(pool, *problem.pools[1:]))

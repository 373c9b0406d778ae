"""Judge PipeDream's nested plans: their blocks, and the costs of thesis 2.4.1 level by level.

Nothing is shared with the solver. Everything is recomputed from layers, edges and levels.
"""

from math import prod

from ...planning.checks import definitions
from ...planning.checks.methods import METHOD_JUDGES, MethodJudge, StagePrices
from ...planning.checks.pipeline import crossing_bytes, sums
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan, Stage


def _nesting_faults(plan: Plan, problem: PipelineProblem) -> list[str]:
    depth = len(problem.pools[0].levels)
    found = [
        f"stage {index}: nesting must name {depth} blocks whose replicas multiply to "
        f"{stage.num_replicas}"
        for index, stage in enumerate(plan.stages)
        if len(stage.nesting) != depth
        or prod(block.num_replicas for block in stage.nesting) != stage.num_replicas
    ]
    return found or _block_faults(plan, depth)


def _block_faults(plan: Plan, depth: int) -> list[str]:
    """List blocks of a nested plan that are not numbered from 0 within the block around them."""
    faults = []
    for level in range(depth):
        inside: dict[tuple[int, ...], list[int]] = {}
        for stage in plan.stages:
            around = tuple(block.index for block in stage.nesting[:level])
            own = stage.nesting[level].index
            known = inside.setdefault(around, [])
            if not known or known[-1] != own:
                known.append(own)
        faults += [
            f"nesting: the blocks of level {level} are numbered {numbers}, not from 0 on"
            for numbers in inside.values()
            if numbers != list(range(len(numbers)))
        ]
    return faults


def _nested_price(plan: Plan, problem: PipelineProblem, index: int) -> float:
    """Seconds per input of a stage at its lowest level, shared by the replicas of those above."""
    stage = plan.stages[index]
    compute, weights = sums(plan, problem, [index])
    lowest = stage.nesting[-1].num_replicas
    alone = _block(problem, 0, index, compute, weights, lowest)
    return alone * lowest / stage.num_replicas


def _crossing_bytes(problem: PipelineProblem, before: set[str]) -> float | None:
    """Bytes that cross a cut as the published optimizer counts them; None where edges count.

    The last layers before the cut, and their ancestors that feed a layer beyond one of them.
    """
    if problem.cut_rule != "released" and problem.stage_cost != "published":
        return None
    inside = {i for i, layer in enumerate(problem.layers) if layer.id in before}
    if not inside or len(inside) == len(problem.layers):
        return 0.0
    ancestors: list[set[int]] = [set() for _ in problem.layers]
    for source, target in sorted(problem.links, key=lambda link: link[1]):
        ancestors[target] |= ancestors[source] | {source}
    covered = set().union(*(ancestors[layer] for layer in inside))
    last = inside - covered
    extra = {
        source
        for member in last
        for source, target in problem.links
        if source in ancestors[member] and target not in ancestors[member] and target != member
    }
    return sum(problem.layers[layer].activation_bytes for layer in last | extra)


def _nested_link(problem: PipelineProblem, before: Stage, after: Stage) -> float:
    """Bytes per second at the highest level at which two stages lie in different blocks."""
    levels = problem.pools[0].levels
    depth = next(
        (
            depth
            for depth, (one, other) in enumerate(zip(before.nesting, after.nesting, strict=True))
            if one.index != other.index
        ),
        len(levels) - 1,
    )
    return min(level.bytes_per_second for level in levels[: len(levels) - depth])


def _nested_seconds(plan: Plan, problem: PipelineProblem, stages: list[int], depth: int) -> float:
    """Seconds per input of the slowest block at one level, A(i -> j) of thesis 2.4.1.

    The compute time of each block comes from the level below.
    """
    levels = problem.pools[0].levels
    number = len(levels) - 1 - depth
    blocks: dict[int, list[int]] = {}
    for index in stages:
        blocks.setdefault(plan.stages[index].nesting[depth].index, []).append(index)
    groups = [blocks[key] for key in sorted(blocks)]
    slowest = 0.0
    for order, group in enumerate(groups):
        replicas = plan.stages[group[0]].nesting[depth].num_replicas
        compute, weights = sums(plan, problem, group)
        if number > 0:
            compute = _nested_seconds(plan, problem, group, depth + 1)
        slowest = max(
            slowest,
            _block(problem, number, order, compute, weights, replicas),
            _nested_boundaries(plan, problem, groups, order, replicas, number),
        )
    return slowest


def _block(
    problem: PipelineProblem, number: int, order: int, compute: float, weights: float, replicas: int
) -> float:
    levels = problem.pools[0].levels
    bandwidth = levels[number].bytes_per_second
    if problem.stage_cost == "thesis":
        return definitions.thesis_seconds(compute, weights, replicas, bandwidth)
    if problem.stage_cost == "published":
        below = levels[number - 1].num_components if number and order == 0 else 1
        return _published_seconds(compute, weights, replicas, bandwidth, below)
    below = prod(level.num_components for level in levels[:number])
    ring = definitions.ring_seconds(weights, replicas, bandwidth)
    return max(compute, ring / below) / replicas


def _nested_boundaries(
    plan: Plan,
    problem: PipelineProblem,
    groups: list[list[int]],
    order: int,
    replicas: int,
    number: int,
) -> float:
    """Seconds per input to transfer a block's input; in the published code, its output too."""
    if order == 0 or not problem.count_boundaries:
        return 0.0
    bandwidth = problem.pools[0].levels[number].bytes_per_second
    message = definitions.message_seconds(problem)
    sent = crossing_bytes(plan, problem, groups[order][0])
    into = definitions.boundary_seconds(sent, bandwidth, message)
    if problem.stage_cost != "published":
        return into
    out = groups[order][-1] + 1
    after = crossing_bytes(plan, problem, out) if out < len(plan.stages) else 0.0
    return max(into, definitions.boundary_seconds(after, bandwidth, message)) / replicas


def _published_seconds(
    compute_seconds: float,
    weight_bytes: float,
    num_replicas: int,
    bytes_per_second: float,
    devices_below: int,
) -> float:
    """The stage cost of PipeDream's published code, seconds: (C + 4(m-1) w / (B m) / g) / m."""
    per_link = 4 * (num_replicas - 1) * weight_bytes / (bytes_per_second * num_replicas)
    return (compute_seconds + per_link / devices_below) / num_replicas


def _objective(plan: Plan, problem: PipelineProblem) -> float:
    """Seconds per input of the slowest block at the highest level."""
    return _nested_seconds(plan, problem, list(range(len(plan.stages))), 0)


METHOD_JUDGES.add(
    "pipedream-nested",
    MethodJudge(
        faults=_nesting_faults,
        prices=StagePrices(
            objective=_objective,
            of_stage=_nested_price,
            link=_nested_link,
            crossing_bytes=_crossing_bytes,
        ),
    ),
    __name__,
)

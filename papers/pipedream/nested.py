"""Solve level by level, as thesis 2.4.1 reads; with its costs, the ring's or the published ones.

Level 0 is the layers' compute time. Level k splits a range of cuts into blocks, each on some
components of the level, and takes the level below's best time on one whole component as the
compute time of a block. With the ring's costs every stage also has what its passes cost
themselves, every boundary what its messages do. The dynamic program fills A(i -> j, m) with arrays
over i; where cuts are in one line the parametric search of line.py gives the same
in far less time.
"""

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from ...planning.costs.pipeline import (
    boundary_seconds,
    num_in_flight,
    overheads,
    slowest_links,
    stage_bytes,
    weight_versions,
    worker_bytes,
)
from ...schema.errors import BackendError, InfeasibleError
from ...schema.options import option
from ...schema.pipeline import PipelineProblem
from ...schema.plan import NestedBlock, Plan, Stage
from ...solvers.effort import DEFAULT, Effort
from ...solvers.methods import METHODS
from ...solvers.pipeline.assemble import finish, stage_on
from ...solvers.pipeline.cuts import Floats, cuts_of, layers_of
from . import line
from .states import Block, Nested, Ranges, States, inclusion_states, published_states

_CLOSE = 1 + 1e-12


def solve(problem: PipelineProblem, *, method: str = "auto", effort: Effort = DEFAULT) -> Plan:
    """Minimise the slowest block over nested levels, in seconds per input.

    Exact for the recurrence, with exactly or at most the components of each level: its plans are
    blocks inside blocks, so ``optimal`` is said of those alone. A graph of more than 2,000 cuts
    is cut in its own order only, and the plan claims no bound.

    Raises:
        InfeasibleError: No partition uses what is asked, or passes the published memory test.
    """
    if problem.stage_cost == "published" or problem.cut_rule == "released":
        return _by_tables(problem, published_states(problem), effort)
    cuts = cuts_of(problem, lazy_sources=True)
    if method == "line" or (method == "auto" and line.applies(problem, cuts)):
        answer = line.search(problem, cuts)
        plan = _plan(problem, answer.ranges, answer.nested, answer.seconds, "parametric search")
        return plan if cuts.complete else _of_own_order(plan)
    plan = _by_tables(problem, inclusion_states(cuts), effort)
    return plan if cuts.complete else _of_own_order(plan)


def _of_own_order(plan: Plan) -> Plan:
    """A plan of one order of the layers out of many, which bounds nothing."""
    method = f"{plan.proof.method}; cuts in the layers' own order only"
    proof = replace(plan.proof, termination="feasible", lower_bound=None, gap=None, method=method)
    return replace(plan, proof=proof)


def _by_tables(problem: PipelineProblem, states: States, effort: Effort) -> Plan:
    tables = _fill(problem, states, effort)
    seconds = float(tables[-1].best[0, -1, -1])
    if not np.isfinite(seconds):
        raise InfeasibleError(
            f"no nested partition of {len(problem.layers)} layers fits {problem.num_devices} "
            "devices under these rules",
            hint="use at_most, allow replication, or give more memory",
        )
    nested = _unfold(problem, states, tables, len(tables) - 1, 0, states.size - 1)
    return _plan(problem, states.ranges, nested, seconds, "dynamic program")


@dataclass(frozen=True, slots=True)
class _Level:
    """One level filled in: compute[i, j] from below, best[i, j, m - 1] here."""

    compute: Floats
    best: Floats
    components: int
    bandwidth: float
    devices_below: int


def _fill(problem: PipelineProblem, states: States, effort: Effort) -> list[_Level]:
    compute, below, tables = states.compute + overheads(problem).stage_seconds[0], 1, []
    levels = problem.pools[0].levels
    for number, level in enumerate(levels):
        is_top = number == len(levels) - 1
        table = _Level(
            compute,
            np.full((states.size, states.size, level.num_components), np.inf),
            level.num_components,
            level.bytes_per_second,
            below,
        )
        _fill_level(problem, states, table, 1 if is_top else states.size, effort)
        tables.append(table)
        compute = table.best[:, :, -1]
        # The released code divides by the previous level's devices alone.
        below = level.num_components * (1 if problem.stage_cost == "published" else below)
    return tables


def _fill_level(
    problem: PipelineProblem, states: States, table: _Level, rows: int, effort: Effort
) -> None:
    for replicas in range(1, _most(problem, table.components) + 1):
        table.best[:, :, replicas - 1] = _single(problem, states, table, replicas)
    for workers in range(2, table.components + 1):
        for last in range(states.size):
            if effort.should_stop():
                raise BackendError(
                    "the search was stopped, and nested levels have no plan before their end",
                    hint=f"give it more time, or solve flat (leave {option('stage_cost')} "
                    "published out)",
                )
            found = table.best[: min(rows, last + 1), last]
            if problem.workers == "at_most":
                np.minimum(found[:, workers - 1], found[:, workers - 2], out=found[:, workers - 1])
            if not len(states.splits[last]):
                continue
            blocks = last_block(
                problem,
                states,
                table,
                states.splits[last],
                last,
                workers,
                np.arange(1, _most(problem, workers - 1) + 1)[:, None],
            )
            _split(states, table, found, last, workers, blocks)


def _most(problem: PipelineProblem, workers: int) -> int:
    return workers if problem.replication else min(1, workers)


def _single(problem: PipelineProblem, states: States, table: _Level, replicas: int) -> Floats:
    """[i, j] time of one block alone."""
    seconds = cost(
        problem, table.compute, states.weights, replicas, table.bandwidth, table.devices_below
    )
    limit = _published_limit(problem)
    if limit is not None:
        stashes = ceil((table.components - replicas) / replicas)
        seconds = np.where(stashes * states.stash > limit, np.inf, seconds)
    found: Floats = np.where(states.valid, seconds, np.inf)
    return found


def _split(
    states: States, table: _Level, found: Floats, last: int, workers: int, blocks: Floats
) -> None:
    """Lower ``found[i, workers - 1]`` to the best of a pipeline up to a split, then one block.

    ``blocks`` [replicas, splits of last] holds the time of each block up to ``last``. Those that
    alone take what every row attains are left out.
    """
    splits, now = states.splits[last], found[:, workers - 1]
    if len(found) == 1:  # the top level needs one row: all replicas at once
        before = table.best[0, splits][:, workers - 1 - np.arange(1, len(blocks) + 1)].T
        total = np.where(states.allowed[0, splits], np.maximum(before, blocks), np.inf)
        now[0] = min(now[0], total.min())
        return
    better = blocks < now.max()
    for row in np.flatnonzero(better.any(axis=1)):
        kept = splits[better[row]]
        total = np.maximum(
            table.best[: len(found), kept, workers - row - 2], blocks[row, better[row]]
        )
        total = np.where(states.allowed[: len(found), kept], total, np.inf)
        np.minimum(now, total.min(axis=1), out=now)


def last_block(
    problem: PipelineProblem,
    states: States,
    table: _Level,
    splits: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    last: int,
    workers: int,
    replicas: "int | np.ndarray[tuple[int, int], np.dtype[np.int64]]",
) -> Floats:
    """[splits]: a pipeline's last block with its boundaries; [r, splits] for replicas [r, 1]."""
    weights = states.weights[splits + 1, last]
    below = 1 if problem.stage_cost == "published" else table.devices_below
    seconds = cost(
        problem, table.compute[splits + 1, last], weights, replicas, table.bandwidth, below
    )
    if problem.count_boundaries:
        sent = states.crossing[splits]
        shared = replicas if problem.stage_cost == "published" else 1
        into = 2 * sent / (table.bandwidth * shared) + 2 * overheads(problem).message_seconds
        seconds = np.maximum(seconds, into)
        if problem.stage_cost == "published" and last < states.size - 1:
            out = 2 * states.crossing[last] / (table.bandwidth * replicas)
            seconds = np.maximum(seconds, out)
    limit = _published_limit(problem)
    if limit is not None:
        stashes = np.ceil((table.components - workers) / replicas)
        seconds = np.where(stashes * states.stash[splits + 1, last] > limit, np.inf, seconds)
    return seconds


def cost(
    problem: PipelineProblem,
    compute: Floats,
    weights: Floats,
    replicas: "int | np.ndarray[tuple[int, int], np.dtype[np.int64]]",
    bandwidth: float,
    below: int,
) -> Floats:
    """The formulas of planning/costs/pipeline.py on arrays."""
    sync = (replicas - 1) * weights / bandwidth
    if problem.stage_cost == "published":
        return (compute + 4 * sync / replicas / below) / replicas
    if problem.stage_cost == "thesis":
        return np.maximum(compute, 2 * sync) / replicas
    return np.maximum(compute / replicas, 2 * sync / (replicas * replicas * below))


def _published_limit(problem: PipelineProblem) -> int | None:
    """The released optimizer's memory test.

    It stashes ceil((M - m) / q) times weights and activations for a block of q replicas that
    ends a pipeline of m of M components; none for m = M, so that data parallelism over all
    always passes.
    """
    return problem.pools[0].limit_bytes if problem.stage_cost == "published" else None


def _unfold(
    problem: PipelineProblem,
    states: States,
    tables: list[_Level],
    level: int,
    first: int,
    last: int,
) -> tuple[Nested, ...]:
    """The blocks of a level's best pipeline, each with the blocks inside it."""
    if level < 0:
        return ()
    blocks = _blocks(problem, states, tables[level], first, last)
    return tuple(
        (block, _unfold(problem, states, tables, level - 1, block.first, block.last))
        for block in blocks
    )


def _blocks(
    problem: PipelineProblem, states: States, table: _Level, first: int, last: int
) -> list[Block]:
    blocks: list[Block] = []
    workers = table.components
    while True:
        value = table.best[first, last, workers - 1] * _CLOSE
        if problem.workers == "at_most" and workers > 1:
            if table.best[first, last, workers - 2] <= value:
                workers -= 1
                continue
        if workers <= _most(problem, workers):
            alone = _single_value(problem, states, table, first, last, workers)
            if alone <= value:
                return [Block(first, last, workers), *reversed(blocks)]
        split, replicas = _best_split(problem, states, table, first, last, workers)
        blocks.append(Block(split + 1, last, replicas))
        last, workers = split, workers - replicas


def _single_value(
    problem: PipelineProblem, states: States, table: _Level, first: int, last: int, replicas: int
) -> float:
    limit = _published_limit(problem)
    if limit is not None:
        stashes = ceil((table.components - replicas) / replicas)
        if stashes * states.stash[first, last] > limit:
            return float("inf")
    compute, weights = table.compute[first, last], states.weights[first, last]
    found = cost(problem, compute, weights, replicas, table.bandwidth, table.devices_below)
    return float(found)


def _best_split(
    problem: PipelineProblem, states: States, table: _Level, first: int, last: int, workers: int
) -> tuple[int, int]:
    least, best = float("inf"), (0, 0)
    for replicas in range(1, _most(problem, workers - 1) + 1):
        splits = states.splits[last]
        block = last_block(problem, states, table, splits, last, workers, replicas)
        total = np.maximum(table.best[first, splits, workers - replicas - 1], block)
        total = np.where(states.allowed[first, splits], total, np.inf)
        at = int(np.argmin(total))
        if total[at] < least:
            least, best = float(total[at]), (int(splits[at]), replicas)
    return best


def _plan(
    problem: PipelineProblem,
    ranges: Ranges,
    nested: tuple[Nested, ...],
    seconds: float,
    method: str,
) -> Plan:
    leaves = _leaves(problem, nested, len(problem.pools[0].levels) - 1, (), 0)
    stages = [_stage(problem, ranges, leaves, index) for index in range(len(leaves))]
    return finish(
        problem,
        stages,
        recompute=False,
        objective=seconds,
        bound=None,
        step=problem.num_microbatches * seconds,
        method=f"{method} over {len(ranges.layer_sets) + 1} cuts, nested levels, "
        f"{problem.stage_cost} prices; of nested placements alone",
    )


Path = tuple[NestedBlock, ...]
Leaf = tuple[Path, Block, int]


def _leaves(
    problem: PipelineProblem, nested: tuple[Nested, ...], level: int, path: Path, device: int
) -> list[Leaf]:
    """Every lowest block with its path from the top and its first device."""
    width = 1
    for part in problem.pools[0].levels[:level]:
        width *= part.num_components
    found: list[Leaf] = []
    for index, (block, inside) in enumerate(nested):
        here = (*path, NestedBlock(index=index, num_replicas=block.num_replicas))
        if level == 0:
            found.append((here, block, device))
        else:
            found += _leaves(problem, inside, level - 1, here, device)
        device += block.num_replicas * width
    return found


def _devices(problem: PipelineProblem, path: Path, first: int) -> tuple[int, ...]:
    """The devices of a lowest block: the same ones in each component that its parents take."""
    found, width = [first], problem.pools[0].num_devices
    for block, level in zip(path, reversed(problem.pools[0].levels), strict=True):
        width //= level.num_components
        found = [
            device + width * number for number in range(block.num_replicas) for device in found
        ]
    return tuple(sorted(found))


def _product(path: Path) -> int:
    total = 1
    for block in path:
        total *= block.num_replicas
    return total


def _stage(problem: PipelineProblem, ranges: Ranges, leaves: list[Leaf], index: int) -> Stage:
    path, block, device = leaves[index]
    pool, replicas = problem.pools[0], [_product(leaf[0]) for leaf in leaves]
    in_flight = num_in_flight(
        problem.schedule, sum(replicas[index:]), replicas[index], problem.num_microbatches
    )
    versions = weight_versions(problem.schedule, in_flight)
    own = overheads(problem)
    compute = ranges.total(ranges.compute, block) + own.stage_seconds[0]
    layers = layers_of(ranges.between(block))
    return stage_on(
        problem,
        pool,
        _devices(problem, path, device),
        memory_bytes=_memory(problem, ranges, block, in_flight, versions) + worker_bytes(pool),
        layers=tuple(problem.layers[layer].id for layer in layers),
        num_in_flight=in_flight,
        weight_versions=versions,
        seconds_per_input=_lowest_price(problem, ranges, block, replicas[index]),
        compute_seconds=compute,
        forward_seconds=sum(pool.forward_seconds[layer] for layer in layers)
        + own.forward_seconds[0],
        output_seconds=_output(problem, ranges, leaves, index),
        nesting=path,
    )


def _lowest_price(
    problem: PipelineProblem, ranges: Ranges, block: Block, num_replicas: int
) -> float:
    """The lowest level's cost, shared by the components of the levels above."""
    own = overheads(problem).stage_seconds[0]
    compute = np.array([ranges.total(ranges.compute, block) + own])
    weights = np.array([ranges.total(ranges.weights, block)])
    bandwidth = problem.pools[0].levels[0].bytes_per_second
    alone = cost(problem, compute, weights, block.num_replicas, bandwidth, 1)
    return float(alone[0]) * block.num_replicas / num_replicas


def _memory(
    problem: PipelineProblem, ranges: Ranges, block: Block, in_flight: int, versions: int
) -> int:
    return round(
        stage_bytes(
            ranges.total(ranges.weights, block),
            ranges.total(ranges.activations, block),
            float(ranges.crossing[block.first - 1]) if block.first else 0.0,
            in_flight,
            versions,
            problem.optimizer.state_bytes_per_weight_byte,
            recompute=False,
        )
    )


def _output(problem: PipelineProblem, ranges: Ranges, leaves: list[Leaf], index: int) -> float:
    """The boundary to the next stage, at the highest level where their blocks differ."""
    if index + 1 == len(leaves):
        return 0.0
    path, block, _ = leaves[index]
    after = leaves[index + 1][0]
    depth = next(d for d in range(len(path)) if path[d].index != after[d].index)
    links = slowest_links(problem.pools[0].levels)
    crossing = float(ranges.crossing[block.last])
    message = overheads(problem).message_seconds
    return boundary_seconds(crossing, links[len(path) - 1 - depth], message)


METHODS.add("pipedream-nested", solve, __name__)

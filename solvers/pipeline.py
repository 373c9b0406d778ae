"""Partition a graph of layers into replicated stages on unlike devices (thesis 2.4.1).

The text solves level by level for one device type; so does ``solved="nested"``
(pipeline_nested.py), also with the released optimizer's prices. The default is flat: a stage
takes a run of devices in the order of the topology and pays for the links it spans, which finds
15-1 on four servers of four, where nested levels cannot. Memory limits and device types are part
of the search.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..schema.errors import InfeasibleError
from ..schema.pipeline import ALIKE, PipelinePlan, PipelineProblem
from . import pipeline_alike, pipeline_graph, pipeline_line, pipeline_nested
from .pipeline_assemble import assemble, fill_seconds
from .pipeline_cuts import Cuts, cuts_of
from .pipeline_graph import PlacedStage
from .pipeline_infeasible import explain
from .pipeline_line import TOLERANCE, objective
from .pipeline_prices import Prices
from .pipeline_space import Space, build
from .pipeline_step import best_step, relaxed_step

Method = Literal["auto", "line", "graph"]


def solve(problem: PipelineProblem, *, method: Method = "auto") -> PipelinePlan:
    """Minimise the time of the slowest stage or boundary, in seconds per input.

    Exact: over every partition into cuts of the graph, every number of replicas, every order of
    device types and every placement as a run of devices. A graph of more than 2,000 cuts is cut
    in its own order only; the plan then says ``feasible`` and carries a bound. Deterministic.
    Of plans within a billionth of the best, single stages included, the one with the least step
    time is returned.

    Args:
        problem: Layers, pools, and the choices that govern the search.
        method: ``line`` (parametric search; cuts in one line, at most all workers), ``graph``
            (dynamic program; any), or whichever applies. Both give the same objective.

    Returns:
        A plan that ``checks.pipeline.check`` accepts for ``problem``.

    Raises:
        InfeasibleError: No partition fits the memory, or uses exactly what is asked; says which
            stage lacks how many bytes.
    """
    if problem.schedule in ALIKE:
        return pipeline_alike.solve(problem)
    if problem.solved == "nested":
        return pipeline_nested.solve(problem, method=method)
    cuts, space = cuts_of(problem), build(problem)
    options = (False, True) if problem.recompute is None else (problem.recompute,)
    tables = [Prices(problem, cuts, space.bandwidths, recompute=option) for option in options]
    found = [
        Candidate(prices, placed)
        for prices in tables
        for placed in _candidates(problem, prices, space, method)
    ]
    if not found:
        raise explain(problem, tables[-1], space, _search(problem, cuts, method))
    if problem.minimises == "step":
        return _least_step(problem, tables, space, found)
    best = _choose(found)
    bound = None if cuts.complete else relaxed_bound(tables, space)
    return assemble(problem, best.prices, best.placed, best.seconds, bound, _name(problem, cuts))


def _least_step(
    problem: PipelineProblem, tables: list[Prices], space: Space, found: list["Candidate"]
) -> PipelinePlan:
    search = _search(problem, tables[0].cuts, "auto")
    known = [(candidate.prices, candidate.placed) for candidate in found]
    best, bound = best_step(problem, tables, space, known, search)
    assert best.placed is not None
    assert best.prices is not None
    cuts, prices = tables[0].cuts, best.prices
    if not cuts.complete:
        bound = min(bound, relaxed_step(problem, tables))
    suffix = "" if cuts.complete else "; cuts in the layers' own order only"
    name = f"least step over {cuts.size} cuts, flat, ring prices{suffix}"
    return assemble(problem, prices, best.placed, best.seconds, bound, name)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement with the prices it was found under."""

    prices: Prices
    placed: list[PlacedStage]

    @property
    def seconds(self) -> float:
        """The objective."""
        return objective(self.prices, self.placed)


def _candidates(
    problem: PipelineProblem, prices: Prices, space: Space, method: Method
) -> list[list[PlacedStage]]:
    found = _single_stages(problem, prices, space)
    placed = _search(problem, prices.cuts, method)(problem, prices, space, 0.0)
    return [*found, placed] if placed is not None else found


def _search(problem: PipelineProblem, cuts: Cuts, method: Method) -> "pipeline_graph.Search":
    if method == "auto":
        simple = problem.workers == "at_most" and problem.num_stages is None
        is_line = cuts.before is None and cuts.copied_bytes is None
        method = "line" if is_line and simple else "graph"
    return pipeline_line.search if method == "line" else pipeline_graph.search


def _single_stages(
    problem: PipelineProblem, prices: Prices, space: Space
) -> list[list[PlacedStage]]:
    """Pure data parallelism, on any number of devices."""
    if problem.num_stages not in (None, 1):
        return []
    found = []
    moves = space.moves
    for number in np.flatnonzero((moves.source == 0) & (moves.first == 0)).tolist():
        move = moves[number]
        if problem.workers == "exactly" and move.num_replicas != problem.num_devices:
            continue
        limit = problem.pools[move.pool].limit_bytes
        stash = prices.stashed(move.num_replicas, move.num_replicas)
        used = prices.stage_memory(0, prices.cuts.size - 1, *stash)
        if limit is None or used <= limit:
            found.append([(0, prices.cuts.size - 1, move)])
    return found


def _choose(found: list[Candidate]) -> Candidate:
    least = min(candidate.seconds for candidate in found)
    ties = [c for c in found if c.seconds <= least * (1 + 1e-9)]
    return min(ties, key=lambda c: (fill_seconds(c.prices, c.placed), len(c.placed)))


def relaxed_bound(tables: list[Prices], space: Space) -> float:
    """A bound that no partition beats: all compute at its best rate, spread over all devices."""
    kinds, _ = space.moves.numbered("pool", "num_replicas", "span")
    bounds = []
    for prices in tables:
        rate = min(m * prices.slopes(pool, m, span).per_compute for pool, m, span in kinds)
        pools = range(len(prices.problem.pools))
        times = zip(*(_layer_seconds(prices, pool) for pool in pools), strict=True)
        bounds.append(rate * sum(min(entry) for entry in times) / prices.problem.num_devices)
    return float(min(bounds)) * (1 - TOLERANCE)


def _layer_seconds(prices: Prices, pool: int) -> list[float]:
    times = prices.problem.pools[pool]
    passes = 2 if prices.recompute else 1
    return [
        passes * forward + backward
        for forward, backward in zip(times.forward_seconds, times.backward_seconds, strict=True)
    ]


def _name(problem: PipelineProblem, cuts: Cuts) -> str:
    search = _search(problem, cuts, "auto")
    kind = "parametric search" if search is pipeline_line.search else "dynamic program"
    suffix = "" if cuts.complete else "; cuts in the layers' own order only"
    return f"{kind} over {cuts.size} cuts, flat, {problem.stage_cost} prices{suffix}"


__all__ = ["InfeasibleError", "Method", "solve"]

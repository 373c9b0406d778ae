"""Work out the costs of a stated partition exactly as the search would.

For comparing predictions with launches over many partitions, not only over optimal ones.
"""

from collections.abc import Sequence
from dataclasses import replace

from hetflow.schema.errors import ProblemError
from hetflow.schema.pipeline import PipelineProblem
from hetflow.schema.plan import Plan
from hetflow.solvers.pipeline.assemble import assemble
from hetflow.solvers.pipeline.bottleneck import objective
from hetflow.solvers.pipeline.cuts import cuts_of, layers_of
from hetflow.solvers.pipeline.placements import (
    Move,
    PlacedStage,
    PlacementSpace,
    build,
    final_states,
    seat,
)
from hetflow.solvers.pipeline.prediction import alone
from hetflow.solvers.pipeline.stage_costs import StageCosts
from hetflow.solvers.pipeline.step_sums import step_of

Stated = Sequence[tuple[Sequence[str], int]]


def stated_plan(problem: PipelineProblem, stages: Stated, *, recompute: bool = False) -> Plan:
    """The plan of a stated partition, with the solver's own costs.

    Args:
        problem: Layers, pools and schedule (``gpipe`` or ``1f1b``, flat, ring costs). One
            pool; its devices are given out in order. Memory limits are not looked at.
        stages: Of each stage, first one first, the ids of its layers and its replicas.
        recompute: Whether activations are computed again in the backward pass.

    Returns:
        A plan that claims no optimality: ``feasible``, without a bound.

    Raises:
        ProblemError: The stages are no partition into cuts of the graph, or need more devices
            than the pool has; says which.
    """
    if len(problem.pools) != 1 or not problem.traits.flushes:
        raise ProblemError("stages can be stated for one device type and a flushing schedule")
    if len(stages) == 1:
        problem = alone(problem)
    cuts, space = cuts_of(problem, every=True), build(problem)
    costs = StageCosts(problem, cuts, space.bandwidths, recompute=recompute)
    moves = _moves(problem, space, [replicas for _, replicas in stages])
    known = {frozenset(layers_of(inside)): cut for cut, inside in enumerate(cuts.layer_sets)}
    position = {layer.id: index for index, layer in enumerate(problem.layers)}
    inside: frozenset[int] = frozenset()
    placed: list[PlacedStage] = []
    for number, ((names, _), move) in enumerate(zip(stages, moves, strict=True)):
        strange = [name for name in names if name not in position]
        if strange:
            raise ProblemError(f"stage {number}: the model has no layer {strange[0]!r}")
        after = inside | {position[name] for name in names}
        if after not in known or len(after) != len(inside) + len(names):
            raise ProblemError(f"stage {number} does not end at a cut of the layer graph")
        placed.append((known[inside], known[after], move))
        inside = after
    if len(inside) != len(problem.layers):
        missing = next(layer.id for i, layer in enumerate(problem.layers) if i not in inside)
        raise ProblemError(f"layer {missing!r} is in no stage")
    value = (
        step_of(problem, costs, placed)
        if problem.minimises == "step_seconds"
        else objective(costs, placed)
    )
    plan = assemble(problem, costs, seat(problem, space, placed), value, None, "stated")
    proof = replace(plan.proof, termination="feasible", lower_bound=None, gap=None)
    return replace(plan, proof=proof)


def _moves(problem: PipelineProblem, space: PlacementSpace, replicas: Sequence[int]) -> list[Move]:
    """The moves that place stages of so many replicas on runs of devices, without a gap.

    Moves go from the model's end to its start; the answer is in the model's order.

    Raises:
        ProblemError: There are not so many devices.
    """
    found, state, taken = [], 0, 0
    for number in reversed(range(len(replicas))):
        at = next(
            (
                move
                for move in space.moves
                if (move.source, move.first, move.num_replicas) == (state, taken, replicas[number])
            ),
            None,
        )
        if at is None:
            raise ProblemError(
                f"stage {number} cannot have {replicas[number]} replicas: the pool has "
                f"{problem.num_devices} devices in all, {taken} of them for later stages"
            )
        found.append(at)
        state, taken = at.target, taken + at.num_replicas
    if state not in final_states(problem, space):
        raise ProblemError("the problem asks for another number of stages or devices")
    return found[::-1]

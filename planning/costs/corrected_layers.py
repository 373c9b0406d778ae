"""Layer times and pipeline costs from the passes of stages that pipelines have run.

The rules, and why, are in docs/decisions.md ("Runs correct profiles").
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ...schema.plan import Plan
from ...schema.profile import LayerGraph, PipelineCosts, Profile
from ...schema.run import RunRecord
from .observed import Measured, Run, together

Retime = Callable[[Plan, Sequence[Profile]], float | None]
"""The step of a plan with these profiles' numbers; None where it has no step of its own."""

_UNTIMED = (
    "its step was not measured, or cannot be predicted anew: its schedule never flushes, or its "
    "plan does not repeat the links of its cluster"
)
_SAME = 1e-9
_HALVINGS = 20  # of the cost of a message: to a millionth of it
_Seconds = tuple[float, float]
"""Of forward and of backward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanStage:
    """A stage that a pipeline has run: which layers, and how long its passes of a microbatch took.

    Attributes:
        graph: The profile's layers at the microbatch size that ran.
        layers: Those of the stage.
        forward_seconds: A forward pass, all that the runtime does for it included.
        backward_seconds: The same of a backward pass, of both halves where it was split.
        slowed: How many times as long passes take there as on a device alone, which the profile's
            layers are of.
        num_halves: Passes of the runtime that a backward pass was made of.
        recomputes: Whether it made the forward pass again.
    """

    graph: LayerGraph
    layers: Collection[str]
    forward_seconds: float
    backward_seconds: float
    slowed: float = 1.0
    num_halves: int = 1
    recomputes: bool = False

    @property
    def layer_seconds(self) -> _Seconds:
        """What its layers take by the profile, alone."""
        nodes = [node for node in self.graph.nodes if node.id in self.layers]
        return (
            math.fsum(node.forward_seconds for node in nodes),
            math.fsum(node.backward_seconds for node in nodes),
        )


_Ratios = dict[tuple[int | None, str], tuple[list[Measured], list[Measured]]]
"""By microbatch size and layer, what its passes took over what was predicted; None: at any size."""


def corrected_by_pipelines(
    profiles: Sequence[Profile], runs: Sequence[Run], retime: Retime
) -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    """Fold what pipelines have measured into one model's profiles.

    The layers of a stage are scaled so that they take what its passes took, forward and backward
    apart and at each microbatch size apart; at a size that did not run by their ratio at those
    that did; those that ran nowhere on a type by the ratio of all that did. What the step then
    takes more or less is the step's fixed cost, where the profile has pipeline costs.

    ``retime`` is the cost model, for what is left of a step.

    Returns:
        The profiles in their order, and one sentence for each measurement that was not used.
    """
    said: list[str] = []
    scaled = [_scaled(profile, runs, said) for profile in profiles]
    timed: list[tuple[Plan, float]] = []
    for run in runs:
        plan, measured = run.record.plan, run.record.measured_step_seconds
        step = retime(plan, scaled)
        if measured is not None and step is not None:
            timed.append((plan, measured))
        elif any(profile.pipeline is not None for profile in profiles):
            said.append(f"{run.name}: its passes count, not the rest of its step; {_UNTIMED}")
    # Each type from the same state, so that their order does not matter.
    after = tuple(_with_rest(index, scaled, timed, retime) for index in range(len(scaled)))
    return after, tuple(said)


def _with_rest(
    index: int,
    profiles: Sequence[Profile],
    timed: Sequence[tuple[Plan, float]],
    retime: Retime,
) -> Profile:
    """A profile with what is left of its steps beside the passes, as runs have it."""
    # What is left is the fixed cost of a step. Where that would be negative, messages cost less
    # than measured.
    profile = profiles[index]
    costs, name = profile.pipeline, profile.device_type
    mine = [(p, s) for p, s in timed if name in {stage.device_type for stage in p.stages}]
    if costs is None or not mine:
        return profile

    def left(of: PipelineCosts) -> float:
        others = [*profiles[:index], replace(profile, pipeline=of), *profiles[index + 1 :]]
        rests = (measured - (retime(plan, others) or 0.0) for plan, measured in mine)
        return together([Measured(rest) for rest in rests]).seconds

    rest = left(costs)
    if abs(rest) <= _SAME * max(measured for _, measured in mine):
        return profile
    fixed = costs.fixed_seconds + rest
    costs = replace(costs, fixed_seconds=max(0.0, fixed))
    if fixed < 0:
        low, high = 0.0, costs.message_seconds
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_short = left(replace(costs, message_seconds=middle)) >= 0
            low, high = (middle, high) if is_short else (low, middle)
        costs = replace(costs, message_seconds=low)
    return replace(profile, pipeline=costs)


def _scaled(profile: Profile, runs: Sequence[Run], said: list[str]) -> Profile:
    """The profile's layers at the sizes that ran, and at its other sizes as at these."""
    name = profile.device_type
    stages = [
        (run, stage, index)
        for run in runs
        for index, stage in enumerate(run.record.plan.stages)
        if stage.device_type == name
    ]
    if not stages:
        return profile
    if profile.emulation is not None:
        said.append(f"{name} is emulated: its stages are held to their table, and stay")
        return profile
    ran: list[RanStage] = []
    for run, stage, index in stages:
        plan = run.record.plan
        graph = _graph(profile, plan.microbatch_size)
        took = _took(run.record, index)
        if graph is None or not set(stage.layers) <= {node.id for node in graph.nodes}:
            said.append(f"{run.name}: the profile of {name} has no layers as its stage {index}")
        elif took is None:
            said.append(f"{run.name}: it does not tell how long stage {index} took")
        else:
            ran.append(
                RanStage(
                    graph=graph,
                    layers=frozenset(stage.layers),
                    forward_seconds=took[0],
                    backward_seconds=took[1],
                    num_halves=2 if plan.traits.splits_backward else 1,
                    recomputes=plan.recomputes,
                )
            )
    return with_stages(profile, ran)


def with_stages(profile: Profile, ran: Sequence[RanStage]) -> Profile:
    """A profile whose layers take in stages what stages took, without what every pass costs.

    Layers of a stage are scaled together, forward and backward apart, and each by the stages that
    held it. A pass costs no more beyond its layers than half of the shortest pass.
    """
    if not ran:
        return profile
    shortest = min(min(one.forward_seconds, one.backward_seconds / one.num_halves) for one in ran)
    profile = _with_pass_cost(profile, shortest)
    ratios: _Ratios = {}
    targets = [_target(profile, one) for one in ran]
    priors = [one.layer_seconds for one in ran]
    for one, target, prior in zip(ran, targets, priors, strict=True):
        for size in (one.graph.microbatch_size, None):
            for layer in one.layers:
                for part, found in enumerate(ratios.setdefault((size, layer), ([], []))):
                    if prior[part] > 0:
                        found.append(Measured(target[part] / prior[part]))
    forward, backward = (_ratio([t[k] for t in targets], [p[k] for p in priors]) for k in (0, 1))
    return _with_layers(profile, ratios, (forward, backward))


def _graph(profile: Profile, microbatch_size: int) -> LayerGraph | None:
    tables = [t for t in profile.layer_tables if t.microbatch_size == microbatch_size]
    return tables[0] if tables else None


def _took(run: RunRecord, stage: int) -> _Seconds | None:
    """A stage's passes of one microbatch, over its replicas."""
    found = [entry for device in run.devices for entry in device.stages if entry.stage == stage]
    if not found:
        return None
    forward = together([Measured.of(entry.forward) for entry in found])
    backward = together([Measured.of(entry.backward) for entry in found])
    return forward.seconds, backward.seconds


def _with_pass_cost(profile: Profile, shortest: float) -> Profile:
    """A pass costs no more beyond its layers than half of the shortest pass there was."""
    costs = profile.pipeline
    if costs is None or _timed(costs) <= shortest / 2:
        return profile
    between, lone = costs.pass_seconds - _timed(costs), costs.lone_pass_seconds
    less = replace(
        costs,
        pass_seconds=shortest / 2 + between,
        lone_pass_seconds=None if lone is None else shortest / 2,
    )
    return replace(profile, pipeline=less)


def _timed(costs: PipelineCosts) -> float:
    """What of a pass's cost beside layers is in its measured time: messages are between passes."""
    lone = costs.lone_pass_seconds
    return costs.pass_seconds if lone is None else lone


def _target(profile: Profile, one: RanStage) -> _Seconds:
    """What the stage's layers took: its passes without what every pass costs besides."""
    # A backward pass that recomputes holds the forward one too; what it leaves no room for is
    # shared out as predicted.
    costs, prior = profile.pipeline, one.layer_seconds
    beside = 0.0 if costs is None else _timed(costs)
    forward = (one.forward_seconds - beside) / one.slowed
    backward = (one.backward_seconds - one.num_halves * beside) / one.slowed
    if one.recomputes:
        share = prior[1] / (prior[0] + prior[1]) if prior[1] > 0 else 0.0
        backward = backward - forward if backward > forward else backward * share
    return _same(forward, prior[0]), _same(backward, prior[1])


def _same(after: float, before: float) -> float:
    return before if abs(after - before) <= _SAME * before else after


def _ratio(after: Sequence[float], before: Sequence[float]) -> float:
    whole = math.fsum(before)
    return math.fsum(after) / whole if whole > 0 else 1.0


def _with_layers(
    profile: Profile,
    ratios: _Ratios,
    others: _Seconds,
) -> Profile:
    def factor(size: int, layer: str, part: int) -> float:
        found = ratios.get((size, layer)) or ratios.get((None, layer))
        if found is None:
            return others[part]
        return together(found[part]).seconds if found[part] else 1.0

    def scaled(graph: LayerGraph) -> LayerGraph:
        nodes = tuple(
            replace(
                node,
                forward_seconds=node.forward_seconds * factor(graph.microbatch_size, node.id, 0),
                backward_seconds=node.backward_seconds * factor(graph.microbatch_size, node.id, 1),
                core=None
                if node.core is None
                else replace(
                    node.core,
                    forward_seconds=node.core.forward_seconds
                    * factor(graph.microbatch_size, node.id, 0),
                ),
            )
            for node in graph.nodes
        )
        return replace(graph, nodes=nodes)

    assert profile.layers is not None
    return replace(
        profile,
        layers=scaled(profile.layers),
        more_layers=tuple(scaled(graph) for graph in profile.more_layers),
    )

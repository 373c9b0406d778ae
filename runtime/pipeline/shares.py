"""The weights that a stage's replicas share: gathered for each pass, gradients reduced behind.

Replicas of a stage run their passes in lockstep: each its own microbatch, forward and backward in
the same order. So their gathers and reductions meet. Repeated layers come and go in each pass
(``sharding/units.py``). What is in none of them, and what several stages use, is gathered once a
step and reduced at its end.

A worker of an interleaved pipeline holds several stages, and shares each with the same workers.
A pass then takes turns with the units of its own stage.

A tied weight is shared within each position of its stages by even cuts. So the same numbers have
one owner in each position, and these add up their sums.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import TargetError
from ...schema.launch import LaunchConfig, PipelineStage
from ...schema.options import option
from ...schema.schedule import Kind, Operation
from ..gradients import Hooks
from ..initial_values import fill
from ..repeated_layers import layers_of, repeated_layers
from ..session import Session
from ..sharding.flats import Flat, Sharers, cuts_of
from ..sharding.units import Unit, Units, UnitTurn, check_elementwise
from .cut import StageModule, WholeModel, bracket, spans_of
from .ownership import Holders, Ownership


def shares_weights(config: LaunchConfig | None) -> bool:
    """Whether the replicas of a pipeline's stages share their weights."""
    return config is not None and config.pipeline is not None and config.shard == "all"


def shared_names(ownership: Ownership) -> frozenset[str]:
    """The parameters that replicas of stages share: all that some stage uses."""
    return frozenset(name for name, stages in ownership.stages.items() if stages)


def _sharers(ownership: Ownership, name: str, stage: PipelineStage) -> list[Holders]:
    """The sets of a stage's workers of which each shares a parameter, or one part of it."""
    found = (tuple(r for r in stage.ranks if r in ranks) for ranks in ownership.sums[name])
    return [ranks for ranks in found if ranks]


def _owners(ownership: Ownership, name: str, stages: Sequence[PipelineStage]) -> list[Holders]:
    """The sets of workers of several stages that own the same numbers of a tied weight."""
    # Stages of one position are on the same workers, which hold such a weight once.
    used = {stages[number].ranks: stages[number] for number in ownership.stages[name]}
    if len(used) == 1:
        return []
    sets = [_sharers(ownership, name, stage) for stage in used.values()]
    if len({tuple(map(len, found)) for found in sets}) > 1:
        raise TargetError(
            f"{name} is tied over stages of unlike tensor parallel degrees, which share no weights",
            hint=f"give both stages one degree, or solve without {option('shard')}",
        )
    return [owners for lane in zip(*sets, strict=True) for owners in zip(*lane, strict=True)]


def _sharing(
    ownership: Ownership,
    name: str,
    stages: Sequence[PipelineStage],
    stage: PipelineStage,
    rank: int,
) -> tuple[Holders, Holders]:
    """Who shares a parameter with a worker, and who owns the same numbers of it elsewhere."""
    sets = _sharers(ownership, name, stage), _owners(ownership, name, stages)
    sharers, owners = (next((r for r in of if rank in r), ()) for of in sets)
    return sharers, owners


def first_sharers(
    ownership: Ownership, stages: Sequence[PipelineStage], rank: int
) -> frozenset[str]:
    """The parameters that a worker is the first to share in its stage."""
    return frozenset(
        name
        for name, used in ownership.stages.items()
        for number in used
        for ranks in _sharers(ownership, name, stages[number])
        if ranks[0] == rank
    )


def groups_of(ownership: Ownership, stages: Sequence[PipelineStage]) -> set[Holders]:
    """The sets of workers that exchange shares, of which each needs a process group."""
    return {
        ranks
        for name, used in ownership.stages.items()
        for of in (
            *(_sharers(ownership, name, stages[number]) for number in used),
            _owners(ownership, name, stages),
        )
        for ranks in of
    }


class StageShares(Units):
    """One worker's share of its stages' weights, gradients and optimizer state.

    Make it when the first worker of each group has the weights' values; the others need none.

    Args:
        stages: All stages of the plan.
        parts: The modules of this worker's, by their number.
        shares: [workers] of their stages' states, in any unit.
        group_of: The process group of a set out of ``groups_of``.
        recomputes: Stage -> whether a backward pass runs it forward first.

    Attributes:
        names: Of the parameters that are shared here.
        all_names: Of those that are shared in any stage.

    Raises:
        TargetError: The optimizer cannot update slices of parameters.
    """

    def __init__(
        self,
        session: Session,
        ownership: Ownership,
        stages: Sequence[PipelineStage],
        parts: Mapping[int, StageModule],
        shares: Sequence[int],
        group_of: Callable[[Holders], dist.ProcessGroup],
        recomputes: Callable[[int], bool],
    ) -> None:
        check_elementwise(session.optimizers)
        place = session.place
        own = {p for part in parts.values() for p in part.module.parameters()}
        self.all_names = shared_names(ownership)
        self._lanes, self._rank = ownership.lanes, place.rank
        self.names = frozenset(n for n, p in ownership.parameters.items() if p in own)
        names = [name for name in ownership.parameters if name in self.names]
        self._parameters = [ownership.parameters[name] for name in names]
        homes, modules = layers_of(session.model), repeated_layers(session.model)
        graphs = {n: p.module for n, p in parts.items() if not isinstance(p.module, WholeModel)}
        spans = {n: spans_of(graph, homes) for n, graph in graphs.items()}
        # A layer that is cut has a unit in each of its stages.
        found = {(n, name): _named(n, name) for n in parts for name in spans.get(n, modules)}
        kinds: dict[_Kind, list[int]] = {}
        for index, (name, p) in enumerate(zip(names, self._parameters, strict=True)):
            used = [number for number in ownership.stages[name] if number in parts]
            ranks, owners = _sharing(ownership, name, stages, stages[used[0]], place.rank)
            home = found.get((used[0], homes[id(p)]), "") if len(used) == 1 and not owners else ""
            alone = not all(ownership.lanes.contributes(name, rank) for rank in ranks)
            kind = (home, ranks, owners, alone, p.dtype, p.requires_grad)
            kinds.setdefault(kind, []).append(index)
        flats: dict[str, list[Flat]] = {"": []}
        self._ties: list[tuple[Flat, dist.ProcessGroup]] = []
        before: dict[object, int] = {}
        sizes = {kind: sum(self._parameters[n].nbytes for n in of) for kind, of in kinds.items()}
        for (home, ranks, owners, alone, *_), indices in kinds.items():
            for n in indices:
                fill(self._parameters[n], place.device, computes=False)
            lengths, place_of = [self._parameters[n].numel() for n in indices], (ranks, owners)
            made = Flat(
                [(n, self._parameters[n]) for n in indices],
                cuts_of(before.get(place_of, 0), lengths, _asked(shares, ranks, owners, sizes)),
                Sharers(place, ranks, group_of(ranks)),
                keeps_whole=False,
                kept=[range(n, n + 1) for n in range(len(ranks))],
                counts=not alone or ownership.lanes.lane(place.rank) == 0,
            )
            before[place_of] = before.get(place_of, 0) + sum(lengths)
            flats.setdefault(home, []).append(made)
            if owners and made.is_trained:
                self._ties.append((made, group_of(owners)))
        layers = {unit: Unit(flats[unit]) for unit in found.values() if unit in flats}
        super().__init__(Unit(flats[""]), layers, names, shares_weights=True, in_rounds=True)
        self._recomputes = recomputes
        of_stages: dict[int, dict[str, str]] = {number: {} for number in parts}  # unit -> layer
        for (number, name), unit in found.items():
            if unit in layers:
                of_stages[number][unit] = name
        self._orders = {number: [*units] for number, units in of_stages.items()}
        for number, units in of_stages.items():
            if number in graphs:
                of_graph = {unit: spans[number][name] for unit, name in units.items()}
                bracket(graphs[number], of_graph, self._enter, self.after)
            else:
                self.watch({unit: modules[name] for unit, name in units.items()})
        self._came: set[int] = set()  # parameters whose gradient has ever come
        self._now_came: set[int] = set()
        self._own_hooks = Hooks()
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self._own_hooks.add(parameter, partial(self._take, index))
        # Optimizers may have states before the first step: slices of them stay.
        for optimizer in session.optimizers:
            for name, parameter in zip(names, self._parameters, strict=True):
                held = optimizer.state.get(parameter, {})
                held.update({key: self.own_part(name, value) for key, value in held.items()})
        self.free()

    def _enter(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        found = self.before(name, values, {})
        return values if found is None else found[0]

    def _take(self, index: int, _: Tensor) -> None:
        self._now_came.add(index)

    # A step

    def begin(self, first: Operation) -> None:
        """Start a step with a pass. No parameter has a gradient."""
        self._now_came.clear()
        self.keep_own()
        for flat in self._flats:
            flat.begin_sums()
        for unit in self._units.values():
            unit.free(shows=False)
        self._rest.wait()
        self._rest.await_gradients()
        if name := self._begins_with(first):
            self._units[name].gather()
        self._trains, self._has_idled = True, False

    def _begins_with(self, operation: Operation) -> str:
        """The unit that a pass uses first; empty where its stage has none."""
        order = self._orders[operation.stage]
        runs = operation.kind is not Kind.BACKWARD or self._recomputes(operation.stage)
        return next(iter(order if runs else reversed(order)), "")

    @contextmanager
    def passing(self, operation: Operation, after: Operation | None) -> Iterator[None]:
        """Run a pass in the body, after which another follows: it begins with one unit, too."""
        is_backward = operation.kind is Kind.BACKWARD
        self._order = self._orders[operation.stage]
        ends_with = self._order[0 if is_backward else -1] if self._order else ""
        following = "" if after is None else self._begins_with(after)
        self._turning = following if following == ends_with else ""
        self._begin_turns()
        self._is_open = True
        self._reruns = is_backward and self._recomputes(operation.stage)
        if is_backward:  # of a microbatch that has gone forward before
            befores = [None, *self._order]
            turns = enumerate(zip(self._order, befores, strict=False))
            self._to_go_back = [UnitTurn(place, *names) for place, names in turns]
            self._next = len(self._order)
        yield
        self._reruns = False
        if is_backward:
            self._go_back_to(-1)
        else:
            self._leave_out(len(self._order))
        for name in self._order:
            if name != following:
                self._units[name].free(shows=False)
        if following:
            self._units[following].gather()

    def finish(self) -> None:
        """End a step: afterwards gradients are slices of sums; None where there is none."""
        self._reduce(self._rest)
        for unit in self._all:
            unit.add_reduced()
        for flat, group in self._ties:
            flat.sum_over(group)
        self._trains = False
        self.wait()
        self._came |= self._now_came
        # A replica whose losses all have weight 0 sees none come, and others do.
        came = (
            (self._came or {*range(len(self._parameters))}) if self._has_idled else self._now_came
        )
        for index, parameter in enumerate(self._parameters):
            if index not in came:
                parameter.grad = None

    # Values

    def own_part(self, name: str, value: Any) -> Any:
        """This worker's slice of a parameter, or of an optimizer's state of the same shape."""
        if name not in self.names or not isinstance(value, Tensor) or not value.dim():
            return value
        flat, number = self._place(name)
        return value.reshape(-1)[flat.slice_of(number)].clone()

    def whole_of(self, name: str, value: Any) -> Any:
        """The whole of an optimizer's state; call it on all workers that share the parameter."""
        if name not in self.names or not isinstance(value, Tensor) or not value.dim():
            return value
        flat, number = self._place(name)
        return flat.whole_of(number, value)

    def is_first(self, name: str) -> bool:
        """Whether this worker's replica is the first of those that share a parameter."""
        if name not in self.names:
            return True
        ranks, lanes = self._place(name)[0].sharers.ranks, self._lanes
        return self._rank in lanes.group(ranks[0])

    def around(self, name: str, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Copies of pieces of a parameter, which is whole while they are read."""
        flat, _ = self._place(name)
        with flat.whole():
            yield from (piece.clone() for piece in pieces)

    def _place(self, name: str) -> tuple[Flat, int]:
        return self.places()[id(self._parameters[self._names.index(name)])]

    def close(self) -> None:
        """See ``Units``."""
        super().close()
        self._own_hooks.remove()


def _named(stage: int, layer: str) -> str:
    return f"{stage}: {layer}"


_Kind = tuple[str, Holders, Holders, bool, torch.dtype, bool]
"""Unit, who shares it, who owns the same numbers in other stages, whether one worker of each
tensor-parallel group counts in sums, dtype, whether it is trained."""


def _asked(
    shares: Sequence[int], ranks: Holders, owners: Holders, sizes: Mapping[_Kind, int]
) -> list[int]:
    """[sharers] what each is to hold: of tied weights as much; of others what its share leaves."""
    if owners:
        return [1] * len(ranks)
    whole = tied = 0
    for (_, sharers, others, *_), number in sizes.items():
        if sharers == ranks:
            whole, tied = whole + number, tied + number * bool(others)
    total = sum(shares[rank] for rank in ranks)
    found = [max(shares[rank] * whole * len(ranks) - tied * total, 0) for rank in ranks]
    return found if any(found) else [1] * len(ranks)

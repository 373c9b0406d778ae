"""The states that the workers of a split share, gathered and reduced as passes need them.

With ``all`` weights come and go by units (``units.py``). With ``gradients`` each pass reduces
gradients to the workers that keep their states, with ``optimizer`` only the last pass of a step
does. Between steps each parameter is this worker's slice, on which elementwise optimizers update as
on the whole.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from secrets import randbits
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import _disable_current_modes

from ...schema.errors import TargetError
from ...schema.options import Activations, Shard, option
from .. import peers
from ..activations import treat
from ..gradients import NOTHING, Hooks
from ..group import Place
from ..initial_values import fill
from ..invariant import Subtree
from ..nested_tensors import InPieces, digest_of_pieces
from ..repeated_layers import layers_of, repeated_layers
from ..session import Session
from ..setup import check_same_shapes, refuse_saving
from ..virtual_nodes import share_out
from .flats import Flat, all_workers, cuts_of
from .leaves import NodeOrder
from .precision import AS_IS, Precision
from .sliced import Origin, get_grad, plain, plainly
from .units import Unit, Units, check_elementwise, outside_of_layer

_SUM = torch.distributed.ReduceOp.SUM
_ALIKE_SECONDS, _READ_SECONDS = 20.0, 30.0
"""How far workers may be apart in a pass, and where they read a weight between two steps."""


def _refuse_copy(_: dict[int, Any]) -> Any:
    raise TargetError(
        "the script copies a model whose states workers share",
        hint="copy it before hf.prepare or its first step, or after job.finish(); a script that "
        "calls no hf.prepare can copy its state_dict()",
    )


def order_of_turns(ran: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """An order of units in which each worker finds those that it ran, if there is one.

    Args:
        ran: [workers] the units as they have run.
        names: All units; of those that may come next, the first one here does.
    """
    before: dict[str, set[str]] = {name: set() for name in names}
    for own in ran:
        for name, following in pairwise(dict.fromkeys(own)):
            before[following].add(name)
    left, order = [*names], list[str]()
    while left:
        # In a circle (one worker runs a, b and another b, a) some worker needs another round.
        name = next((n for n in left if before[n].isdisjoint(left)), left[0])
        left.remove(name)
        order.append(name)
    return order


class SharedStates(Units):
    """One worker's share of the states of a split, and its part in gathers and reductions.

    It takes the place of a ``GradientReducer`` and has its methods.

    Args:
        shard: What is shared.
        shares: [workers] of the states, in any unit.
        order: In which order virtual nodes add up; None: as the workers run them.
        kept: [workers] the ranks whose shares each keeps; None: its own.
        blocks: Names of the units; empty for the repeated layers.
        precision: See ``Flat``.
        casts: Modules whose inputs and outputs it casts beside the model's; empty for the units.

    Attributes:
        run: Runs an exchange between two steps, which may be repeated where a worker is lost.
        is_behind: Whether this worker's script has not reached the others' position yet.
        moves: How often shares have moved to other workers.
        bring: Gives the whole of a slice that a script reads: of a numbered parameter, or of its
            gradient.
        set_aside: Gradients of earlier steps; see ``Origin.carried``.
        num_parameters: The number of parameters, trainable or not.
        carried: Whether gradients of an earlier step were still there when this step began.
        sums: None: the sums of a step travel alone.
    """

    sums: Tensor | None = None

    def __init__(
        self,
        session: Session,
        shard: Shard,
        shares: Sequence[int],
        order: NodeOrder | None = None,
        kept: Sequence[range] | None = None,
        blocks: Sequence[str] = (),
        precision: Precision = AS_IS,
        casts: Sequence[nn.Module] = (),
    ) -> None:
        self.run: Callable[[Callable[[], Tensor]], Tensor] = lambda exchange: exchange()
        self.is_behind: Callable[[], bool] = lambda: False
        self._kept = kept or [range(rank, rank + 1) for rank in range(len(shares))]
        self._session, self._shard, self._sums_order = session, shard, order
        self._parameters = list(session.parameters.values())
        self.num_parameters = len(self._parameters)
        check_elementwise(session.optimizers)
        if session.place.distributed and not session.place.is_outside:
            check_same_shapes(dict(session.parameters), session.place)
        self.shapes = {
            name: p.detach().to("meta", precision.kept_type(p))
            for name, p in session.parameters.items()
        }
        self._laid: list[Flat] = []
        rest, layers, self._modules = self._cut(shares, shard, order, blocks, precision)
        super().__init__(
            rest,
            layers,
            list(session.parameters),
            shares_weights=shard == "all",
            in_rounds=shard != "optimizer",
            names_of_turn=self._names_of_turn,
            most_of=self._most_said,
            check_alike=self._check_alike,
        )
        self._trained = self._layout()
        self._tables: list[dict[str, Any]] = []
        self._known_members = [0]  # none yet
        places = self.places()
        self._places = [places[id(parameter)] for parameter in self._parameters]
        self._is_tried = False  # whether a loss function was
        self.watch(self._modules)
        self._hooks += [
            session.model.register_forward_pre_hook(lambda *_: self._model_runs()),
            session.model.register_forward_hook(lambda *given: self._model_ran(given[-1])),
            *precision.cast_around(session.model, casts or [*self._modules.values()]),
        ]
        self._own_hooks = Hooks()
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self._own_hooks.add(parameter, partial(self._came, index))
        self._used: set[int] = set()
        self.carried = False
        self._node = 0  # whose pass runs
        self._kept_nodes: set[int] = set()
        self._knows_order = self._is_alone = False
        self._order_name = self._num_passes = 0  # since the order was learned, alike on all workers
        self.moves = 0
        self.bring: Callable[[int, Tensor, bool], Tensor] = self._brought
        self.set_aside: dict[nn.Parameter, Tensor] = {}
        self._origins: list[Origin] = []
        self._shows_slices = self._serves = self._updates = self._is_guarded = False
        self._guard = plain()
        self._read_at = self._num_reads = 0
        self._signs: list[str] = []
        for optimizer in session.optimizers:  # some make it as they are made (Adagrad)
            self.cut(optimizer)
        # Hooks hold what none can copy, and a copy has no share.
        vars(session.model)["__deepcopy__"] = _refuse_copy
        self._norm = clip_grad._get_total_norm
        clip_grad._get_total_norm = self._total_norm

    def _cut(
        self,
        shares: Sequence[int],
        shard: Shard,
        order: NodeOrder | None,
        blocks: Sequence[str],
        precision: Precision,
    ) -> tuple[Unit, dict[str, Unit], dict[str, nn.Module]]:
        """Find the units, and lay their parameters out."""
        session = self._session
        place, model = session.place, session.model
        homes, modules = layers_of(model, blocks), repeated_layers(model, blocks)
        members: dict[tuple[str, torch.dtype, bool, bool], list[int]] = {}
        # Batch norm has statistics in more bits, and torch's kernels take weights in no fewer.
        norms = {
            id(parameter)
            for module in (model.modules() if precision.running is not None else ())
            if isinstance(module, _BatchNorm)
            for parameter in module.parameters()
        }
        for index, parameter in enumerate(self._parameters):
            name, is_norm = homes.get(id(parameter), ""), id(parameter) in norms
            kind = (name, parameter.dtype, parameter.requires_grad, is_norm)
            members.setdefault(kind, []).append(index)
        flats: dict[str, list[Flat]] = {"": []}
        before = 0
        for (name, *_, is_norm), indices in members.items():
            own = [(index, self._parameters[index]) for index in indices]
            for _, parameter in own:
                fill(parameter, place.device, computes=place.rank == 0)
            lengths = [parameter.numel() for _, parameter in own]
            made = Flat(
                own,
                cuts_of(before, lengths, shares),
                all_workers(place),
                keeps_whole=shard != "all",
                kept=self._kept,
                order=order,
                precision=replace(precision, running=None) if is_norm else precision,
            )
            flats.setdefault(name, []).append(made)
            self._laid.append(made)
            before += sum(lengths)
        rest = Unit(flats.pop(""))
        units = {name: Unit(found) for name, found in flats.items()}
        return rest, units, {name: modules[name] for name in units}

    def cut(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this worker's slices of an optimizer's state that was loaded or made whole."""
        places = self.places()
        for parameter, state in optimizer.state.items():
            if id(parameter) not in places:
                continue
            flat, number = places[id(parameter)]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape == flat.shapes[number]:
                    own = value.reshape(-1)[flat.slice_of(number)]
                    kept = self.shapes[self._names[flat.members[number][0]]].dtype
                    state[key] = own.to(kept, copy=True)

    def treat(self, how: Activations) -> None:
        """Let repeated layers keep, recompute or offload their activations from now on."""
        treat(self._modules.values(), how)

    # What a script sees between steps

    def show_slices(self, *, gradients: bool) -> None:
        """Let the script read and write its parameters as whole tensors; see ``sliced.py``.

        ``gradients`` says whether these are slices now.
        """
        if not self._origins:
            self._origins = [self._origin_of(index) for index in range(len(self._parameters))]
        for parameter, origin in zip(self._parameters, self._origins, strict=True):
            gradient = get_grad(parameter) if gradients else None
            if gradient is not None and origin.gradient is not None:
                origin.gradient.of(gradient)
            if not self._updates:
                origin.hold(parameter)
        self._shows_slices = True
        if self._updates:  # it goes on behind its closure
            self._look_plainly(True)

    def _origin_of(self, index: int) -> Origin:
        flat, number = self._places[index]
        told = flat.shapes[number], flat.slice_of(number)
        gradient = Origin(*told, lambda own: self.bring(index, own, True))
        is_here = partial(getattr, flat, "is_readable")
        return Origin(
            *told, lambda own: self.bring(index, own, False), is_here, gradient, self.set_aside
        )

    def hide_slices(self) -> None:
        """Leave parameters as they are: so layers run on them."""
        self._look_plainly(False)
        if not self._shows_slices:
            return
        self._shows_slices = False
        for parameter in self._parameters:
            Origin.leave(parameter)
        for flat in self._flats:
            flat.hide()

    def own_of(self, index: int, *, is_gradient: bool) -> Tensor | None:
        """This worker's slice of a parameter, or of its gradient."""
        parameter = self._parameters[index]
        return parameter.grad if is_gradient else parameter.detach()

    def whole_of(self, index: int, own: Tensor) -> Tensor:
        """The whole of a slice that each worker has of a parameter; call it on all."""
        flat, number = self._places[index]
        if own.shape == flat.shapes[number]:  # it may be whole here
            own = own.reshape(-1)[flat.slice_of(number)]
        return flat.whole_of(number, own)

    @plainly
    def _brought(self, index: int, own: Tensor, is_gradient: bool) -> Tensor:
        """The whole of a slice that the script of each worker reads.

        Raises:
            TargetError: Another worker's does not.
        """
        flat, number = self._places[index]
        if self.is_behind():  # the others have done this before
            return flat.alone_of(number, own)
        steps = self._session.num_steps
        self._read_at, self._num_reads = steps, self._num_reads * (self._read_at == steps) + 1
        self._signs.append(f"reads/{steps}/{self._num_reads}/{index}/{is_gradient:d}")

        def exchange() -> Tensor:
            place = self._session.place
            if place.store is not None and place.distributed:
                self._check_read(place, f"{self._names[index]}{'.grad' * is_gradient}")
            return self.whole_of(index, own)

        return self.run(exchange)

    def _check_read(self, place: Place, name: str) -> None:
        assert place.store is not None
        absent = place.store.absent(
            self._signs[-1], place.rank, place.world_size, seconds=_READ_SECONDS
        )
        if absent:
            raise TargetError(
                f"worker {place.rank} reads {name} between two steps, and {_READ_SECONDS:g} s "
                f"later worker {', '.join(map(str, absent))} does not; each has a slice of it",
                hint="read it on all workers, and log it on one; torch.nn.utils.get_total_norm and "
                "clip_grad_norm_ bring nothing together",
            )
        # Who says a sign has seen all of the one before, and so nobody waits for the last but one.
        while len(self._signs) > 2:
            place.store.delete(f"{self._signs.pop(0)}/{place.rank}")

    def serve_script(self) -> None:
        """Let a script read no ``state_dict`` of slices, and all else between steps as if whole."""
        self._serves = True
        self.show_slices(gradients=False)
        for optimizer in self._session.optimizers:
            self._hooks += [
                optimizer.register_step_pre_hook(lambda *_: self._begin_update()),
                optimizer.register_step_post_hook(lambda *_: self._end_update()),
            ]
        shapes: dict[Tensor, torch.Size] = {
            p: self.shapes[name].shape for name, p in self._session.parameters.items()
        }
        self._hooks += refuse_saving(
            self._session.model,
            self._session.optimizers,
            lacks=lambda module: (
                not (self.is_readable or self._is_open) and any(True for _ in module.parameters())
            ),
            is_part=lambda optimizer: any(
                isinstance(value, Tensor) and value.dim() and value.shape != shapes[parameter]
                for parameter, state in optimizer.state.items()
                if parameter in shapes
                for value in state.values()
            ),
            is_finished=lambda: self._session.is_finished,
        )

    def _look_plainly(self, are_plain: bool) -> None:
        """See gradients as they are from now on, or as the script does."""
        if are_plain and not self._is_guarded:
            self._guard.__enter__()
        elif self._is_guarded and not are_plain:
            self._guard.__exit__(None, None, None)
        self._is_guarded = are_plain

    def _begin_update(self) -> None:
        self._updates, shows = True, self._shows_slices
        self.hide_slices()
        self._shows_slices = shows
        self._look_plainly(True)

    def _end_update(self) -> None:
        self._updates = False
        self._look_plainly(False)
        if self._shows_slices:
            self.show_slices(gradients=False)

    # Layers

    def _names_of_turn(self) -> Sequence[Subtree | None] | None:
        order = self._sums_order
        if order is None:
            return None
        return order.of_turn(order.holdings[self._session.place.rank].index(self._node))

    def _keep(self, node: int) -> None:
        """Keep a pass's gradients until the last one."""
        self._kept_nodes.add(node)
        for flat in self._flats:
            flat.keep(node, self._factor)

    def _came(self, index: int, parameter: Tensor) -> None:
        if not self._discards:
            self._used.add(index)
        if self._trains and not self._is_late and not self._places[index][0].awaits_gradients:
            raise outside_of_layer(f"the loss has a gradient of {self._names[index]}")

    # A step, as ``GradientReducer`` has it

    @plainly
    def begin(
        self, write_sums: object = None, *, num_passes: int | None = None, late: bool = False
    ) -> None:
        """Start a step; gradients that are still set stay in the sum.

        With ``late`` a script may clear them until ``take_earlier`` is called.
        """
        if self._layout() != self._trained:
            raise TargetError(
                "parameters were frozen or unfrozen after hf.prepare, and their states are shared",
                hint="freeze them before",
            )
        if self._members() != self._known_members and self._has_others():
            raise TargetError(
                "the model has parameters that it had not before the first step, and workers share "
                "the states of the others",
                hint="add or replace parameters before; or solve without " + option("shard"),
            )
        self._used.clear()
        self._factor = None
        self.keep_own()
        self._is_late = late
        if not late:
            self._carry()
        for unit in self._all:
            unit.free(shows=False)
        if not self.shares_weights:
            for unit in (self._rest, *map(self._units.__getitem__, self._order)):
                unit.gather()
        self._kept_nodes.clear()

    @plainly
    def take_earlier(self) -> None:
        """Take over the gradients of earlier steps that the script has left by now."""
        self._is_late = False
        self._carry()
        self.await_gradients()

    @property
    def seen(self) -> list[object]:
        """What changes where a script clears or changes gradients between two passes of a step."""
        return [flat.gradient_version for flat in self._flats]

    def _carry(self) -> None:
        self.carried = any([flat.begin_sums() for flat in self._flats])
        if self.carried and self._sums_order is not None and not self.in_rounds:
            raise TargetError(
                "gradients of an earlier step are still there, and this worker has its share of "
                "them only",
                hint="call optimizer.zero_grad() in every step; or solve with "
                + option("shard", "gradients"),
            )

    def _members(self) -> list[int]:
        """The ids of what the modules hold that were there at the last look."""
        return [*map(id, chain.from_iterable(map(dict.values, self._tables)))]

    def _has_others(self) -> bool:
        """Look at all modules, and whether one has parameters that are not shared."""
        model = self._session.model
        self._tables = [t for m in model.modules() for t in (m._parameters, m._modules)]
        self._known_members = self._members()
        return not {*map(id, model.parameters())} <= {*map(id, self._parameters)}

    def _layout(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def check_step(self, number: int, batch_sizes: Sequence[int]) -> None:
        """Refuse a batch of ``number`` samples in which workers would not meet in every pass."""
        if self.in_rounds and not all(share_out(number, batch_sizes or (number,))):
            raise TargetError(
                f"a batch of {number} samples leaves a virtual node without any, and workers that "
                f"share {self._shard} meet in every pass",
                hint="give the DataLoader drop_last=True",
            )

    def enter(self, node: int) -> None:
        """Begin a virtual node's pass."""
        self._is_open, self._trains, self._node = True, True, node
        self._num_passes += 1
        self._begin_turns()
        for unit in self._all:
            unit.goes_back = False  # gradients may have been taken of the whole model
        if self._reduced is not None:  # of the pass before: else its gradients would be there twice
            self._reduced.add_reduced()
        self._rest.gather()
        # Only with losses that are tried ahead: others are recorded from here on, and must hold all
        # that they read.
        if self.shares_weights and self._is_tried:
            for name in self._order[:1]:  # it comes while what is before it runs
                self._units[name].gather()
        elif not self.shares_weights and not self._is_tried:
            for unit in self._all:  # else each comes while others run
                unit.wait()
        self._rest.wait()
        if not self._is_late:
            self.await_gradients()

    def await_gradients(self) -> None:
        """Make room for gradients of what is whole for a pass; a script may have cleared them."""
        for unit in [self._rest] if self.in_rounds else self._all:
            if unit.is_whole:
                unit.await_gradients()

    def leave(self) -> None:
        """End the pass: what no hook has reduced or freed is now."""
        self._end_forward()
        self._go_back_to(-1)
        # Last: what is in no layer has all of its gradients only when the pass has ended.
        if self.in_rounds:
            self._reduce(self._rest)
        elif self._sums_order is not None:
            self._keep(node=self._node)
        else:
            for flat in self._flats:
                flat.keep_pass()
        if self.in_rounds and not self._knows_order:
            self._learn_order()
        self._trains = False
        self._end_pass()

    def _learn_order(self) -> None:
        """Let units have their turns as workers have run them; agree on rounds if not all alike."""
        told = crc32(repr(self._ran).encode())
        # The most, and by its negative the least: equal only where all workers say the same.
        own = torch.tensor([told, -told, randbits(48)]).to(self._session.device)
        most, least, self._order_name = map(int, self.largest(own).tolist())
        ran = [self._ran]
        if most != -least:
            ran = [[] for _ in range(self._session.place.world_size)]
            peers.all_gather_object(ran, self._ran)
        self._order = order_of_turns(ran, self._order)
        self._knows_order = True
        # Workers that leave a unit out may leave out others later, each in its own rounds.
        self._is_steady = most == -least and {*self._ran} == {*self._order}
        places = map(self._order.index, self._ran)
        self._num_expected = sum(after <= place for place, after in pairwise(places))
        self._num_passes = 0

    def _forget_order(self) -> None:
        """Let units have their turns as they were registered: joining workers know no other."""
        self._order, self._knows_order, self._is_steady = [*self._units], False, False

    def _check_alike(self, number: int) -> None:
        """Refuse to go on where units run again on this worker and not on another.

        Through the store: the others' collectives would take this one's for their own.
        """
        place = self._session.place
        if place.store is None or not place.distributed:
            return
        sign = f"turns/{self._order_name}/{self._num_passes}/{number}"
        if place.store.absent(sign, place.rank, place.world_size, seconds=_ALIKE_SECONDS):
            raise TargetError(
                f"repeated layers have run {number} times again in a pass on this worker, and "
                "not so often on another, where workers share states",
                hint="let all workers run layers equally often, or leave some out from the "
                "first pass on",
            )

    def _most_said(self, said: int) -> int:
        if self._is_alone:
            return said
        # A recorded loss must not seem to depend on what was said.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return int(self.largest(said))

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Go back in the body for the other workers alone: its loss has weight 0."""
        self._discards = True
        try:
            yield
        finally:
            for unit in self._all:
                unit.clear_gradients()
            self._discards = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let the model be called in the body for its answers, on all workers alike, in a step."""
        self.hide_slices()
        self._rest.wait()
        self._is_open = True
        self._begin_turns()
        try:
            yield
            self._end_forward()
        finally:
            self._end_pass()

    def _end_pass(self) -> None:
        for name in self._now:
            self._units[name].goes_back = False
        self._stays_whole = self._shows = False
        if self.shares_weights:
            for unit in self._all:
                unit.free(shows=False)
        self._begin_turns()  # one worker may call the model by itself, when all is whole
        self._is_open = False

    def arm(self, *, defer_last: bool = False) -> None:
        """Do nothing: gradients are reduced as layers have gone back."""

    def cutting(self) -> AbstractContextManager[None]:
        """Do nothing: units do not follow the buckets that torch.compile would cut at."""
        return NOTHING

    def launch_rest(self) -> None:
        """Begin the reductions that no pass has begun."""
        if self.in_rounds:
            return  # passes have begun all
        for unit in self._all:  # a worker may have had no pass
            unit.wait()
        order = self._sums_order
        if order is None:
            for flat in self._flats:
                flat.await_gradients()
                flat.reduce(self._factor)
            return
        for node in sorted({*order.holdings[self._session.place.rank]} - self._kept_nodes):
            for unit in self._all:
                unit.await_gradients()
            self._keep(node)  # it had no samples
        for flat in self._flats:
            flat.reduce_kept()

    @property
    def has_some(self) -> bool:
        """Whether a gradient has come in this step."""
        return bool(self._used)

    def unused(self) -> list[int]:
        """Indices of the trainable parameters without a gradient on this worker in this step."""
        if self.carried:
            return []
        return [
            n for n, p in enumerate(self._parameters) if p.requires_grad and n not in self._used
        ]

    def drop(self, indices: Iterable[int]) -> None:
        """Set gradients to None: what plain PyTorch shows for parameters that no pass used."""
        for index in indices:
            self._parameters[index].grad = None

    def multiply(self, factor: Tensor) -> None:
        """Multiply this worker's gradients of this step by a factor [] before they are summed."""
        self._factor = factor
        self.scale(factor)  # what earlier steps left

    def share_overflows(self, scaler: "torch.amp.GradScaler | None") -> None:
        """Let a scaler skip a step where another worker's share has an overflow."""
        if scaler is None or not scaler.is_enabled() or "_unscale_grads_" in vars(scaler):
            return
        unscale = scaler._unscale_grads_

        @plainly
        def together(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
            found = unscale(*args, **kwargs)
            for overflows in found.values() if self._session.place.distributed else ():
                overflows.copy_(self.run(partial(self.largest, overflows)))
            return found

        vars(scaler)["_unscale_grads_"] = together

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor of shape []."""
        for flat in self._flats:
            flat.scale(factor)

    @plainly
    def is_finite(self) -> bool:
        """Whether all numbers of this worker's shares are finite. Waits for the device."""
        return all(bool(p.detach().isfinite().all()) for p in self._parameters)

    @plainly
    def undo(self) -> None:
        """Drop a step that was broken off, to repeat it."""
        for unit in self._all:
            unit.goes_back = False
        self._is_open, self._trains, self._discards, self._reduced = False, False, False, None
        self._begin_turns()
        self._forget_order()
        for flat in self._laid:
            flat.undo()

    def close(self) -> None:
        """Remove the hooks; the parameters stay as they are."""
        super().close()
        self.hide_slices()
        self.treat("kept")
        vars(self._session.model).pop("__deepcopy__", None)
        self._own_hooks.remove()
        if clip_grad._get_total_norm == self._total_norm:
            clip_grad._get_total_norm = self._norm

    # Other workers

    @property
    def is_joining(self) -> bool:
        """Whether this worker has its share of the others still to come."""
        return self._session.place.is_outside

    def put_away(self) -> list[Flat]:
        """Free all between two steps, and forget what joining workers cannot know.

        It gives the vectors, in the order in which they are shared out.
        """
        self.hide_slices()
        self.free()
        self._forget_order()
        self.moves += 1
        return self._laid

    def take(self, place: Place, order: NodeOrder | None) -> None:
        """Be one of other workers from now on; shares have moved."""
        self._sums_order, self._origins = order, []
        for flat in self._laid:
            flat.take(all_workers(place), order)
        if self._serves:
            self.show_slices(gradients=True)

    # Outside of steps

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let the model be called in the body between steps, on all workers alike.

        A joining worker's script comes by what the others have done: it sees its own share alone.
        """
        shown = self._shows_slices
        self.hide_slices()
        self._is_alone = alone = self.is_behind()
        for flat in self._laid:
            flat.is_alone = alone
        # A gradient is of the own share, and torch.compile looks at a whole weight's gradient.
        hidden = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in hidden:
            parameter.grad = None
        if not self.shares_weights:
            self.make_whole(runs=True)
        for unit in self._all if not self._stays_whole else ():
            unit.free(shows=False)
        try:
            with self.reading():
                yield
        finally:
            for unit in self._all:
                unit.free()
            for parameter, gradient in hidden:
                if parameter.grad is None:
                    parameter.grad = gradient
            self._is_alone = False
            for flat in self._laid:
                flat.is_alone = False
            if shown:
                self.show_slices(gradients=True)

    @plainly
    def make_whole(self, *, runs: bool = False) -> None:
        """See ``Units``."""
        self.hide_slices()
        super().make_whole(runs=runs)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Let a loss function be tried in the body, on all workers alike.

        Raises:
            TargetError: It reads weights where a step will not have them.
        """
        with self.open():
            yield
        self._is_tried = True

    def largest(self, number: float | Tensor) -> Tensor:
        """Float64, of a number's shape: the largest of all workers, on this worker's device."""
        found = torch.zeros((), dtype=torch.float64, device=self._session.device) + number
        if self._session.place.distributed:
            peers.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        return found

    @plainly
    def digest(self, tensors: Mapping[str, Tensor]) -> str:
        """The digest of trained tensors, whose parameters are gathered one unit at a time."""
        places = self.places()
        return digest_of_pieces(
            InPieces(name, tensor.dtype, *self._pieces(places, name, tensor))
            for name, tensor in sorted(tensors.items())
        )

    def _pieces(
        self, places: dict[int, tuple[Flat, int]], name: str, tensor: Tensor
    ) -> tuple[tuple[int, ...], Iterable[Tensor]]:
        if id(tensor) not in places:
            return tuple(tensor.shape), [tensor]
        flat, number = places[id(tensor)]
        return tuple(flat.shapes[number]), self.gathered(flat, number)

    def _total_norm(
        self,
        tensors: Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """``clip_grad_norm_``'s norm, over all workers' slices where gradients are such."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._norm_of(given, norm_type, error_if_nonfinite, foreach)

    @plainly  # to scripts, slices look whole
    def _norm_of(
        self, given: list[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
    ) -> Tensor:
        grads = [*map(get_grad, self._parameters)]
        own = {id(grad): n for n, grad in enumerate(grads) if grad is not None}
        asked = {id(tensor) for tensor in given}
        if asked & own.keys() and not asked <= own.keys():
            raise TargetError(
                "a norm is taken over gradients that workers share, and others",
                hint="clip the gradients of each model by themselves",
            )
        # Of nothing another model asks, whose worker has no part of it.
        if not asked or not asked <= own.keys() or not self._session.place.distributed:
            return self._norm(given, norm_type, error_if_nonfinite, foreach)
        indices, power = [own[id(tensor)] for tensor in given], float(norm_type)
        exchange = self._norm_of_whole if self._sums_order is not None else self._norm_of_parts
        norm = self.run(lambda: exchange(indices, power, foreach))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the total norm of order {power} for gradients is not finite")
        return norm

    def _norm_of_parts(self, indices: Sequence[int], power: float, foreach: bool | None) -> Tensor:
        """The norm of what each worker owns of the gradients, and of these."""
        dtype = self._parameters[indices[0]].dtype if indices else torch.float32
        grads = [(*self._places[n], get_grad(self._parameters[n])) for n in indices]
        # What it owns, not what it keeps: numbers that two workers keep would count twice.
        owned = [flat.owned_of(number, g) for flat, number, g in grads if g is not None]
        # A worker without a share has no gradient to tell the dtype by.
        norm = self._norm([own for own in owned if own.numel()], power, False, foreach)
        norm = norm.to(self._session.device, torch.float64)
        is_most = math.isinf(power)
        norm = norm if is_most else norm**power
        if self._session.place.distributed:
            peers.all_reduce(norm, op=torch.distributed.ReduceOp.MAX if is_most else _SUM)
        return (norm if is_most else norm ** (1 / power)).to(dtype)

    def _norm_of_whole(self, indices: Sequence[int], power: float, foreach: bool | None) -> Tensor:
        """The norm of each whole gradient, and of these: no bit of it depends on the shares."""
        norms: dict[int, Tensor] = {}
        # A vector at a time is whole. The order of members is the same on all workers, and so is
        # what is asked for: each exchange is a collective.
        for flat in self._flats:
            asked = [(n, index) for n, (index, _) in enumerate(flat.members) if index in indices]
            whole = flat.whole_sums() if asked else torch.empty(0)
            for number, index in asked:
                start, end = flat.bounds[number]
                part = whole[start:end].view(flat.shapes[number])
                norms[index] = self._norm([part], power, False, foreach)
        return self._norm([norms[index] for index in indices], power, False, foreach)

"""Units of a model whose weights are gathered before they run, and whose gradients go behind them.

Each repeated layer is a unit, and the rest is one. A unit's weights come one unit ahead, in the
forward and again in the backward pass, and go behind it. Its gradients are reduced to their owners
when it has gone back. Units have their turns in one order on all workers, so their collectives
meet. A worker whose samples leave a unit out takes part in its turn all the same::

    order 0, 1, 2    one worker runs 0, 2: before 2 it gathers and frees 1
                     going back from 0 it first gathers 1, and adds nothing to its reduction

A unit that runs again begins another round of all turns, but for one that runs twice in a row.
Where workers may choose unlike units, one may need more rounds than another. Then they agree at
the end of each round whether another one follows, in which some run nothing.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from ...schema.errors import TargetError
from ...schema.options import option
from ..gradients import NOTHING
from ..invariant import Subtree
from ..nested_tensors import tensors_in
from ..repeated_layers import when_back, when_going_back, when_loss_is_back
from ..setup import is_elementwise
from .flats import Flat

P = ParamSpec("P")


def check_elementwise(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that cannot update slices of parameters."""
    for optimizer in optimizers:
        if not is_elementwise(optimizer):
            raise TargetError(
                f"{type(optimizer).__name__} is none of torch's optimizers that update each "
                "number by itself, and workers hold slices of parameters",
                hint="use Adam, AdamW or SGD; or solve without " + option("shard"),
            )


_OVER, _PAUSED, _GOES_ON = range(3)
"""What a worker says at a round's end: its forward pass is over, or a call of its model is, after
which another one may come; or a unit runs for which it needs another round."""

_NOT_HERE = (
    "the model was called outside of job.backward and job.evaluation, where this worker has only "
    "a share of its weights"
)


def outside_of_layer(said: str) -> TargetError:
    """What refuses a use of a weight that is not here."""
    return TargetError(
        f"{said} outside of its layer, where this worker has only a share of it",
        hint="call the layer; for a penalty on weights take the optimizer's weight_decay, or solve "
        f"with {option('shard', 'optimizer')}",
    )


def _unseen(method: Callable[P, None]) -> Callable[P, None]:
    """A method whose operators are the runtime's own: no mode that a script's pass is in sees them.

    A recorded loss would hold views of vectors whose memory goes.
    """

    @functools.wraps(method)
    def run(*values: P.args, **options: P.kwargs) -> None:
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else NOTHING:
            method(*values, **options)

    return run


class Unit:
    """Parameters that are gathered together: a repeated layer, or all that is in none.

    Attributes:
        goes_back: Whether its backward pass has begun, and not ended.
    """

    def __init__(self, flats: Sequence[Flat]) -> None:
        self.flats = flats
        self.goes_back = False

    @property
    def is_whole(self) -> bool:
        """Whether all weights are here."""
        return all(flat.is_whole for flat in self.flats)

    @_unseen
    def gather(self) -> None:
        """Begin to gather the weights."""
        for flat in self.flats:
            flat.gather()

    @_unseen
    def wait(self) -> None:
        """Wait until the weights are whole."""
        for flat in self.flats:
            flat.wait()

    @_unseen
    def show(self) -> None:
        """Have whole weights as the script knows them."""
        for flat in self.flats:
            flat.show()

    @_unseen
    def free(self, *, shows: bool = True) -> None:
        """Keep this worker's slices only."""
        for flat in self.flats:
            flat.free(shows=shows)

    def await_gradients(self) -> None:
        """Make room for whole gradients."""
        for flat in self.flats:
            flat.await_gradients()

    def clear_gradients(self) -> None:
        """Set the gradients that have come to 0: a mean over nothing has none that are numbers."""
        for flat in self.flats:
            flat.clear_gradients()

    def add_reduced(self) -> None:
        """Wait for the reductions that were begun."""
        for flat in self.flats:
            flat.add_reduced()


class UnitTurn(NamedTuple):
    """A unit's turn in a pass: its place among the turns, its name, and whose turn came before."""

    place: int
    name: str
    before: str | None


class Units:
    """The units of a model on one worker, and the pass that runs.

    Args:
        rest: What is in no repeated layer; whole for a pass or longer.
        layers: The repeated layers, by name.
        names: Of the parameters, by their index.
        shares_weights: Whether weights are gathered for each pass.
        in_rounds: Whether gradients are reduced in each pass.
        names_of_turn: Gives [workers] the virtual node whose gradient each has now; None where all
            add up.
        most_of: The largest number that a worker says; None where all run units alike.
        check_alike: Refuses a number that not all workers say in this pass.
    """

    def __init__(
        self,
        rest: Unit,
        layers: Mapping[str, Unit],
        names: Sequence[str],
        *,
        shares_weights: bool,
        in_rounds: bool,
        names_of_turn: Callable[[], Sequence[Subtree | None] | None] = lambda: None,
        most_of: Callable[[int], int] | None = None,
        check_alike: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._most_of, self._check_alike, self._is_steady = most_of, check_alike, False
        self._rest, self._units = rest, dict(layers)
        self._names, self._names_of_turn = names, names_of_turn
        self.shares_weights, self.in_rounds = shares_weights, in_rounds
        self._order = [*self._units]  # of turns
        self._now: list[str] = []  # units that have had a turn in this pass
        self._next = 0  # place in the order
        self._to_go_back: list[UnitTurn] = []
        self._has_graph = self._flows = False  # whether gradients go back to what comes now
        self._ran: list[str] = []  # units that this worker has run in this pass
        self._is_over = False  # whether its forward pass is
        self._num_again = self._num_expected = 0  # how often units run that have had their turns
        self._has_idled = False  # whether a unit went back that no gradient had reached
        self._reduced: Unit | None = None
        self._is_open = self._trains = self._stays_whole = self._discards = False
        self._shows = False  # whether weights are whole as the script knows them but in a pass
        self._reruns = False  # whether all units run again, forward, in a backward pass
        self._is_late = False  # whether gradients of earlier steps are still the script's
        self._turning = ""  # the unit that the next pass begins with, too
        self._factor: Tensor | None = None
        self._hooks: list[RemovableHandle] = []
        for unit in self._all:
            for flat in unit.flats:
                for number, (index, _) in enumerate(flat.members):
                    flat.asks(number, partial(self._come_outside, unit, names[index]))

    @property
    def _all(self) -> list[Unit]:
        return [self._rest, *self._units.values()]

    @property
    def _flats(self) -> list[Flat]:
        return [flat for unit in self._all for flat in unit.flats]

    # A unit in a pass

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Gather units before their modules run, and free them behind."""
        self._hooks += [
            hook
            for name, module in modules.items()
            for hook in (
                module.register_forward_pre_hook(
                    # Before hooks of the script's, which may read weights (pruning).
                    partial(self._before_forward, name),
                    prepend=True,
                    with_kwargs=True,
                ),
                module.register_forward_hook(lambda *given, name=name: self.after(name, given[-1])),
            )
        ]

    # A module that is compiled in place is traced with its hooks, whose streams no graph can hold.
    @_disable_dynamo
    def _before_forward(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._is_open:
            raise TargetError(_NOT_HERE, hint="call it inside of these, on all workers alike")
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise TargetError(
                f"torch.func transforms a call of {name}, whose weights workers share",
                hint="take torch.autograd in its place; or solve without " + option("shard"),
            )
        return self.before(name, args, kwargs)

    def before(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make a unit whole before it runs: the inputs to give to it instead; None for these."""
        unit = self._units[name]
        if unit.goes_back:  # activations are computed again
            unit.wait()
            if self._reruns:
                self._next = len(self._order)
                self._take_back(unit, self._now[-1] if self._now else None)
            return None
        self._has_graph, self._is_over = torch.is_grad_enabled(), False
        self._come_to(name, (args, kwargs))
        self._ran.append(name)
        self._come_whole(unit)
        # The next unit's weights come while this one computes: two units are whole at most.
        if self.shares_weights and self._next < len(self._order):
            self._units[self._order[self._next]].gather()
        self._now.append(name)
        if self._reruns:
            return None
        return when_back(args, kwargs, partial(self._went_back, self._turn()))

    def _turn(self) -> UnitTurn:
        return UnitTurn(
            len(self._now) - 1, self._now[-1], self._now[-2] if len(self._now) > 1 else None
        )

    def _come_to(self, name: str, inputs: Any) -> None:
        """Let units have their turns that this worker leaves out before another one."""
        # A gather is a collective. So all workers gather all units in one order, whichever layers
        # a worker's samples run through; one that comes again begins the order anew.
        place = self._order.index(name)
        if place < self._next:
            self._num_again += 1
            if self._num_again > self._num_expected:
                self._expect(self._num_again)
            if self._now[-1:] == [name] and not self._agrees:
                return
            self._end_round(_GOES_ON)
            self._next = 0
        if place > self._next:
            self._flows = any(tensor.requires_grad for tensor in tensors_in(inputs))
            self._leave_out(place)
        self._next = place + 1

    def _leave_out(self, end: int) -> None:
        """Let units have their turns up to a place in the order, without running them."""
        for name in self._order[self._next : end]:
            unit = self._units[name]
            if self._goes(name):
                unit.wait()
                unit.free(shows=False)
            elif not self.shares_weights:
                self._come_whole(unit)
            self._now.append(name)
            if self._has_graph and (self._flows or any(flat.is_trained for flat in unit.flats)):
                self._to_go_back.append(self._turn())
        self._next = max(self._next, end)

    def _come_whole(self, unit: Unit) -> None:
        """Wait for a unit's weights, with room for gradients that no pass reduces."""
        if not unit.is_whole:
            unit.wait()
            if self._trains and not self.in_rounds and not self._is_late:
                unit.await_gradients()

    def _come_outside(self, unit: Unit, name: str) -> None:
        """Make a unit whole for what reads its weights ahead of it, or outside.

        Raises:
            TargetError: They are gathered for layers alone, on all workers together.
        """
        if self.shares_weights:
            raise outside_of_layer(f"the loss reads {name}")
        self._come_whole(unit)

    def _goes(self, name: str) -> bool:
        return self.shares_weights and not self._stays_whole and name != self._turning

    @_disable_dynamo
    def after(self, name: str, output: Any) -> None:
        """Free a unit that has run."""
        unit = self._units[name]
        if unit.goes_back:
            return
        if self._goes(name):
            unit.free(shows=False)
        elif self._shows:
            unit.show()
        if self._reruns:
            return
        turn = self._turn()
        self._flows = when_going_back(output, partial(self._goes_back, turn))
        if self._flows:
            self._to_go_back.append(turn)

    @property
    def _agrees(self) -> bool:
        """Whether workers may need unlike numbers of rounds, in which they exchange something."""
        if self._most_of is None or self._is_steady:
            return False
        gathers = self.shares_weights and not self._stays_whole
        return gathers or (self.in_rounds and self._trains)

    def _end_round(self, said: int) -> None:
        """Let the units have their turns that no worker needs to run any more in this round."""
        if not self._is_open:
            return
        self._leave_out(len(self._order))
        while self._most_of is not None and self._agrees:
            most = self._most_of(said)
            if most == said:
                return
            if most == _GOES_ON:  # for the others alone
                self._next = 0
                self._leave_out(len(self._order))

    def _end_forward(self) -> None:
        """End the last round."""
        if not self._is_over:
            self._is_over = True
            self._end_round(_OVER)
            if self._num_again != self._num_expected:
                self._expect(self._num_again)

    def _expect(self, number: int) -> None:
        """Expect units to run again so often, in this pass and the next."""
        if self._is_steady and self._trains:  # else all agree on each round
            self._check_alike(number)
            self._num_expected = number

    @_disable_dynamo
    def _model_runs(self) -> None:
        """Have what is in no layer as it runs, in a call of the model between passes."""
        if self._shows:
            self._rest.wait()

    def _model_ran(self, output: Any) -> None:
        """End a call of the model before its loss: a script may let workers meet in that."""
        self._end_round(_PAUSED)
        if self.shares_weights and self._trains:
            when_loss_is_back(output, self._gather_last)
        for unit in self._all if self._shows else ():
            unit.show()

    def _gather_last(self) -> None:
        """Gather what goes back first, while what came after all layers goes back."""
        # Not before: while the loss is computed, when activations are most, no layer is whole.
        self._end_forward()
        for turn in self._to_go_back[-1:]:
            self._units[turn.name].gather()

    def _goes_back(self, turn: UnitTurn) -> None:
        self._end_forward()
        self._go_back_to(turn.place)
        unit = self._units[turn.name]
        if self.shares_weights and torch.is_grad_enabled():
            raise TargetError(
                "the loss takes gradients of gradients, and layers' weights go when they have "
                "gone back",
                hint=f"solve with {option('shard', 'optimizer')}",
            )
        unit.goes_back = True
        if not self._reruns or self._now:  # else it comes when units run again
            self._take_back(unit, turn.before)

    def _go_back_to(self, place: int) -> None:
        """End the turns after a place: no more gradient reaches them on this worker."""
        # Their reductions are collectives, for which the other workers wait: so they have their
        # turns all the same, with gradients of zeros.
        with torch.no_grad():
            while self._to_go_back and self._to_go_back[-1].place > place:
                turn = self._to_go_back[-1]
                unit = self._units[turn.name]
                if not unit.goes_back:
                    self._has_idled = True
                    self._take_back(unit, turn.before)
                self._went_back(turn)

    def _take_back(self, unit: Unit, before: str | None) -> None:
        unit.wait()
        if self._trains and self.in_rounds:
            for flat in unit.flats:
                flat.expect_gradients()
        # The unit whose turn is next in the backward pass, while this one goes back.
        if self.shares_weights and before is not None:
            self._units[before].gather()

    def _went_back(self, turn: UnitTurn) -> None:
        unit = self._units[turn.name]
        unit.goes_back = False
        if self._to_go_back[-1:] == [turn]:
            self._to_go_back.pop()
        if self.in_rounds and self._trains:
            self._reduce(unit)
        if self.shares_weights and turn.name != self._turning:
            unit.free(shows=False)

    def _begin_turns(self) -> None:
        self._now, self._to_go_back, self._next = [], [], 0
        self._has_graph, self._flows, self._is_over = self._trains, False, False
        self._ran, self._num_again = [], 0

    def _reduce(self, unit: Unit) -> None:
        """Reduce a unit's gradients while the next unit goes back."""
        # The one before is waited for: the whole gradients of two units exist at most.
        if self._reduced is not None:
            self._reduced.add_reduced()
        if self._discards:
            unit.clear_gradients()
        turn = self._names_of_turn()
        for flat in unit.flats:
            flat.reduce(self._factor, turn)
        self._reduced = unit

    def wait(self) -> None:
        """Wait for all sums: afterwards each gradient is this worker's slice."""
        for unit in self._all:
            unit.add_reduced()
            unit.free()
        self._reduced = None
        for flat in self._flats:
            flat.give_gradients()

    # Outside of passes

    @property
    def is_readable(self) -> bool:
        """Whether all parameters have their whole values."""
        return all(unit.is_whole for unit in self._all)

    def in_turn(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's whole value, a unit at a time. Call it on all workers."""
        for unit in self._all:
            for flat in unit.flats:
                with flat.whole():
                    for number, (index, _) in enumerate(flat.members):
                        yield self._names[index], flat.whole_kept(number)

    def make_whole(self, *, runs: bool = False) -> None:
        """Bring all units to every worker, until the next pass ends.

        With ``runs`` weights are as they run, for passes; else as the script knows them.
        """
        self._shows = not runs
        for unit in self._all:
            (unit.wait if runs else unit.show)()
        self._is_open = self._stays_whole = True

    def free(self) -> None:
        """Let parameters be slices again, after ``make_whole``."""
        self._stays_whole = self._shows = False
        for unit in self._all:
            unit.free()

    def keep_own(self) -> None:
        """Keep what a script wrote to weights that are whole, which then go."""
        for flat in self._flats if self._stays_whole else ():
            flat.keep_own()
        self.free()

    def close(self) -> None:
        """Remove the hooks; the parameters stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def places(self) -> dict[int, tuple[Flat, int]]:
        """Parameter, by its id, -> its vector and its number in that."""
        return {
            id(parameter): (flat, number)
            for flat in self._flats
            for number, (_, parameter) in enumerate(flat.members)
        }

    def gathered(self, flat: Flat, number: int) -> Iterator[Tensor]:
        """Yield a member's whole value, which goes after; iterate it on all of the workers."""
        with flat.whole():
            yield flat.whole_kept(number).clone()  # numpy would keep the storage from being freed

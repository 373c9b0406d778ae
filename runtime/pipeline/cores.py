"""Selective recomputation: the backward pass computes the core of attention again.

The core is what lies between attention's linear layers: scores, softmax, dropout and context. Its
activations grow with the square of the sequence, and few operations make them again (Korthikanti
et al., 2022, section 5).

In most models no module is the core alone, and a stage may be a graph of operators. So cores are
found while a pass runs. Its functions are cut wherever one reads a parameter. What lies between two
cuts is a core if it holds a kernel of attention, or a softmax and a product behind it. That is
known at the second cut only. So all functions between two cuts are recorded, with what autograd
saves of them; at the cut a core lets go of these tensors. ``torch.utils.checkpoint`` would have to
be told where the core begins.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ...devices.backend import DeviceBackend, initialized
from ...devices.host import TORCH_DEVICE as HOST
from ...schema.errors import TargetError
from ...schema.options import option

_KERNEL = "scaled_dot_product"
_SOFTMAX = ("softmax", "_softmax")
_PRODUCTS = ("matmul", "bmm", "einsum")
# What attention is made of and draws no random numbers. Before any other function the random state
# is noted, so a name that is missing here costs time only.
_DRAWS_NOTHING = frozenset({
    "__get__", "__getitem__", "add", "add_", "bmm", "cat", "chunk", "clone", "contiguous", "detach",
    "div", "expand", "flatten", "float", "masked_fill", "matmul", "movedim", "mul", "narrow", "neg",
    "new_ones", "permute", "repeat_interleave", "reshape", "select", "slice", "softmax", "split",
    "squeeze", "sub", "t", "to", "transpose", "tril", "type_as", "unbind", "unflatten", "unsqueeze",
    "view", "where",
})  # fmt: skip
_NO_FUNCTIONS = torch._C._disabled_torch_function_impl
_Function = Callable[..., Any]
_RandomStates = tuple[Tensor, list[tuple[DeviceBackend, Any]]]


class AttentionCores(TorchFunctionMode):
    """Runs a forward pass whose attention cores are recomputed in the backward pass.

    Results and gradients have the bits of a pass that keeps everything: the same functions run on
    the same values, and draw the same random numbers.

    Args:
        noticed: Called at each cut with what was recorded, before it lets go of anything.

    Attributes:
        between: What was recorded since the last cut.
    """

    def __init__(self, noticed: "Callable[[Between], None] | None" = None) -> None:
        super().__init__()
        self._noticed = noticed
        self.between = Between()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._cut()

    def __torch_function__(
        self,
        func: _Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function: cut where it reads a parameter, else record it."""
        named = kwargs or {}
        read = list(_tensors((args, named)))
        if any(map(_ends, read)):
            if _name(func) != "__get__":  # which asks for its type, say
                self._cut()
            return func(*args, **named)
        # Inside of an autograd function nothing is recorded: it saves what it needs by itself.
        if not torch.is_grad_enabled():
            return func(*args, **named)
        if any(tensor.requires_grad or self.between.has_made(tensor) for tensor in read):
            return self.between.run(func, args, named, read)
        return func(*args, **named)

    def _cut(self) -> None:
        between, self.between = self.between, Between()
        between.end(self._noticed)


class Between:
    """The functions between two cuts, and what is needed to run them again.

    Attributes:
        is_core: Whether they are the core of an attention.
        given: The tensors that they read and did not make.
        saved: What autograd saves of them.
    """

    def __init__(self) -> None:
        self.is_core = False
        self.given: list[_Given] = []
        self.saved: list[_Saved] = []
        self._calls: list[_Call] = []
        self._places: dict[int, tuple[ref[Tensor], int, bool]] = {}
        self._num_places = 0
        self._shapes: list[torch.Size] = []
        self._again: dict[int, Tensor] = {}
        self._has_softmax = False
        self._autocast: list[tuple[str, bool, torch.dtype]] = []

    @property
    def has_begun(self) -> bool:
        """Whether a function was recorded."""
        return bool(self._calls)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether one of the functions made a tensor."""
        known = self._places.get(id(tensor))
        return known is not None and known[0]() is tensor and known[2]

    def run(
        self, function: _Function, arguments: tuple[Any, ...], named: dict[str, Any],
        read: list[Tensor],
    ) -> Any:  # fmt: skip
        """Run and record a function that reads these tensors."""
        name = _name(function)
        if not self._calls:
            self._autocast = _autocast_of(read)
        random = _random_states() if _may_draw(name, arguments, named) else None
        # Taken before the function runs, which may write in place to what it reads.
        versions = {id(tensor): tensor._version for tensor in read}
        with saved_tensors_hooks(self._pack, _unpack):
            answer = function(*arguments, **named)
        made = list(_tensors(answer))
        if not made and answer is not None:
            return answer  # a number, such as a size
        read_from = _mapped((arguments, named), lambda tensor: self._place_of(tensor, versions))
        makes = tuple(self._place(tensor, is_made=True) for tensor in made)
        self._calls.append(_Call(function, read_from[0], read_from[1], makes, random))
        self._has_softmax |= name in _SOFTMAX
        is_product = any(word in name for word in _PRODUCTS)
        self.is_core |= _KERNEL in name or (self._has_softmax and is_product)
        return answer

    def _pack(self, tensor: Tensor) -> "_Saved":
        saved = _Saved(self, len(self.saved), tensor.detach())
        self.saved.append(saved)
        return saved

    def _place_of(self, tensor: Tensor, versions: dict[int, int]) -> "_Place":
        before, place = self._num_places, self._place(tensor, is_made=False)
        if self._num_places > before:
            # Detached, or functions would keep themselves alive where autograd functions of others
            # lie between them.
            version = versions[id(tensor)]
            self.given.append(_Given(place, tensor.detach(), tensor.requires_grad, version))
        return place

    def _place(self, tensor: Tensor, *, is_made: bool) -> "_Place":
        known = self._places.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self._places[id(tensor)] = ref(tensor), self._num_places, is_made
            self._num_places += 1
        return _Place(known[1])

    def end(self, noticed: "Callable[[Between], None] | None") -> None:
        """Let go of what can be computed again; if this is no core, of nothing else."""
        # What was written to would not be the same again.
        self.is_core &= all(given.value._version == given.version for given in self.given)
        if noticed is not None and self._calls:
            noticed(self)
        if self.is_core:
            self._shapes = [saved.value.shape for saved in self.saved if saved.value is not None]
            for saved in self.saved:
                saved.value = None
        else:
            self._calls, self.given = [], []
        self.saved, self._places = [], {}

    def saved_again(self, number: int) -> Tensor:
        """A tensor that autograd saved; the first to be asked for runs all functions again."""
        if number not in self._again:
            self._again = dict(enumerate(self.run_again()))
        return self._again.pop(number)  # autograd asks once, and its memory then goes

    def run_again(self) -> list[Tensor]:
        """What autograd saves of the functions, which are run again until all of it is there.

        So the last product is not computed: autograd saves its factors before.

        Raises:
            TargetError: A tensor that they read was written to since, or they do not do the same
                again.
        """
        found: list[Tensor] = []
        values: dict[_Place, Tensor] = {}

        def keep(tensor: Tensor) -> None:
            found.append(tensor.detach())
            if len(found) == len(self._shapes):
                raise _AllMade

        for given in self.given:
            if given.value._version != given.version:
                raise _refusal("reads a tensor that is written to before the backward pass")
            values[given.place] = given.value.detach().requires_grad_(given.wants_gradient)
        # Each value goes after its last reader, as it went in the first run: else a recomputation
        # would take the memory of the whole core at once.
        last_reader = {
            place: number for number, call in enumerate(self._calls) for place in call.reads
        }
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, is_on, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, is_on, cache_enabled=False))
            stack.enter_context(_same_random_states())
            stack.enter_context(suppress(_AllMade))
            stack.enter_context(saved_tensors_hooks(keep, _unpack))
            for number, call in enumerate(self._calls):
                made = call.run(values)
                values.update(zip(call.makes, made, strict=True))
                for place in (*call.reads, *call.makes):
                    if last_reader.get(place, number) <= number:
                        values.pop(place, None)
        if [tensor.shape for tensor in found] != self._shapes:
            raise _refusal("does something else when it is run again")
        return found


class _AllMade(Exception):
    """What autograd saves was made again; what follows is not needed."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The number of a tensor that a core reads or makes."""

    number: int


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor that a core reads, without its graph."""

    place: _Place
    value: Tensor
    wants_gradient: bool
    version: int


class _Saved:
    """A tensor that autograd saves; None where the core makes it again."""

    __slots__ = ("between", "number", "value")

    def __init__(self, between: Between, number: int, value: Tensor) -> None:
        self.between, self.number = between, number
        self.value: Tensor | None = value


def _unpack(saved: Any) -> Tensor:
    value: Tensor | None = saved.value
    return saved.between.saved_again(saved.number) if value is None else value


@dataclass(frozen=True, slots=True)
class _Call:
    """A function, its arguments with places for tensors, and the places of what it makes."""

    function: _Function
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    makes: tuple[_Place, ...]
    random: _RandomStates | None

    @property
    def reads(self) -> list[_Place]:
        """The places of the tensors that it reads."""
        return list(_leaves((self.arguments, self.named), _Place))

    def run(self, values: dict[_Place, Tensor]) -> list[Tensor]:
        """Run it again. Returns what it makes."""
        if self.random is not None:
            _restore(self.random)
        arguments, named = _mapped((self.arguments, self.named), values.__getitem__, _Place)
        return list(_tensors(self.function(*arguments, **named)))


def _ends(tensor: Tensor) -> bool:
    """Whether a function of a tensor is in no core: a parameter, or of a class with functions."""
    kind = type(tensor)
    if isinstance(tensor, nn.Parameter):
        return True
    if kind is not Tensor and kind.__torch_function__ is not _NO_FUNCTIONS:
        return True
    return isinstance(tensor._base, nn.Parameter)  # a view of one, such as its transpose


def _name(function: _Function) -> str:
    """The name of a function, a method, or an operator without its overload."""
    return str(getattr(function, "__name__", "")).split(".")[0]


def _may_draw(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a function may draw random numbers."""
    if name == _KERNEL + "_attention":
        positional = arguments[4] if len(arguments) > 4 else 0.0
        return bool(named.get("dropout_p", positional))
    return name not in _DRAWS_NOTHING


def _tensors(value: Any) -> Iterator[Tensor]:
    return _leaves(value, Tensor)


def _leaves(value: Any, kind: type) -> Iterator[Any]:
    """What is of a kind in nested tuples, lists and dictionaries."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _leaves(entry, kind)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _leaves(entry, kind)


def _mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """A structure with everything of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(entry, change, kind) for entry in value)
    if type(value) is dict:
        return {name: _mapped(entry, change, kind) for name, entry in value.items()}
    return value


def _autocast_of(tensors: list[Tensor]) -> list[tuple[str, bool, torch.dtype]]:
    """By kind of device: whether autocast is on, and to which type it casts."""
    kinds = sorted({HOST, *(tensor.device.type for tensor in tensors)})
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    ]


def _random_states() -> _RandomStates:
    return torch.get_rng_state(), [(b, b.random_states()) for b in initialized()]


def _restore(states: _RandomStates) -> None:
    torch.set_rng_state(states[0])
    for backend, state in states[1]:
        backend.restore_random_states(state)


@contextmanager
def _same_random_states() -> Iterator[None]:
    """Leave the random streams as they are, whatever is drawn inside."""
    before = _random_states()
    try:
        yield
    finally:
        _restore(before)


def _refusal(said: str) -> TargetError:
    return TargetError(
        f"the core of an attention {said}, so it cannot be recomputed",
        hint=f"solve with {option('recompute', False)}, or compute the attention "
        "without in-place functions",
    )

"""Record the operators of a step from its batch to its loss, and run them again on other samples.

A script's own loop is no function that could be called again. But its operators can: PyTorch's
dispatcher shows each one to a mode. The shapes stay as they were, so numbers that the script has
computed from them stay right; only the samples within the batch are replaced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_SCALED = {torch.ops.aten.mul, torch.ops.aten.div}
_CROSS_ENTROPIES = {torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}
_KEEPING = {torch.ops.aten.clamp, torch.ops.aten.clamp_min}
_PASSED = _SCALED | {
    torch.ops.aten.alias,
    torch.ops.aten.neg,
    torch.ops.aten.squeeze,
    torch.ops.aten.view,
    torch.ops.aten._to_copy,
}


@dataclass(frozen=True, slots=True)
class _Number:
    """A tensor of the recording, in place of itself."""

    number: int


@dataclass(frozen=True, slots=True)
class _Operator:
    function: Any
    arguments: Any  # (positional, by name), with numbers for tensors
    outputs: tuple[int | None, ...]  # of all leaves of what it returned; None is no tensor
    changed: tuple[int, ...]  # tensors that it writes to
    drawn: tuple[Tensor, ...] | None  # its outputs, where it draws random numbers


@dataclass(frozen=True, slots=True)
class Slice:
    """The operators that a loss depends on.

    Attributes:
        root: The loss's number.
        operators: In order.
        leaves: Number -> a tensor from outside, or one that was drawn.
    """

    root: int
    operators: tuple[_Operator, ...]
    leaves: dict[int, Tensor]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The kinds of numbers that come from outside."""
        return {leaf.dtype for leaf in self.leaves.values()}

    def _divisor(self) -> tuple[int | None, bool, bool]:
        """(number of the divisor, whether it is a cross entropy's, whether it divides at last)."""
        made = {n: operator for operator in self.operators for n in operator.outputs}
        number: int | None = self.root
        while number in made:
            operator = made[number]
            packet = getattr(operator.function, "overloadpacket", None)
            inputs = [v for v in operator.arguments[0] if isinstance(v, _Number)]
            if packet in _CROSS_ENTROPIES:
                return operator.outputs[1], True, True
            if packet is torch.ops.aten.div and len(inputs) == 2:
                return inputs[1].number, False, True
            number = inputs[0].number if packet in _PASSED and inputs else None
        for operator in self.operators:
            if getattr(operator.function, "overloadpacket", None) in _CROSS_ENTROPIES:
                return operator.outputs[1], True, False
        return None, False, False

    @property
    def divisor(self) -> int | None:
        """The number of what the loss is divided by at last; None where that is no tensor.

        A cross entropy divides by its total weight, also where it is a term of the loss.
        """
        return self._divisor()[0]

    @property
    def denominator(self) -> int | None:
        """The divisor before it was kept from being nothing."""
        made = {n: operator for operator in self.operators for n in operator.outputs}
        number = self.divisor
        while number in made:
            operator = made[number]
            inputs = [v for v in operator.arguments[0] if isinstance(v, _Number)]
            packet = getattr(operator.function, "overloadpacket", None)
            if packet not in _KEEPING or len(inputs) != 1:
                break
            number = inputs[0].number
        return number

    @property
    def divides_by_targets(self) -> bool:
        """Whether the divisor is a cross entropy's total weight."""
        return self._divisor()[1]

    @property
    def divides_at_last(self) -> bool:
        """Whether the whole loss is divided by it, and not only a term."""
        return self._divisor()[2]

    @property
    def factors(self) -> list[float]:
        """The plain numbers by which tensors are multiplied, or whose inverses divide them."""
        found = []
        for operator in self.operators:
            if getattr(operator.function, "overloadpacket", None) in _SCALED:
                values = [v for v in operator.arguments[0] if isinstance(v, int | float)]
                found += [float(value) for value in values if value]
        return found


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records operators while it is entered; it may be left and entered again."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: list[_Operator] = []
        self._numbers: Any = WeakTensorKeyDictionary()
        self._leaves: dict[int, Tensor] = {}
        self._ends: dict[int, int] = {}  # number -> operators recorded when a model returned it
        self._count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operator and note it."""
        named = named or {}
        changed = self._changed(function, arguments, named)
        noted = tree_map(self._noted, (tuple(arguments), dict(named)))
        for number in changed:
            if number in self._leaves:  # the replay begins with what was there before
                self._leaves[number] = self._leaves[number].clone()
        found = function(*arguments, **named)
        tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in tree_flatten(found)[0]]
        outputs = tuple(None if leaf is None else self._numbered(leaf) for leaf in tensors)
        drawn = None
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            kept = [leaf for leaf in tensors if leaf is not None]
            drawn = tuple(leaf.detach().clone() if changed else leaf.detach() for leaf in kept)
        self._operators.append(_Operator(function, noted, outputs, changed, drawn))
        return found

    def _numbered(self, tensor: Tensor) -> int:
        number: int | None = self._numbers.get(tensor)
        if number is None:
            number = self._numbers[tensor] = self._count
            self._count += 1
        return number

    def _noted(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_new = value not in self._numbers
        number = self._numbered(value)
        if is_new:
            self._leaves[number] = value
        return _Number(number)

    def _changed(self, function: Any, arguments: Any, named: Any) -> tuple[int, ...]:
        schema = getattr(function, "_schema", None)
        if schema is None or not schema.is_mutable:
            return ()
        given = dict(zip((a.name for a in schema.arguments), arguments, strict=False)) | named
        written = [
            given[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name in given
        ]
        tensors = [leaf for leaf in tree_flatten(written)[0] if isinstance(leaf, Tensor)]
        return tuple(self._noted(tensor).number for tensor in tensors)

    def end_at(self, outputs: Any) -> None:
        """Note what a model returned: a loss's slice may begin there."""
        for leaf in tree_flatten(outputs)[0]:
            if isinstance(leaf, Tensor) and leaf.dim():
                number = self._numbered(leaf)
                self._ends[number] = len(self._operators)
                self._leaves.setdefault(number, leaf)

    def slice_of(self, loss: Tensor, *, whole: bool) -> Slice | None:
        """The operators that lead to a loss; None where it was not recorded.

        Args:
            loss: The loss.
            whole: Whether to go back to the batch, and not only to what models returned.
        """
        root = self._numbers.get(loss)
        if root is None:
            return None
        ends = {} if whole else {n: at for n, at in self._ends.items() if n != root}
        needed, found, made = {root}, [], set()
        for at, operator in reversed(list(enumerate(self._operators))):
            outputs = {number for number in operator.outputs if number is not None}
            written = {n for n in outputs | set(operator.changed) if ends.get(n, 0) <= at}
            if not written & needed:
                continue
            found.append(operator)
            made |= outputs - _numbers_in(operator)  # some return what they were given
            if operator.drawn is None or operator.changed:
                needed |= _numbers_in(operator)
        leaves = {n: self._leaves[n] for n in sorted(needed - made) if n in self._leaves}
        return Slice(root, tuple(reversed(found)), leaves)


def run_again(
    recorded: Slice,
    leaves: dict[int, Tensor],
    drawn: Callable[[Tensor], Tensor],
    asked: Sequence[int],
) -> list[Tensor]:
    """Run the operators on other samples.

    Args:
        recorded: The operators.
        leaves: Number -> what comes from outside instead; it may be changed.
        drawn: Gives other samples for what was drawn.
        asked: Numbers of tensors.

    Returns:
        The tensors that were asked for.
    """
    last: dict[int, int] = {}
    for at, operator in enumerate(recorded.operators):
        last |= dict.fromkeys(_numbers_in(operator), at)
    values = dict(leaves)
    for at, operator in enumerate(recorded.operators):
        if operator.drawn is None:
            positional, named = tree_map(
                lambda leaf: values[leaf.number] if isinstance(leaf, _Number) else leaf,
                operator.arguments,
            )
            made = tree_flatten(operator.function(*positional, **named))[0]
        else:
            made = [drawn(tensor) for tensor in operator.drawn]
            for number, value in zip(operator.changed, made, strict=False):
                values[number].copy_(value)
        tensors = [leaf for leaf in made if isinstance(leaf, Tensor)]
        outputs = [number for number in operator.outputs if number is not None]
        for number, value in zip(outputs, tensors, strict=False):
            if number not in operator.changed:
                values[number] = value
        for number in _numbers_in(operator):
            if last[number] == at and number not in asked:
                values.pop(number, None)
    return [values[number] for number in asked]


def _numbers_in(operator: _Operator) -> set[int]:
    leaves = tree_flatten(operator.arguments)[0]
    return {leaf.number for leaf in leaves if isinstance(leaf, _Number)}


def with_rows(tensor: Tensor, dim: int, rows: Sequence[int], num_rows: int) -> Tensor:
    """A copy of a tensor in which sample ``rows[i]`` stands in the place of sample i."""
    each = tensor.shape[dim] // num_rows
    index = torch.tensor(rows, device=tensor.device).repeat_interleave(each) * each
    index = index + torch.arange(each, device=tensor.device).repeat(num_rows)
    return torch.empty_like(tensor).copy_(tensor.detach().index_select(dim, index))

"""Record the operators of a step from its batch to its loss, and run them again on other samples.

A script's own loop is no function that could be called again. But its operators can: PyTorch's
dispatcher shows each one to a mode. The shapes stay as they were, so numbers that the script has
computed from them stay right; only the samples within the batch are replaced. A loss must be the
mean, over all samples, of what it is for a batch of this one sample repeated. That fails for a root
of a mean, a contrast, a choice of hard samples, a mean over a mask.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-4}
_LOOSE = 2e-2  # of losses in 16 bits
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_SCALED = {torch.ops.aten.mul, torch.ops.aten.div}
_CROSS_ENTROPIES = {torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}
_KEEPING = {torch.ops.aten.clamp, torch.ops.aten.clamp_min}
_PASSED = _SCALED | {
    torch.ops.aten.alias,
    torch.ops.aten.clone,  # by which DistributedDataParallel passes on what a model returns
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
    touched: frozenset[int]  # those that share their memory
    drawn: tuple[Tensor, ...] | None  # its outputs, where it draws random numbers

    @property
    def packet(self) -> Any:
        """Of all its overloads."""
        return getattr(self.function, "overloadpacket", None)

    @property
    def inputs(self) -> "list[_Number]":
        """Its positional tensors."""
        return [value for value in self.arguments[0] if isinstance(value, _Number)]

    @property
    def factors(self) -> list[float]:
        """Its plain numbers but 0."""
        return [float(v) for v in self.arguments[0] if isinstance(v, int | float) and v]


@dataclass(frozen=True, slots=True)
class Slice:
    """The operators that a loss depends on.

    Attributes:
        root: The loss's number.
        operators: In order.
        leaves: Number -> a tensor from outside, or one that was drawn.
        answers: Numbers of those that models returned.
    """

    root: int
    operators: tuple[_Operator, ...]
    leaves: dict[int, Tensor]
    answers: frozenset[int]

    def tensors(self, own: Iterable[Tensor]) -> list[Tensor]:
        """The tensors from outside, and those that were drawn, that may hold samples."""
        ours = {id(tensor) for tensor in own}
        drawn = [tensor for operator in self.operators for tensor in operator.drawn or ()]
        leaves = [leaf for leaf in self.leaves.values() if id(leaf) not in ours]
        return [tensor for tensor in (*leaves, *drawn) if tensor.dim()]

    def reads(self, parameters: Iterable[Tensor]) -> bool:
        """Whether some of these tensors come from outside."""
        return not {id(p) for p in parameters}.isdisjoint(map(id, self.leaves.values()))

    def uses(self, name: str) -> bool:
        """Whether the name of an operator has this in it."""
        return any(name in str(operator.function) for operator in self.operators)

    def _back_from(self, number: int | None, passing: Collection[Any]) -> Iterator[_Operator]:
        """What made a tensor, and what made its first input, while these pass it on."""
        made = {n: operator for operator in self.operators for n in operator.outputs}
        while number in made:
            operator = made[number]
            yield operator
            is_passed = operator.packet in passing and operator.inputs
            number = operator.inputs[0].number if is_passed else None

    def _divisor(self) -> tuple[int | None, bool, bool]:
        """(number of the divisor, whether it is a cross entropy's, whether it divides at last)."""
        for operator in self._back_from(self.root, _PASSED):
            if operator.packet in _CROSS_ENTROPIES:
                return operator.outputs[1], True, True
            if operator.packet is torch.ops.aten.div and len(operator.inputs) == 2:
                return operator.inputs[1].number, False, True
        for operator in self.operators:
            if operator.packet in _CROSS_ENTROPIES:
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
        number = self.divisor
        for operator in self._back_from(number, _KEEPING):
            if operator.packet not in _KEEPING or len(operator.inputs) != 1:
                break
            number = operator.inputs[0].number
        return number

    @property
    def is_narrow(self) -> bool:
        """Whether anything is computed in 16 bits."""
        given = tree_flatten([operator.arguments for operator in self.operators])[0]
        return any(k in _WIDER for k in (*given, *(leaf.dtype for leaf in self.leaves.values())))

    @property
    def divides_by_targets(self) -> bool:
        """Whether the divisor is a cross entropy's total weight."""
        return self._divisor()[1]

    @property
    def divides_at_last(self) -> bool:
        """Whether the whole loss is divided by it, and not only a term."""
        return self._divisor()[2]

    @property
    def whole_factors(self) -> list[float]:
        """The plain numbers by which the whole loss is multiplied at last."""
        found = []
        for operator in self._back_from(self.root, _PASSED):
            if operator.packet in _SCALED and len(operator.inputs) == 1 and operator.factors:
                factor = operator.factors[0]
                found.append(factor if operator.packet is torch.ops.aten.mul else 1 / factor)
        return found

    @property
    def factors(self) -> list[float]:
        """The plain numbers by which tensors are multiplied, or whose inverses divide them."""
        scaled = (operator for operator in self.operators if operator.packet in _SCALED)
        return [factor for operator in scaled for factor in operator.factors]


def _has_memory(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.numel() > 0


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records operators while it is entered; it may be left and entered again."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: list[_Operator] = []
        self._numbers: Any = WeakTensorKeyDictionary()
        self._leaves: dict[int, Tensor] = {}
        self._ends: dict[int, int] = {}  # number -> operators recorded when a model returned it
        self._sharing: dict[int, set[int]] = {}  # address of memory -> numbers of its tensors
        self._count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        """Run an operator and note it."""
        named = named or {}
        changed = self._changed(function, arguments, named)
        noted = tree_map(self._noted, (tuple(arguments), dict(named)))
        touched = frozenset(
            other for n in changed for held in self._sharing.values() if n in held for other in held
        ).union(changed)
        for number in touched:
            # The replay begins with what was there before. A weight that workers share and that is
            # away has no memory, and what it had may have become another tensor's.
            if number in self._leaves and _has_memory(self._leaves[number]):
                self._leaves[number] = self._leaves[number].clone()
        found = function(*arguments, **named)
        tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in tree_flatten(found)[0]]
        outputs = tuple(None if leaf is None else self._numbered(leaf) for leaf in tensors)
        drawn = None
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            kept = [leaf for leaf in tensors if leaf is not None]
            drawn = tuple(leaf.detach().clone() if changed else leaf.detach() for leaf in kept)
        self._operators.append(_Operator(function, noted, outputs, changed, touched, drawn))
        return found

    def _numbered(self, tensor: Tensor) -> int:
        number: int | None = self._numbers.get(tensor)
        if number is None:
            number = self._numbers[tensor] = self._count
            self._count += 1
            with suppress(RuntimeError, NotImplementedError):  # one without memory of its own
                self._sharing.setdefault(tensor.untyped_storage().data_ptr(), set()).add(number)
        return number

    def numbers_of(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of those tensors that were met."""
        return {self._numbers[tensor] for tensor in tensors if tensor in self._numbers}

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
            written = {n for n in outputs | operator.touched if ends.get(n, 0) <= at}
            if not written & needed:
                continue
            found.append(operator)
            made |= outputs - _numbers_in(operator)  # some return what they were given
            if operator.drawn is None or operator.changed:
                needed |= _numbers_in(operator)
        leaves = {n: self._leaves[n] for n in sorted(needed - made) if n in self._leaves}
        return Slice(root, tuple(reversed(found)), leaves, frozenset(leaves.keys() & ends.keys()))


def run_again(
    recorded: Slice,
    leaves: dict[int, Tensor],
    drawn: Callable[[Tensor], Tensor],
    asked: Sequence[int],
    *,
    widens: bool = False,
) -> list[Tensor]:
    """Run the operators on other samples.

    Args:
        recorded: The operators.
        leaves: Number -> what comes from outside instead; it may be changed.
        drawn: Gives other samples for what was drawn.
        asked: Numbers of tensors.
        widens: Whether to compute in 32 bits what was computed in 16.

    Returns:
        The tensors that were asked for.
    """
    last: dict[int, int] = {}
    for at, operator in enumerate(recorded.operators):
        last |= dict.fromkeys(_numbers_in(operator), at)

    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)) if widens else tensor

    def given(leaf: Any) -> Any:
        if isinstance(leaf, _Number):
            return values[leaf.number]
        return _WIDER.get(leaf, leaf) if widens and isinstance(leaf, torch.dtype) else leaf

    values = {number: wide(leaf) for number, leaf in leaves.items()}
    for at, operator in enumerate(recorded.operators):
        if operator.drawn is None:
            positional, named = tree_map(given, operator.arguments)
            made = tree_flatten(operator.function(*positional, **named))[0]
        else:
            made = [wide(drawn(tensor)) for tensor in operator.drawn]
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


@dataclass(frozen=True, slots=True)
class LossVerdict:
    """What a worker has found of the loss of its samples.

    Attributes:
        is_mean: Whether it is the mean of its samples' losses.
        is_divided: Whether it is their mean weighted by the loss's divisor.
        is_refuted: Whether both were tried, and it is neither.
        figures: The loss, and those that it should be equal to.
        best: The sample with the largest loss.
    """

    is_mean: bool
    is_divided: bool
    is_refuted: bool
    figures: str
    best: int


class Replays:
    """Runs the operators of a loss on other samples of its batch.

    Args:
        recorded: The operators.
        num_rows: Samples of the batch.
        dims: Id of a tensor -> its dimension of samples; it may be filled later.
        widens: Whether to compute in 32 bits what was computed in 16, so that rounding hides less.
    """

    def __init__(
        self, recorded: Slice, num_rows: int, dims: dict[int, int], *, widens: bool = True
    ) -> None:
        self._recorded, self._num_rows, self._dims = recorded, num_rows, dims
        self._is_narrow = recorded.is_narrow
        self._widens = widens and self._is_narrow  # until an operator runs in 16 bits alone
        self._written = {n for operator in recorded.operators for n in operator.changed}

    def verdict(self, loss: Tensor, num_rows: int) -> LossVerdict:
        """Try the loss with so many of its samples."""
        rows = range(self._num_rows)
        chosen = [rows[len(rows) * i // num_rows] for i in range(min(num_rows, len(rows)))]
        if len(rows) <= num_rows:
            chosen = list(rows)
        placed = [chosen[row % len(chosen)] for row in rows]
        counts = [placed.count(row) for row in chosen]
        divisor = self._recorded.denominator
        try:
            leaves = self._with_holes()
            whole, _ = self.of_rows(placed, leaves, divisor)
            found = [self.of_rows([row] * len(rows), leaves, divisor) for row in chosen]
        except Exception as error:  # an operator that cannot take these samples
            said = f"it cannot be computed for other samples ({type(error).__name__})"
            return LossVerdict(False, False, is_refuted=False, figures=said, best=0)
        close = self.close(loss)
        mean = sum(c * value for c, (value, _) in zip(counts, found, strict=True)) / len(rows)
        weights = [c * weight for c, (_, weight) in zip(counts, found, strict=True)]
        divided = math.nan
        if divisor is not None and sum(weights, 0.0):
            parts = zip(weights, found, strict=True)
            divided = sum((w * value for w, (value, _) in parts if w), 0.0) / sum(weights, 0.0)
        least = max((abs(value) for value, _ in found if math.isfinite(value)), default=0.0)
        is_mean, is_divided = (
            math.isfinite(whole) and abs(whole - other) <= close * max(least, abs(whole))
            for other in (mean, divided)
        )
        if divisor is not None and not any(weights):  # of samples that all count nothing
            is_divided = is_divided or math.isnan(whole) or not whole
        sizes = [abs(value) if math.isfinite(value) else -1.0 for value, _ in found]
        return LossVerdict(
            is_mean,
            is_divided,
            is_refuted=not is_mean and not is_divided,
            figures=f"{whole:.6g} against {mean:.6g}",
            best=chosen[sizes.index(max(sizes))],
        )

    def is_faithful(self, loss: Tensor) -> bool:
        """Whether the operators give the loss again on its own samples."""
        same = Replays(self._recorded, self._num_rows, self._dims, widens=False)
        try:
            value, _ = same.of_rows(range(self._num_rows), self._recorded.leaves, None)
        except Exception:  # an operator that cannot be run again
            return False
        return math.isclose(value, float(loss.detach()), rel_tol=max(same.close(loss), 1e-6))

    def close(self, loss: Tensor) -> float:
        """The relative difference by rounding that a loss may have."""
        if self._is_narrow:
            is_loose = not self._widens and loss.dtype not in _CLOSE
            return _LOOSE if is_loose else 10 * _CLOSE[torch.float32]
        found = {leaf.dtype for leaf in self._recorded.leaves.values()}
        return max(_CLOSE[kind] for kind in {*found, loss.dtype} if kind in _CLOSE)

    def of_rows(
        self, rows: Sequence[int], leaves: dict[int, Tensor], divisor: int | None
    ) -> tuple[float, float]:
        """(loss, divisor) of a batch of these samples."""
        return self.evaluated(partial(self._placed, rows=rows), leaves, divisor)

    def evaluated(
        self, change: Any, leaves: dict[int, Tensor], divisor: int | None
    ) -> tuple[float, float]:
        """(loss, divisor) where each tensor from outside is changed by a function."""
        given = {number: change(leaf) for number, leaf in leaves.items()}
        for number in self._written & set(given):
            given[number] = given[number].clone()
        asked = [self._recorded.root, *([] if divisor is None else [divisor])]
        device = next(leaf.device.type for leaf in leaves.values())
        with torch.no_grad(), torch.autocast(device, enabled=False):
            try:
                found = run_again(self._recorded, given, change, asked, widens=self._widens)
            except RuntimeError:
                if not self._widens:
                    raise
                self._widens = False
                return self.evaluated(change, leaves, divisor)
        return float(found[0]), float(found[1].sum()) if divisor is not None else math.nan

    def _placed(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        dim = self._dims.get(id(tensor))
        if dim is None:
            return tensor.detach()
        return with_rows(tensor, dim, rows, self._num_rows)

    def _with_holes(self) -> dict[int, Tensor]:
        """The batch; what may be a mask, and hides nothing in it, hides half of a sample."""
        leaves = dict(self._recorded.leaves)
        for number, leaf in leaves.items():
            dim = self._dims.get(id(leaf))
            if dim is None or leaf.requires_grad or not bool((leaf == 1).all()):
                continue
            holed = leaf.detach().clone()
            each = leaf.shape[dim] // self._num_rows
            first = holed.narrow(dim, 0, each)
            flat = first.reshape(-1).clone()
            flat[len(flat) // 2 :] = 0
            first.copy_(flat.view_as(first))
            leaves[number] = holed
            self._dims[id(holed)] = dim
        return leaves

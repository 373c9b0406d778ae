"""Read what a loss counts from the graph that autograd keeps of it.

The gradients of a share get the weight of its samples. That is right where the loss is a mean to
which each sample counts alike. The last operations of its graph show what it divides by. Where this
changes, a function is tested again, on the samples of that pass. A loss that a script's own loop
computes cannot be called again; what its graph shows is checked.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

from torch import Tensor

from ...devices.backend import backend_of
from ...schema.errors import TargetError

_SINK = "_DDPSinkBackward"
_FACTORS = {
    "MulBackward0", "NegBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0",
    "AliasBackward0", _SINK,
}  # fmt: skip
_QUOTIENTS = {"DivBackward0", "DivBackward1"}
_TERMS = {"AddBackward0", "SubBackward0"}
_SUM, _MEAN = "SumBackward0", "MeanBackward0"
_AVERAGED, _SUMMED = 1, 2  # torch's numbers of reduction="mean" and "sum"
_NODES = 48  # of a loss's graph that are looked at
_VIEWS = (
    "AccumulateGrad", "Alias", "AsStrided", "Clone", "Expand", "NoneType", "Permute", "Reshape",
    "Squeeze", "TBackward", "ToCopy", "Transpose", "Unsafe", "Unsqueeze", "View",
)  # fmt: skip
_CLOSE = 1e-6  # relative difference of numbers that are equal
Number = float | Tensor
"""A number that is known, or one [] on a device."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a loss divides by, as its last operations show.

    Attributes:
        of_all: Shares of what it sums or could count (targets, entries): 1 if nothing is left out.
        of_samples: Numbers for each of its samples, where it is not seen what could be counted.
    """

    of_all: tuple[Number, ...]
    of_samples: tuple[Number, ...]

    @property
    def on_device(self) -> list[Tensor]:
        """The numbers that are on a device."""
        return [n for n in (*self.of_all, *self.of_samples) if isinstance(n, Tensor)]

    def with_numbers(self, ahead: Iterator[float]) -> "Counts":
        """The same, with numbers from the host in place of those ``on_device``."""
        rows = (self.of_all, self.of_samples)
        return Counts(
            *(tuple(next(ahead) if isinstance(n, Tensor) else n for n in r) for r in rows)
        )

    def are_like(self, usual: "Counts | None", first: "Counts") -> bool:
        """Whether they are those of other losses of the function: earlier, and in this step."""
        pairs = [(self.of_all, usual.of_all if usual else ()), (self.of_samples, first.of_samples)]
        return all(
            len(own) == len(other)
            and all(
                math.isclose(a, b, rel_tol=_CLOSE) or a != a and b != b
                for a, b in zip(own, other, strict=True)
            )
            for own, other in pairs
        )


def counts_of(loss: Tensor, num_samples: int) -> Counts:
    """What a loss of so many samples divides by.

    Example:
        >>> import torch
        >>> z, mask = torch.ones(4, requires_grad=True), torch.tensor([1.0, 1.0, 1.0, 0.0])
        >>> counts_of((z * mask).sum() / mask.sum(), 4)
        Counts(of_all=(0.75,), of_samples=())
        >>> counts_of(z[mask > 0].mean(), 4)
        Counts(of_all=(0.75,), of_samples=())
    """
    of_all: list[Number] = []
    of_samples: list[Number] = []
    waiting: list[Any] = [loss.grad_fn]
    seen = 0
    while waiting and seen < _NODES:
        node, seen = waiting.pop(), seen + 1
        name = type(node).__name__
        is_quotient = name in _QUOTIENTS
        if is_quotient or name == "MulBackward0":
            other, summed = getattr(node, "_saved_other", None), _num_summed(_source(node))
            number = None if other is None else _number(other)
            if number is not None and summed:
                of_all.append(number / summed if is_quotient else number * summed)
            elif number is not None and is_quotient:
                of_samples.append(number / num_samples)
        elif name == _MEAN:
            sizes = getattr(_source(node), "_saved_self_sym_sizes", None)
            number = float(node._saved_self_sym_numel)
            if type(_source(node)).__name__.startswith("Index") and sizes is not None:
                of_all.append(number / max(math.prod(sizes), 1))
            else:
                of_samples.append(number / num_samples)
        elif (total := _total_weight(node)) is not None:
            number = _number(total)
            assert number is not None
            of_all.append(number / max(node._saved_target.numel(), 1))
        if is_quotient or name in _FACTORS or name in _TERMS:
            waiting += [following for following, _ in node.next_functions if following is not None]
    return Counts(tuple(of_all), tuple(of_samples))


def _source(node: Any) -> Any:
    """The node of what an operation was given first."""
    return node.next_functions[0][0] if node.next_functions else None


def _number(value: Any) -> Number | None:
    """A number of the graph; None where it is several."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        return None
    return float(value) if backend_of(value.device).is_host else value.detach().reshape(())


def _total_weight(node: Any) -> Tensor | None:
    """What a node divides by that is a cross entropy's mean."""
    if getattr(node, "_saved_reduction", None) != _AVERAGED or not hasattr(node, "_saved_target"):
        return None
    total: Tensor | None = getattr(node, "_saved_total_weight", None)
    return total


def chain(loss: Tensor) -> Iterable[Any]:
    """A loss's node, and those before it, through what only changes its factor."""
    node: Any = loss.grad_fn
    output = loss.output_nr
    while node is not None:
        yield node
        name, following = type(node).__name__, node.next_functions
        if name == _SINK:  # it passes all that a model returns
            following = following[output : output + 1]
        entries = [entry for entry in following if entry[0] is not None]
        passes = name in _FACTORS | {"DivBackward0"} and len(entries) == 1
        node, output = entries[0] if passes else (None, 0)


def _nodes(root: Any) -> Iterator[Any]:
    """The nodes of a graph, breadth first; None for what needs no gradient."""
    waiting = [root]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting += [following for following, _ in getattr(node, "next_functions", ())]


def signature_of(loss: Tensor) -> int:
    """What a loss is known by: the first names of its graph, without views.

    PyTorch takes other views while operators are recorded.
    """
    names = (type(node).__name__ for node in _nodes(loss.grad_fn))
    told = islice((name for name in names if not name.startswith(_VIEWS)), _NODES)
    return crc32(" ".join(told).encode())


def targets_of(loss: Tensor) -> list[tuple[Tensor, int]]:
    """(weight of the targets that count, all targets) of each mean cross entropy of a loss."""
    found = ((_total_weight(node), node) for node in islice(_nodes(loss.grad_fn), _NODES))
    return [(total, node._saved_target.numel()) for total, node in found if total is not None]


def ignores_targets(loss: Tensor) -> bool:
    """Whether a loss is seen to hold a cross entropy that ignores targets or weights classes."""
    return any(float(total) != count for total, count in targets_of(loss))


def last_divisors_of(loss: Tensor) -> list[Tensor]:
    """What a loss is divided by, from the last division on."""
    found = []
    for at in chain(loss):
        for name in ("_saved_total_weight", "_saved_other"):
            value = getattr(at, name, None)
            if isinstance(value, Tensor) and "Mul" not in type(at).__name__:
                found.append(value)
    return found


def divisors_of(loss: Tensor) -> list[Tensor]:
    """[n] what a loss is divided by at last, and the targets that its cross entropies count."""
    found = [*last_divisors_of(loss), *(total for total, _ in targets_of(loss))]
    return [divisor.detach() for divisor in found if divisor.numel() == 1]


def check_loss(loss: Tensor, hint: str, sizes: tuple[int, int] | None = None) -> None:
    """Check a loss before its backward pass.

    Args:
        loss: What the script computed.
        hint: What to do where samples count unlike.
        sizes: Samples that the loss is of, and of the global batch; None if that is not known.

    Raises:
        TargetError: It is a sum over samples, or a mean in which samples count unlike.

    Example:
        >>> import torch
        >>> z = torch.ones(4, requires_grad=True)
        >>> check_loss((z * z).sum() / 4, "", sizes=(4, 32))
        >>> check_loss((z * z).sum() / 32, "", sizes=(4, 32))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        hetflow.schema.errors.TargetError: the loss of 4 samples is a sum divided by 32...
    """
    if loss.numel() != 1:
        raise TargetError(
            f"the loss has {loss.numel()} elements; a plan's shares need the mean over samples",
            hint="call backward on the loss's mean()",
        )
    _Graph(hint, sizes).check(loss.grad_fn, is_whole=True)


class _Graph:
    """The last operations of a loss.

    Args:
        hint: As for ``check_loss``.
        sizes: As for ``check_loss``.
    """

    def __init__(self, hint: str, sizes: tuple[int, int] | None) -> None:
        self._hint, self._sizes = hint, sizes

    def check(self, node: Any, *, is_whole: bool) -> None:
        """Check the operations from a node on; it is the whole loss, or one of its terms.

        A sum beside another term may be a penalty on parameters, equal on every worker.
        """
        if node is None:
            return
        name = type(node).__name__
        if name in _FACTORS or name in _TERMS:
            for following, _ in node.next_functions:
                self.check(following, is_whole=is_whole and name in _FACTORS)
        elif name in _QUOTIENTS:
            divided = node.next_functions[0][0]
            if not _is_sum(divided):
                self.check(divided, is_whole=is_whole)
            elif is_whole:
                self._check_quotient(divided, node)
        elif _is_sum(node) and (is_whole or name != _SUM):
            raise TargetError(
                "the loss is a sum over samples, and a plan's shares need their mean",
                hint='use reduction="mean", or divide by the number of samples of the batch',
            )
        elif name == _MEAN and is_whole:
            self._check_mean(node)
        elif hasattr(node, "_saved_total_weight") and _counts_unlike(node):
            raise TargetError(
                "the cross entropy ignores some targets or weights classes: its mean over a share "
                "counts samples unlike one process does",
                hint=self._hint,
            )

    def _check_quotient(self, summed: Any, node: Any) -> None:
        if self._sizes is None or node._saved_other is None:
            return
        (own, whole), divisor = self._sizes, float(node._saved_other)
        is_fixed = divisor == whole != own
        if divisor == _num_summed(summed) or not (divisor % own or is_fixed):
            return
        raise TargetError(
            f"the loss of {own} samples is a sum divided by {divisor:g}",
            hint=f"divide by the number of samples, {own} here; {self._hint}",
        )

    def _check_mean(self, node: Any) -> None:
        number = node._saved_self_sym_numel
        if self._sizes is not None and number % self._sizes[0]:
            raise TargetError(
                f"the loss of {self._sizes[0]} samples is a mean over {number} things",
                hint=self._hint,
            )


def _is_sum(node: Any) -> bool:
    return type(node).__name__ == _SUM or getattr(node, "_saved_reduction", None) == _SUMMED


def _num_summed(node: Any) -> int | None:
    """The entries that a sum is of; None for what is no sum."""
    if type(node).__name__ == _SUM:
        return int(math.prod(node._saved_self_sym_sizes))
    if getattr(node, "_saved_reduction", None) != _SUMMED:
        return None
    target = getattr(node, "_saved_target", None)
    return None if target is None else int(target.numel())


def _counts_unlike(node: Any) -> bool:
    targets = node._saved_target
    return bool(float(node._saved_total_weight) != targets.numel())

"""Read what a loss counts from the graph that autograd keeps of it.

The gradients of a share get the weight of its samples. That is right where the loss is a mean to
which each sample counts alike. The last operations of its graph show what it divides by. Where this
changes, a function is tested again, on the samples of that pass.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

from torch import Tensor

from ...devices.backend import backend_of

_SINK = "_DDPSinkBackward"
FACTORS = {
    "MulBackward0", "NegBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0",
    "AliasBackward0", _SINK,
}  # fmt: skip
QUOTIENTS = {"DivBackward0", "DivBackward1"}
TERMS = {"AddBackward0", "SubBackward0"}
SUM, MEAN = "SumBackward0", "MeanBackward0"
_AVERAGED, SUMMED = 1, 2  # torch's numbers of reduction="mean" and "sum"
_NODES = 48  # of a loss's graph that are looked at
_NODES_OF_ANSWERS = 12  # of the graph of a loss that a model returns
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
        """The counts with numbers from the host in place of those ``on_device``."""
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
        is_quotient = name in QUOTIENTS
        if is_quotient or name == "MulBackward0":
            other, summed = getattr(node, "_saved_other", None), num_summed(_source(node))
            number = None if other is None else _number(other)
            if number is not None and summed:
                of_all.append(number / summed if is_quotient else number * summed)
            elif number is not None and is_quotient:
                of_samples.append(number / num_samples)
        elif name == MEAN:
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
        if is_quotient or name in FACTORS or name in TERMS:
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
        passes = name in FACTORS | {"DivBackward0"} and len(entries) == 1
        node, output = entries[0] if passes else (None, 0)


def _nodes(root: Any, ends: Collection[Any] = ()) -> Iterator[Any]:
    """The nodes of a graph, breadth first, not beyond ``ends``; None for what needs no gradient."""
    waiting = [root]
    while waiting:
        node = waiting.pop(0)
        yield node
        if node not in ends:
            waiting += [following for following, _ in getattr(node, "next_functions", ())]


def signature_of(loss: Tensor, answers: Collection[Any] = ()) -> int:
    """What a loss is known by: the first names of its graph, without views.

    PyTorch takes other views while operators are recorded.

    Args:
        loss: The loss.
        answers: Nodes of what models returned. What they ran may differ between workers, as the
            steps of a loop over a sequence do, so names end there. A few names behind tell what a
            model computes that returns its loss.
    """
    is_answer = loss.grad_fn in answers
    names = (type(node).__name__ for node in _nodes(loss.grad_fn, () if is_answer else answers))
    most = _NODES_OF_ANSWERS if is_answer else _NODES
    told = islice((name for name in names if not name.startswith(_VIEWS)), most)
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


def num_summed(node: Any) -> int | None:
    """The entries that a sum is of; None for what is no sum."""
    if type(node).__name__ == SUM:
        return int(math.prod(node._saved_self_sym_sizes))
    if getattr(node, "_saved_reduction", None) != SUMMED:
        return None
    target = getattr(node, "_saved_target", None)
    return None if target is None else int(target.numel())

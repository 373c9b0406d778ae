"""Logits that stay cut by vocabulary: each worker of a group has a part, which the loss reads.

Joined logits are the largest value of a small model with a large vocabulary, and every worker of a
group would compute the same loss from them. ``cross_entropy`` needs only a few numbers of each row
from the other workers (thesis 4.2.3).
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from ...schema.errors import TargetError
from .layers import vocabulary_cross_entropy
from .operators import TensorGroup

_RESHAPES = {
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.squeeze,
    Tensor.unsqueeze, Tensor.__getitem__, torch.flatten, torch.reshape,
}  # fmt: skip
_SAME_SHAPE = {
    Tensor.contiguous, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to,
    Tensor.detach,
}  # fmt: skip
_PLAIN = {
    Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point,
    torch.is_complex, Tensor.__repr__,
}  # fmt: skip
_SHAPE: Any = Tensor.shape
_OF_SHAPE = {Tensor.size, _SHAPE.__get__, Tensor.numel, Tensor.__len__}


class CutLogits(Tensor):
    """One worker's part of logits; it has the shape of the whole ones.

    Leading dimensions can be reshaped and sliced. ``cross_entropy`` gives the loss of the whole
    logits. Every other function is refused.
    """

    _group: TensorGroup
    _vocabulary: int
    _layer: str

    @staticmethod
    def of(part: Tensor, group: TensorGroup, vocabulary: int, layer: str) -> "CutLogits":
        """Wrap a part, in its own memory.

        Args:
            part: [..., own part of the vocabulary].
            group: The tensor-parallel group.
            vocabulary: Size of the whole vocabulary.
            layer: Name of the layer, for error messages.
        """
        made: CutLogits = part.as_subclass(CutLogits)
        made._group, made._vocabulary, made._layer = group, vocabulary, layer
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute the loss from all workers' parts; reshape the own one; refuse anything else."""
        named, own = kwargs or {}, args[0] if args else None
        if func is functional.cross_entropy:
            return _loss(*args, **named)
        if not isinstance(own, CutLogits):
            _refuse(next(_of_class((args, named))), func)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PLAIN:
                return func(*args, **named)
            shape = (*own.shape[:-1], own._vocabulary)
            whole = torch.empty(shape, dtype=own.dtype, device="meta")
            if func in _OF_SHAPE:
                return func(whole, *args[1:], **named)
            if getattr(func, "__name__", "") == "__get__":  # dtype, device, grad_fn, ...
                found = func(own.as_subclass(Tensor))
                if not isinstance(found, Tensor):
                    return found
            if func in _SAME_SHAPE:
                return own._like(func(own.as_subclass(Tensor), *args[1:], **named))
            if func in _RESHAPES:
                made = func(whole, *args[1:], **named)
                if own._keeps_last(func, made, args):
                    return own._like(own._reshaped(func, made.shape, args))
        _refuse(own, func)

    def _like(self, part: Tensor) -> "CutLogits":
        return CutLogits.of(part, self._group, self._vocabulary, self._layer)

    def _keeps_last(self, func: Callable[..., Any], made: Tensor, args: tuple[Any, ...]) -> bool:
        """Whether a reshape leaves the last dimension alone."""
        if not made.dim() or made.shape[-1] != self._vocabulary:
            return False
        if func is not Tensor.__getitem__:
            return True
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        used = sum(entry is not None for entry in index)
        if Ellipsis in [entry for entry in index if not isinstance(entry, Tensor)]:
            return index[-1] is Ellipsis or index[-1] == slice(None)
        return used < self.dim() or index[-1] == slice(None)

    def _reshaped(
        self, func: Callable[..., Any], shape: torch.Size, args: tuple[Any, ...]
    ) -> Tensor:
        part = self.as_subclass(Tensor)
        if func is Tensor.__getitem__:
            return part[args[1]]
        return part.reshape(*shape[:-1], part.shape[-1])


def _loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``functional.cross_entropy`` of cut logits [N, C] and class indices [N]."""
    if not isinstance(input, CutLogits):
        raise TypeError("cross_entropy takes cut logits as its input, not as its target")
    indices = not target.is_floating_point() and target.dim() == 1 and input.dim() == 2
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not (indices and plain and reduction in ("mean", "sum", "none")):
        raise TargetError(
            f"the output of {input._layer} is cut over a tensor-parallel group, and cross_entropy "
            "of it takes [N, C] logits and [N] class indices only, without weight or "
            "label_smoothing",
            hint="flatten both, or give the layer the role 'output'",
        )
    with torch._C.DisableTorchFunctionSubclass():
        part = input.as_subclass(Tensor)
    return vocabulary_cross_entropy(
        part,
        target,
        input._group,
        vocabulary=input._vocabulary,
        ignore_index=ignore_index,
        reduction=reduction,
    )


def _of_class(given: Any) -> Any:
    if isinstance(given, CutLogits):
        yield given
    elif isinstance(given, list | tuple):
        for entry in given:
            yield from _of_class(entry)
    elif isinstance(given, dict):
        yield from _of_class(list(given.values()))


def _refuse(logits: CutLogits, func: Callable[..., Any]) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    raise TargetError(
        f"the output of {logits._layer} is cut over a tensor-parallel group, and {name} would need "
        "all of it",
        hint="give the layer the role 'output', or compute this inside job.evaluation()",
    )

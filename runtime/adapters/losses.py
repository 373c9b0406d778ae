"""What a loss is a mean over, as its graph shows; losses that are no means are refused.

A worker's gradients get the weight of what its loss is a mean over: its samples, or the targets
that a cross entropy counts. A script's own loop runs once, so this cannot be tried; what the loss's
graph shows is read.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...schema.errors import TargetError

_FACTORS = {"MulBackward0", "NegBackward0", "ToCopyBackward0", "SqueezeBackward0", "ViewBackward0"}
_TERMS = {"AddBackward0", "SubBackward0"}
_SUMMED = 2  # torch's number of reduction="sum"


class Known(torch.autograd.Function):
    """A loss whose value was replaced by the global batch's; its gradients stay the share's."""

    @staticmethod
    def forward(_: Any, loss: Tensor, value: Tensor) -> Tensor:
        """The value, in the loss's type."""
        return value.to(loss.dtype).view_as(loss)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of the loss, unchanged."""
        return gradient, None


@dataclass(frozen=True, slots=True)
class _Term:
    """One of the terms that a loss is the sum of.

    Attributes:
        counted: The weight of the targets that a cross entropy is the mean over; else None.
        counts_alike: Whether each target counts, and all alike.
    """

    counted: float | None = None
    counts_alike: bool = True


def mean_over(loss: Tensor) -> float | None:
    """What a loss is the mean over, before its backward pass: a cross entropy's targets.

    Returns:
        The weight of the targets that count; None where it is no cross entropy alone, and so the
        mean over samples.

    Raises:
        TargetError: It is a sum over samples, or a mean in which samples count unlike.
    """
    if loss.numel() != 1:
        raise TargetError(
            f"the loss has {loss.numel()} elements; a plan's shares need the mean over samples",
            hint="call backward on the loss's mean()",
        )
    terms: list[_Term] = []
    _read(loss.grad_fn, terms, is_whole=True)
    counted = {term.counted for term in terms}
    if len(counted) == 1:
        return counted.pop()
    if all(term.counts_alike for term in terms):
        return None
    raise TargetError(
        "one term of the loss is a cross entropy that ignores some targets or weights classes, and "
        "another term counts other samples: their shares have no common weight",
        hint="use transformers' Trainer, or hf.prepare with hf.Weighted",
    )


def _read(node: Any, terms: list[_Term], *, is_whole: bool, is_divided: bool = False) -> None:
    """Read the terms of a loss; sums are refused unless something divides them."""
    if node is None:
        return
    name = type(node).__name__
    following = [following for following, _ in node.next_functions]
    if name in _FACTORS or name in _TERMS:
        for other in following:
            # A sum beside another term may be a penalty on parameters, equal on every worker.
            is_factor = is_whole and name in _FACTORS
            _read(other, terms, is_whole=is_factor, is_divided=is_divided)
    elif name == "DivBackward0" and following[-1] is None:
        _read(following[0], terms, is_whole=False, is_divided=True)
    elif not is_divided and (
        getattr(node, "_saved_reduction", None) == _SUMMED or (name == "SumBackward0" and is_whole)
    ):
        raise TargetError(
            "the loss is a sum over samples, and a plan's shares need their mean",
            hint='use reduction="mean", or divide by the number of samples of the batch',
        )
    elif hasattr(node, "_saved_total_weight") and node._saved_reduction != _SUMMED:
        counted = float(node._saved_total_weight)
        terms.append(_Term(counted, counted == node._saved_target.numel()))
    else:
        terms.append(_Term())


def ignores_targets(loss: Tensor) -> bool:
    """Whether a loss is seen to hold a cross entropy that ignores targets or weights classes."""
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if hasattr(node, "_saved_total_weight") and node._saved_reduction != _SUMMED:
            if float(node._saved_total_weight) != node._saved_target.numel():
                return True
        elif type(node).__name__ in _FACTORS | _TERMS | {"DivBackward0"}:
            ahead += [following for following, _ in node.next_functions]
    return False


def is_known(loss: Tensor) -> bool:
    """Whether a loss is a multiple of one whose value is the global batch's by now."""
    node: Any = loss.grad_fn
    while node is not None and not isinstance(node, Known._backward_cls):
        following = [following for following, _ in node.next_functions if following is not None]
        if type(node).__name__ not in _FACTORS | {"DivBackward0"} or len(following) != 1:
            return False
        (node,) = following
    return node is not None

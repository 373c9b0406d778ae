"""Refuse losses that are seen not to be means over samples: shares would not add up to the batch's.

The gradients of a share get the weight of its samples. That is right where the loss is a mean to
which each sample counts alike. Where a script's own loop computes the loss, it cannot be called on
a few samples for a trial; what the loss's graph shows is checked.
"""

import math
from typing import Any

from torch import Tensor

from ...schema.errors import TargetError

_FACTORS = {"MulBackward0", "NegBackward0", "ToCopyBackward0", "SqueezeBackward0", "ViewBackward0"}
_QUOTIENTS = {"DivBackward0", "DivBackward1"}
_TERMS = {"AddBackward0", "SubBackward0"}
_SUM = "SumBackward0"
_SUMMED = 2  # torch's number of reduction="sum"


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
        elif name == "MeanBackward0" and is_whole:
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
    if type(node).__name__ == _SUM:
        return int(math.prod(node._saved_self_sym_sizes))
    target = getattr(node, "_saved_target", None)
    return None if target is None else int(target.numel())


def _counts_unlike(node: Any) -> bool:
    targets = node._saved_target
    return bool(float(node._saved_total_weight) != targets.numel())

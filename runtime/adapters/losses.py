"""Refuse losses that are seen not to be means over samples: shares would not add up to the batch's.

A worker's gradients get the weight of its samples. That is right where the loss is a mean to which
each sample counts alike. A script's own loop runs once, so this cannot be tried; what the loss's
graph shows is checked.
"""

from typing import Any

from torch import Tensor

from ...schema.errors import TargetError

_FACTORS = {"MulBackward0", "NegBackward0", "ToCopyBackward0", "SqueezeBackward0", "ViewBackward0"}
_TERMS = {"AddBackward0", "SubBackward0"}
_SUMMED = 2  # torch's number of reduction="sum"


def check_loss(loss: Tensor) -> None:
    """Check a loss before its backward pass.

    Raises:
        TargetError: It is a sum over samples, or a mean in which samples count unlike.
    """
    if loss.numel() != 1:
        raise TargetError(
            f"the loss has {loss.numel()} elements; a plan's shares need the mean over samples",
            hint="call backward on the loss's mean()",
        )
    _check(loss.grad_fn, is_whole=True)


def _check(node: Any, *, is_whole: bool) -> None:
    if node is None:
        return
    name = type(node).__name__
    if name in _FACTORS or name in _TERMS:
        for following, _ in node.next_functions:
            # A sum beside another term may be a penalty on parameters, equal on every worker.
            _check(following, is_whole=is_whole and name in _FACTORS)
    elif getattr(node, "_saved_reduction", None) == _SUMMED or (
        name == "SumBackward0" and is_whole
    ):
        raise TargetError(
            "the loss is a sum over samples, and a plan's shares need their mean",
            hint='use reduction="mean", or divide by the number of samples of the batch',
        )
    elif hasattr(node, "_saved_total_weight") and _counts_unlike(node):
        raise TargetError(
            "the cross entropy ignores some targets or weights classes: its mean over a share "
            "counts samples unlike one process does",
            hint="use transformers' Trainer, or hf.prepare with hf.Weighted",
        )


def _counts_unlike(node: Any) -> bool:
    targets = node._saved_target
    return bool(float(node._saved_total_weight) != targets.numel())

"""What a loss is divided by, as a share counts it: before a script keeps it from being nothing.

``(each * mask).sum() / mask.sum().clamp(min=1)`` divides by 1 where a share's mask hides all. The
batch's divisor is the sum of the masks, kept from nothing once. So what such a call was given is
remembered for what it returned.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...schema.errors import TargetError

_KEPT: Any = WeakTensorKeyDictionary()  # a number -> what it was before, and the least it may be
_LEAST = ("clamp", "clamp_min", "clip")  # each takes the least as ``min``, or second


def adapt() -> None:
    """Change torch's functions in this process."""
    for kind in (torch, Tensor):
        for name in _LEAST:
            setattr(kind, name, _noting(getattr(kind, name)))


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def method(*values: Any, **options: Any) -> Any:
        made = original(*values, **options)
        if torch.compiler.is_compiling() or not isinstance(made, Tensor) or made.dim():
            return made
        given = values[0] if values else None
        least = values[1] if len(values) > 1 else options.get("min")
        if isinstance(given, Tensor) and isinstance(least, int | float) and given.numel() == 1:
            _KEPT[made] = (given.detach(), float(least))
        return made

    return method


def before(divisor: Tensor) -> Tensor:
    """[] a divisor before it was kept from being nothing."""
    found: Tensor = _KEPT.get(divisor, (divisor, 0.0))[0]
    return found


def share_of(
    loss: Tensor, divisor: Tensor, *, counts: bool, sum_of: Callable[[Tensor], Tensor]
) -> float:
    """What a share's loss counts in the batch's; call it on all workers.

    Args:
        loss: [] of the share.
        divisor: [] what it is divided by.
        counts: Whether the share's samples count.
        sum_of: Gives the sum of a tensor over all workers.

    Returns:
        The divisor over that of the batch; no number where that is nothing.

    Raises:
        TargetError: The loss is nothing, as where the script itself keeps a divisor from being so.
    """
    given, least = _KEPT.get(divisor, (divisor, 0.0))
    if counts and given is divisor and not float(loss.detach()):
        raise TargetError(
            "the loss of a share is 0, and it is not known if anything counts in what divides it",
            hint="keep a mask's sum from being 0 by mask.sum().clamp(min=1)",
        )
    own, given = (t.detach().to(torch.float64).reshape(()) for t in (divisor, given))
    total = max(float(sum_of(given if counts else torch.zeros_like(given))), least)
    return (float(own) if counts else 0.0) / total if total else math.nan

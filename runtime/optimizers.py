"""One optimizer or several: the forms that ``prepare`` takes, and how their state is saved."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ..schema.errors import TargetError
from ..schema.optimizer import OptimizerState
from ..schema.options import option
from .unplanned import on_trial

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
_NEEDED = ("param_groups", "state", "state_dict", "load_state_dict")


def optimizers_of(given: Given) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that a script gave to ``prepare``, as a tuple in order.

    Raises:
        TargetError: An object is no optimizer, an optimizer is given twice, or it needs sparse
            gradients.
    """
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for entry in several:
        absent = [name for name in _NEEDED if not hasattr(entry, name)]
        if absent:
            raise TargetError(
                f"hf.prepare needs an optimizer, got {type(entry).__name__}, which has no "
                f"{absent[0]}",
                hint="give the torch.optim optimizer, or a list of all that train the model",
            )
        if isinstance(entry, torch.optim.SparseAdam):
            raise TargetError(
                "SparseAdam updates only rows with a gradient, and hetflow sums whole gradients, "
                "which do not say what rows those are",
                hint="use Adam; or SGD or Adagrad, which leave rows without a gradient as they are",
            )
    if len({id(entry) for entry in several}) < len(several):
        raise TargetError("hf.prepare was given the same optimizer twice")
    return tuple(several)


def state_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """The optimizers' state for a checkpoint: None for none, a state for one, else a list."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    return states if len(states) > 1 else states[0] if states else None


def skip_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Take an optimizer's gradients away where one is not finite; waits for the device.

    Returns:
        Whether one was not: its step then changes nothing.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None and p.numel()]
    norms = torch._foreach_norm(gradients, math.inf) if gradients else ()
    if not norms or torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all():
        return False
    optimizer.zero_grad(set_to_none=True)
    return True


# Warn before the first step where an optimizer keeps more state than the plan counted.

# These treat each number by itself, so a step on a few numbers shows what they keep for all.
_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
_HOW = ("foreach", "fused", "capturable", "differentiable")
_NUMBERS = 8
_TOLERANCE = 0.01


def warning_of(optimizers: Sequence[optim.Optimizer], counted: OptimizerState | None) -> str | None:
    """The warning for a user whose optimizers keep more state than the plan counted.

    Returns:
        The warning; None where the optimizers keep no more, or where that cannot be known before a
        step.
    """
    if not optimizers or counted is None:
        return None
    kept = state_ratio(optimizers)
    if kept is None or kept <= counted.state_bytes_per_weight_byte + _TOLERANCE:
        return None
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    keep = "keep" if len(optimizers) > 1 else "keeps"
    return (
        f"warning: {names} {keep} {kept:.4g} bytes of state a byte of weights, the plan's memory "
        f"counts {counted}: a device may run out of memory; solve again with "
        f"{option('state_bytes_per_weight_byte', format(kept, '.4g'))}"
    )


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether it is known to treat each number by itself, so that a slice has a whole's update."""
    return type(optimizer) in _ELEMENTWISE


def state_ratio(optimizers: Sequence[optim.Optimizer]) -> float | None:
    """Bytes of optimizer state per byte of weights, found by a step on a few numbers.

    Counters of a few bytes are left out.

    Returns:
        The ratio; None for optimizers that do not treat each number by itself, such as Adafactor,
        and for those that are not torch's own.
    """
    weights = kept = 0.0
    for optimizer in optimizers:
        kind = type(optimizer)
        if not is_elementwise(optimizer):
            return None
        for group in optimizer.param_groups:
            size = sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
            weights += size
            kept += size * _ratio_of(kind, group)
    return kept / weights if weights else None


def _ratio_of(kind: type[optim.Optimizer], group: dict[str, Any]) -> float:
    known = inspect.signature(kind).parameters
    settings = {
        key: value for key, value in group.items() if key in known and key not in ("params", *_HOW)
    }
    settings["lr"] = 0.0
    probe = nn.Parameter(torch.zeros(_NUMBERS))
    probe.grad = torch.zeros(_NUMBERS)
    small: Any = kind([probe], **settings)
    with on_trial():
        small.step()
    tensors = [value for value in small.state[probe].values() if isinstance(value, Tensor)]
    kept = sum(t.numel() * t.element_size() for t in tensors if t.dim())
    return kept / (_NUMBERS * probe.element_size())

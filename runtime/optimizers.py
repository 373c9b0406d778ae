"""One optimizer or several: the forms that ``prepare`` takes, and how their state is saved."""

from collections.abc import Sequence
from typing import Any

import torch

from ..schema.errors import TargetError

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
                f"hf.prepare needs an optimizer, got {_shown(entry)}, which has no {absent[0]}",
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


def _shown(entry: object) -> str:
    return type(entry).__name__


def state_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """The optimizers' state for a checkpoint: None for none, a state for one, else a list."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    return states if len(states) > 1 else states[0] if states else None

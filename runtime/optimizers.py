"""One optimizer or several: what ``prepare`` may be given, and how their state is kept."""

from collections.abc import Sequence
from typing import Any

import torch

from ..schema.errors import TargetError

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
_NEEDED = ("param_groups", "state", "state_dict", "load_state_dict")


def optimizers_of(given: Given) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that a script gave, in order.

    Raises:
        TargetError: Something that is no optimizer, or the same one twice.
    """
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for entry in several:
        absent = [name for name in _NEEDED if not hasattr(entry, name)]
        if absent:
            raise TargetError(
                f"hf.prepare needs an optimizer, got {_shown(entry)}, which has no {absent[0]}",
                hint="give the torch.optim optimizer, or a list of all that train the model",
            )
    if len({id(entry) for entry in several}) < len(several):
        raise TargetError("hf.prepare was given the same optimizer twice")
    return tuple(several)


def _shown(entry: object) -> str:
    return type(entry).__name__


def state_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Their state for a checkpoint: of one as torch gives it, of several a list, of none None."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    return states if len(states) > 1 else states[0] if states else None

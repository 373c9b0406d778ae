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


def load_state(optimizers: Sequence[torch.optim.Optimizer], saved: Any) -> None:
    """Take back what ``state_of`` returned; nothing where either side has no optimizer.

    Raises:
        TargetError: It is of other optimizers, or of other groups of parameters.
    """
    if saved is None or not optimizers:
        return
    states = saved if isinstance(saved, list) else [saved]
    if len(states) != len(optimizers):
        raise TargetError(
            f"the saved state is of {len(states)} optimizer(s), the script has {len(optimizers)}",
            hint="give hf.prepare the same optimizers in the same order, or start anew",
        )
    for optimizer, state in zip(optimizers, states, strict=True):
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            raise TargetError(
                f"the saved state does not fit the {type(optimizer).__name__}: {error}",
                hint="build it over the same groups of parameters before hf.prepare",
            ) from None

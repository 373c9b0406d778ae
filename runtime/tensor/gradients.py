"""The gradient of a parameter that is cut: one worker's part, which knows the whole's norm.

``clip_grad_norm_(model.parameters(), limit)`` must clip by the norm of all gradients on every
worker, even where a worker holds only a part of a parameter. So the part refers to a companion
tensor, a stand-in that answers with the whole gradient's norm (pipeline/ownership.py). An operation
that scales the part scales the companion too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TAKE_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    Tensor.norm,
    torch._foreach_norm,
}
_SCALE = {
    "mul_", "div_", "zero_", "_foreach_mul_", "_foreach_div_", "_foreach_zero_",
    "_amp_foreach_non_finite_check_and_unscale_",
}  # fmt: skip


class PartGradient(Tensor):
    """A part of a gradient; norm functions of it return the norm of the whole gradient."""

    _companion: Tensor

    @staticmethod
    def of(part: Tensor, companion: Tensor) -> "PartGradient":
        """Wrap the part in its own memory; ``companion`` knows the norms of the whole gradient."""
        made: PartGradient = part.as_subclass(PartGradient)
        made._companion = companion
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take norms of the companion, scale both, and apply everything else to the part."""
        kwargs = kwargs or {}
        if func in TAKE_NORMS:
            return func(companions(args[0]), *args[1:], **kwargs)
        scale_companions(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def plain(gradient: Tensor) -> Tensor:
    """A gradient as an ordinary tensor; of a ``PartGradient``, the part itself."""
    if isinstance(gradient, PartGradient):
        return gradient.as_subclass(Tensor)
    return gradient


def companions(given: Any) -> Any:
    """A gradient or a list of gradients, with each part replaced by its companion."""
    if isinstance(given, PartGradient):
        return given._companion
    if isinstance(given, list | tuple):
        return [companions(entry) for entry in given]
    return given


def scale_companions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """If a function scales gradients in place, scale the companions of parts too."""
    if getattr(func, "__name__", "") not in _SCALE:
        return
    first = args[0]
    if isinstance(first, PartGradient):
        func(first._companion, *args[1:], **kwargs)
        return
    if not isinstance(first, list | tuple):
        return
    places = [n for n, entry in enumerate(first) if isinstance(entry, PartGradient)]
    if not places:
        return
    rest = [
        [given[n] for n in places] if isinstance(given, list | tuple) else given
        for given in args[1:]
    ]
    func([first[n]._companion for n in places], *rest, **kwargs)

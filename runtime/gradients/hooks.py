"""Hooks that tell when a parameter's gradient has come."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...schema.errors import TargetError

GradientHook = Callable[[Tensor], None]
"""Called with a parameter after backward has added to its gradient."""


class Hooks:
    """The hooks that one object has on parameters."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, parameter: nn.Parameter, hook: GradientHook) -> None:
        """Call ``hook`` after each backward pass of a parameter."""
        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether anybody has a hook on a parameter."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def came_twice(name: str) -> TargetError:
    """The error where a parameter gets two gradients in a backward pass that overlaps with sums."""
    return TargetError(
        f"{name} got its gradient twice in one backward; hetflow cannot tell which is the last",
        hint="use checkpoint(..., use_reentrant=False), or prepare(..., overlap=False)",
    )

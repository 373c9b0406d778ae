"""Hooks on parameters, hetflow's and the script's own.

Hetflow's hooks tell when a gradient has come.

A hook of the script acts on the gradient of the whole batch under plain PyTorch. A step runs
several backward passes, on several workers, so autograd would call it with parts of that gradient.
Therefore a step takes the script's hooks from the parameters, and calls each once at its end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...schema.errors import TargetError

GradientHook = Callable[[Tensor], None]
"""Called with a parameter after backward has added to its gradient."""
_hooks_of_gradient = attrgetter("_backward_hooks")
_hooks_after = attrgetter("_post_accumulate_grad_hooks")
_OWN: set[int] = set()  # the ids of hetflow's hooks; torch gives no id twice


class Hooks:
    """The hooks that one object has on parameters."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, parameter: nn.Parameter, hook: GradientHook) -> None:
        """Call ``hook`` after each backward pass of a parameter."""
        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._note(handle)

    def add_on_gradient(self, parameter: nn.Parameter, hook: Callable[[Tensor], Tensor]) -> None:
        """Let ``hook`` change each gradient that comes to a parameter."""
        self._note(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def _note(self, handle: RemovableHandle) -> None:
        _OWN.add(handle.id)
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all."""
        for handle in self._handles:
            handle.remove()
            _OWN.discard(handle.id)
        self._handles.clear()


@dataclass(frozen=True, slots=True)
class _Held:
    """A hook that was taken from a parameter, and the place from which it was taken."""

    name: str
    parameter: nn.Parameter
    home: dict[int, Any]
    key: int
    hook: Any
    is_of_gradient: bool  # by register_hook; else by register_post_accumulate_grad_hook


class ScriptHooks:
    """The script's hooks on a job's parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._held: list[_Held] = []

    def take(self) -> None:
        """Take the hooks from the parameters, before the passes of a step.

        Raises:
            TargetError: There is one that needs the backward pass around it.
        """
        found = self._found()
        for held in found:
            if getattr(held.hook, "__module__", "") == "torch.autograd.graph":
                raise TargetError(
                    f"{held.name} has a hook of register_multi_grad_hook, which autograd would "
                    f"call once for each virtual node, with parts of the gradients",
                    hint="remove it, and call its function after job.backward",
                )
        for held in found:
            del held.home[held.key]
        self._held += found

    def check(self, *, are_carried: bool) -> None:
        """Refuse hooks that could not be called as under plain PyTorch, after ``take``.

        Raises:
            TargetError: A hook changes gradients that are added to those of earlier steps; or the
                script's function has made a hook.
        """
        first = next((held for held in self._held if held.is_of_gradient), None)
        if are_carried and first is not None:
            raise TargetError(
                f"{first.name} has the hook {_name_of(first.hook)} on its gradient, and gradients "
                f"of an earlier step are still there: the hook would change both",
                hint="call optimizer.zero_grad() in every step, or remove the hook and call its "
                "function before optimizer.step()",
            )
        made = next(iter(self._found()), None)
        if made is not None:
            raise TargetError(
                f"the loss function puts the hook {_name_of(made.hook)} on {made.name}: it would "
                f"be called once for each virtual node, with a part of the gradient",
                hint="register it once, before the loop",
            )

    def refuse(self) -> None:
        """Refuse all hooks: under a pipeline, gradients come in parts and their norms are told.

        Raises:
            TargetError: There is one.
        """
        for held in self._found():
            raise TargetError(
                f"{held.name} has the hook {_name_of(held.hook)}, and under a pipeline it would be "
                f"called once for each microbatch, with a part of the gradient",
                hint="remove it, and clip or change gradients after job.backward; or solve for a "
                "split plan, where a hook is called with the gradient of the whole batch",
            )

    def put_back(self) -> None:
        """Give the parameters their hooks back."""
        for held in self._held:
            held.home[held.key] = held.hook
        self._held = []

    @property
    def are_carried(self) -> bool:
        """Whether a parameter whose gradient a hook sees has a gradient of an earlier pass."""
        gradients = [held.parameter.grad for held in self._held if held.is_of_gradient]
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def run(self, unless: str = "") -> None:
        """Give the hooks back, and call each once with its parameter's gradient, if it has one.

        Args:
            unless: What gradients are meanwhile, if none of them may be changed.

        Raises:
            TargetError: A hook has changed one that may not be.
        """
        taken = self._held
        self.put_back()
        for held in taken:
            gradient = held.parameter.grad
            if gradient is None:
                continue
            before = gradient._version
            with torch.no_grad():
                changed = held.hook(gradient) if held.is_of_gradient else None
            if not held.is_of_gradient:
                held.hook(held.parameter)
            is_other = held.parameter.grad is not gradient or gradient._version != before
            if unless and (changed is not None or is_other):
                raise TargetError(
                    f"the hook {_name_of(held.hook)} changes the gradient of {held.name}, which "
                    f"is {unless}",
                    hint="call its function before optimizer.step(), once for the update",
                )
            if changed is not None:
                with torch.no_grad():
                    _replace(gradient, changed, held)

    @property
    def are_there(self) -> bool:
        """Whether hooks wait for ``run``."""
        return bool(self._held)

    def _found(self) -> list[_Held]:
        parameters = self._parameters.values()
        later = filter(None, map(_hooks_after, parameters))
        if not any(map(_hooks_of_gradient, parameters)) and _OWN.issuperset(chain(*later)):
            return []  # as a rule, in every step; the rest takes several times as long
        return [
            _Held(name, parameter, home, key, hook, is_of_gradient)
            for name, parameter in self._parameters.items()
            for is_of_gradient, home in (
                (True, parameter._backward_hooks),
                (False, parameter._post_accumulate_grad_hooks),
            )
            if home
            for key, hook in home.items()
            if key not in _OWN
        ]


def _replace(gradient: Tensor, changed: Any, held: _Held) -> None:
    if not isinstance(changed, Tensor) or changed.shape != gradient.shape:
        what = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise TargetError(
            f"the hook {_name_of(held.hook)} of {held.name} returned {what}, and the gradient has "
            f"shape {list(gradient.shape)}",
            hint="return a tensor like the gradient, or None",
        )
    gradient.copy_(changed)


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def came_twice(name: str) -> TargetError:
    """The error where a parameter gets two gradients in a backward pass that overlaps with sums."""
    return TargetError(
        f"{name} got its gradient twice in one backward; hetflow cannot tell which is the last",
        hint="use checkpoint(..., use_reentrant=False), or prepare(..., overlap=False)",
    )

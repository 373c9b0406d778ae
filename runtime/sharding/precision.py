"""The types in which workers keep, run and add up what they share.

A script that runs in fewer bits than it keeps says so in one of two ways. Its model has few bits,
and ``masters`` of more are kept; or its model has many, and the policy of FSDP runs it in fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ...schema.errors import TargetError


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of shared states; None leaves what the script has.

    Attributes:
        masters: Of the weights that are updated, where it has more bits than theirs.
        running: In which weights are gathered, and layers run (``param_dtype``).
        summed: In which gradients are added up over passes and workers (``reduce_dtype``).
        given: Of what the model and each layer give (``output_dtype``).
        casts_model: Whether the model's inputs are cast to ``running``.
        casts_layers: Whether each layer's are.
    """

    masters: torch.dtype | None = None
    running: torch.dtype | None = None
    summed: torch.dtype | None = None
    given: torch.dtype | None = None
    casts_model: bool = False
    casts_layers: bool = False

    def kept_type(self, parameter: Tensor) -> torch.dtype:
        """The type in which a worker keeps its share of a parameter, its gradient and state."""
        dtype = parameter.dtype
        if self.masters is None or not parameter.requires_grad or not dtype.is_floating_point:
            return dtype
        return max(dtype, self.masters, key=lambda each: each.itemsize)

    def running_type(self, parameter: Tensor) -> torch.dtype:
        """The type in which a parameter is gathered and runs."""
        dtype = parameter.dtype
        return self.running if self.running and dtype.is_floating_point else dtype

    def summed_type(self, parameter: Tensor) -> torch.dtype:
        """The type in which a parameter's gradients are added up over workers."""
        return self.summed or self.running_type(parameter)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module gets in place of its inputs."""
        return _cast((args, kwargs), self.running)

    def give(self, output: Any) -> Any:
        """What a module gives in place of its output."""
        return _cast(output, self.given)

    def cast_around(self, model: nn.Module, layers: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Cast what the model and its layers take and give from now on; the hooks that do it."""
        hooks = []
        for module in dict.fromkeys((model, *layers)):
            if self.casts_model if module is model else self.casts_layers:
                take = lambda _, args, kwargs: self.take(args, kwargs)  # noqa: E731
                hooks.append(module.register_forward_pre_hook(take, with_kwargs=True))
            if self.given is not None:
                hooks.append(module.register_forward_hook(lambda *called: self.give(called[-1])))
        return hooks


AS_IS = Precision()
"""What the script has."""


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A nested value, as FSDP2 casts it: tensors of numbers with a fraction, in pytrees alone."""
    if dtype is None:
        return value
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def precision_of(policy: Any, *, masters: torch.dtype | None = None) -> Precision:
    """What a ``MixedPrecisionPolicy`` of FSDP2 asks for, or a ``MixedPrecision`` of FSDP1.

    Args:
        policy: The policy; None for nothing.
        masters: See ``Precision``.

    Raises:
        TargetError: It is neither, or a type is none of numbers with a fraction.
    """
    _check("masters", masters)
    if policy is None:
        return Precision(masters)
    try:
        running, summed = policy.param_dtype, policy.reduce_dtype
        casts = running is not None and bool(policy.cast_forward_inputs)
    except AttributeError as error:
        raise TargetError(
            f"mp_policy is no policy of FSDP, but {policy!r}",
            hint="give torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        ) from error
    given = getattr(policy, "output_dtype", None)
    for dtype in (running, summed, given):
        _check("what an mp_policy names", dtype)
    casts_model = running is not None and getattr(policy, "cast_root_forward_inputs", casts)
    return Precision(masters, running, summed, given, casts_model, casts)


def _check(name: str, dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TargetError(
            f"{name} must be a floating-point type, got {dtype!r}",
            hint="give torch.float32 or torch.bfloat16",
        )

"""The call with which torch.export traced a model, and which other calls its graph is valid for."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...schema.errors import TargetError
from ..manifest import shape_text

_HINT = "call the model as the profiled workload does, or profile it as the script calls it"


class TracedCall:
    """Compares calls of a model with the traced one.

    Args:
        inputs: The traced call's tensors by argument name.
        constants: Its other arguments.
        guards: Called with a call's tensors; raises AssertionError if the model's code would have
            taken another branch for their sizes. None where this torch has no guards.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        constants: Mapping[str, Any],
        guards: Callable[..., Any] | None,
    ) -> None:
        self.inputs, self._constants, self._guards = inputs, constants, guards
        self._held: set[tuple[Any, ...]] = set()

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a call for which the graph is not valid.

        Args:
            arguments: Arguments by name (arguments.py), defaults included.

        Raises:
            TargetError: An argument differs from the traced call's, or the model's code would take
                another branch for its sizes; names it.
        """
        tensors = []
        for name, value in arguments.items():
            if name.startswith("*"):
                continue
            if name in self.inputs:
                tensors.append(self._tensor(name, value))
            elif name not in self._constants:
                if value is not None:
                    raise _refusal(f"with argument {name}, which the traced call did not have")
            elif isinstance(value, Tensor) or value != self._constants[name]:
                said = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise _refusal(f"with {name}={said}, and was traced with {self._constants[name]!r}")
        absent = [name for name in self.inputs if name not in arguments]
        if absent:
            raise _refusal(f"without {absent[0]}, which the traced call had")
        self._check_sizes(tensors)

    def _tensor(self, name: str, value: Any) -> Tensor:
        traced = self.inputs[name]
        if not isinstance(value, Tensor):
            raise _refusal(f"with {name}={value!r}, and was traced with a tensor")
        if value.dtype != traced.dtype or value.dim() != traced.dim():
            raise _unlike(name, value, traced)
        return value

    def _check_sizes(self, tensors: list[Tensor]) -> None:
        key = tuple(tensor.shape for tensor in tensors)
        if key in self._held:
            return
        if self._guards is not None:
            try:
                self._guards(*tensors)
            except AssertionError as error:
                raise _refusal(f"with sizes it was not traced for ({error})") from None
        else:
            for (name, traced), tensor in zip(self.inputs.items(), tensors, strict=True):
                if tensor.shape[1:] != traced.shape[1:]:
                    raise _unlike(name, tensor, traced)
        self._held.add(key)


def _unlike(name: str, tensor: Tensor, traced: Tensor) -> TargetError:
    return _refusal(
        f"with {name} as {shape_text(tensor)}, and was traced with {shape_text(traced)}"
    )


def _refusal(how: str) -> TargetError:
    return TargetError(f"the model is called {how}", hint=_HINT)

"""How a model's layers were found: what the runtime must repeat to cut it alike."""

import json
from typing import Any, Literal

from pydantic import TypeAdapter

from .errors import ProblemError
from .records import Index, Name, record, register_keys

TraceWay = Literal["fx", "export", "hooks"]


@record
class TracedInput:
    """A tensor that the model was called with: shape and type, batch first."""

    name: Name
    shape: tuple[Index, ...]
    dtype: Name


@record
class LayerTrace:
    """The way a model was taken apart, and why not by one before it.

    Args:
        way: ``fx`` (torch.fx), ``export`` (torch.export), else ``hooks`` on modules.
        inputs: With ``export``, the tensors that the model is called with.
        constants: With ``export``, the arguments that are no tensors.
        reason: Why the ways before did not do.
    """

    way: TraceWay
    inputs: tuple[TracedInput, ...] = ()
    constants: dict[str, bool | int | float | str | None] | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.way == "export" and not self.inputs:
            raise ProblemError("a trace by export names the model's inputs")

    @property
    def obstacle(self) -> str | None:
        """Why pipelines of these layers cannot be launched; None where they can."""
        if self.way != "hooks":
            return None
        return (
            "found by hooks: can be profiled and planned, not launched, because "
            f"{self.reason or 'nothing says how the model was traced'}"
        )


def trace_of(plain: dict[str, Any]) -> LayerTrace:
    """A trace from its plain form, as another process sent it."""
    return TypeAdapter(LayerTrace).validate_json(json.dumps(plain))


register_keys(TracedInput, LayerTrace)

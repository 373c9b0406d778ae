"""How a model's layers were found, which the runtime must repeat, and how they are named."""

import json
import re
from typing import Any, Literal

from .errors import ProblemError
from .records import Index, Name, adapter_of, record

TraceWay = Literal["fx", "export", "hooks"]
_REPEATED = re.compile(r"(.*?(?:^|[._])\d+)(?:[._]|$)")


@record
class TracedInput:
    """Shape (batch dimension first) and dtype of a tensor that the model was called with."""

    name: Name
    shape: tuple[Index, ...]
    dtype: Name


@record
class LayerTrace:
    """How a model was split into layers, and why the preferred ways failed.

    Args:
        way: ``fx`` (torch.fx) is tried first, then ``export`` (torch.export), then ``hooks`` on
            modules.
        inputs: With ``export``, the tensors that the model is called with.
        constants: With ``export``, the other arguments of the call.
        reason: Why the ways tried before failed.
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
        """Why pipelines of these layers cannot be launched; None if they can."""
        if self.way != "hooks":
            return None
        return (
            "found by hooks: can be profiled and planned, not launched, because "
            f"{self.reason or 'nothing says how the model was traced'}"
        )


def cannot_spread(trace: LayerTrace | None) -> bool:
    """Whether stages of these layers cannot spread tokens (sequence parallelism)."""
    return trace is not None and trace.way == "export"


def trace_of(plain: dict[str, Any]) -> LayerTrace:
    """Rebuild a trace from the dict that another process sent."""
    trace: LayerTrace = adapter_of(LayerTrace).validate_json(json.dumps(plain))
    return trace


def unit_of(name: str) -> str:
    """The repeated layer that a layer or module is in, by its name; empty for the rest.

    ``blocks.3.attention`` is in ``blocks.3``. Shared states are gathered by such units.
    """
    found = _REPEATED.match(name)
    return found[1] if found else ""

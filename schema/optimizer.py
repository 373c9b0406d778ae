"""The memory that an optimizer keeps besides the weights and their gradients."""

from dataclasses import replace
from typing import Literal

from .errors import ProblemError
from .options import option
from .records import Name, Ratio, record
from .spelling import nearest


@record
class OptimizerState:
    """The memory of an optimizer, in proportion to the weights that it trains.

    Args:
        name: Name of the optimizer; None if only the bytes were stated.
        state_bytes_per_weight_byte: Bytes of its state tensors per byte of trainable weights,
            without gradients and the weights themselves.
        is_default: Whether it was only the default for measuring, not the user's choice.
        workspace_bytes_per_weight_byte: The most that an update takes for a moment, per byte of
            weights that it updates; None if not known.
        masters: Whether it updates masters of twice the weights' bits. The state then counts them,
            and by what their gradients take more; the workspace is still one without masters.

    Example:
        >>> import hetflow
        >>> print(hetflow.OptimizerState(name="adamw", state_bytes_per_weight_byte=2))
        adamw (2 bytes of state a byte of weights)
    """

    name: Name | None = None
    state_bytes_per_weight_byte: Ratio
    is_default: bool = False
    workspace_bytes_per_weight_byte: Ratio | None = None
    masters: Literal[True] | None = None

    def with_masters(self) -> "OptimizerState":
        """The state if masters of twice the bits are kept: they, moments and gradients as wide."""
        more = 2 * self.state_bytes_per_weight_byte + 3
        return replace(self, state_bytes_per_weight_byte=more, masters=True)

    def __str__(self) -> str:
        kept = f"{self.state_bytes_per_weight_byte:.4g} bytes of state a byte of weights"
        kept += ", masters among them" if self.masters else ""
        return kept if self.name is None else f"{self.name} ({kept})"


# Number of tensors with the weights' shape and type that torch's optimizers keep; a test counts.
_STATE_TENSORS = {
    "sgd": 0,
    "sgd-momentum": 1,
    "adam": 2,
    "adamw": 2,
    "adagrad": 1,
    "adadelta": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
}
NAMES = tuple(_STATE_TENSORS)
"""Names of optimizers for flags; ``sgd`` is without momentum."""


def named_optimizer(name: str) -> OptimizerState:
    """Return the state of one of torch's optimizers, without options that add state (amsgrad, ...).

    Raises:
        ProblemError: The name is unknown.
    """
    if name not in _STATE_TENSORS:
        guess = nearest(name, NAMES)
        raise ProblemError(
            f"{option('optimizer', repr(name))}: must be one of {', '.join(NAMES)}",
            hint=(f"did you mean {guess!r}? " if guess else "")
            + "for another optimizer state its memory with "
            f"{option('state_bytes_per_weight_byte')}",
        )
    return OptimizerState(name=name, state_bytes_per_weight_byte=float(_STATE_TENSORS[name]))


def asked_optimizer(name: str | None, ratio: float | None) -> OptimizerState | None:
    """Combine the flags ``--optimizer`` and ``--state-bytes-per-weight-byte``; None if unset.

    Raises:
        ProblemError: Both are given, or there is no such optimizer.
    """
    if name is not None and ratio is not None:
        raise ProblemError(
            f"{option('optimizer')} and {option('state_bytes_per_weight_byte')} both "
            "say what the optimizer keeps",
            hint="give one of them",
        )
    if name is not None:
        return named_optimizer(name)
    return None if ratio is None else OptimizerState(state_bytes_per_weight_byte=ratio)

"""What an optimizer keeps beside the weights and their gradients."""

from .errors import ProblemError
from .records import Name, Ratio, nearest, record, register_keys


@record
class OptimizerState:
    """The memory of an optimizer, in proportion to the weights that it trains.

    Args:
        name: Which one; None where only the bytes were stated.
        state_bytes_per_weight_byte: Bytes of its state tensors for each byte of trainable weights;
            gradients and the weights themselves are counted apart.
        is_default: The user did not choose it: it only served to measure.
    """

    name: Name | None = None
    state_bytes_per_weight_byte: Ratio
    is_default: bool = False

    def __str__(self) -> str:
        kept = f"{self.state_bytes_per_weight_byte:.4g} bytes of state a byte of weights"
        return kept if self.name is None else f"{self.name} ({kept})"


# torch's own optimizers keep so many tensors of the weights' shape and type; a test counts them.
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
"""Optimizers that flags may name; ``sgd`` is plain, without momentum."""


def named_optimizer(name: str) -> OptimizerState:
    """The state of one of torch's optimizers, without options that keep more (amsgrad, centered).

    Raises:
        ProblemError: There is no such name.
    """
    if name not in _STATE_TENSORS:
        guess = nearest(name, NAMES)
        raise ProblemError(
            f"--optimizer {name!r}: must be one of {', '.join(NAMES)}",
            hint=(f"did you mean {guess!r}? " if guess else "")
            + "for another optimizer state its memory with --state-bytes-per-weight-byte",
        )
    return OptimizerState(name=name, state_bytes_per_weight_byte=float(_STATE_TENSORS[name]))


def asked_optimizer(name: str | None, ratio: float | None) -> OptimizerState | None:
    """What the flags ``--optimizer`` and ``--state-bytes-per-weight-byte`` say together.

    Raises:
        ProblemError: Both are given, or there is no such optimizer.
    """
    if name is not None and ratio is not None:
        raise ProblemError(
            "--optimizer and --state-bytes-per-weight-byte both say what the optimizer keeps",
            hint="give one of them",
        )
    if name is not None:
        return named_optimizer(name)
    return None if ratio is None else OptimizerState(state_bytes_per_weight_byte=ratio)


register_keys(OptimizerState)

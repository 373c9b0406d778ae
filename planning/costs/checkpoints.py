"""How often to write a checkpoint, from what one takes and how often machines are lost."""

from math import isfinite, sqrt

from ...schema.errors import ProblemError


def young_seconds(checkpoint_seconds: float, mean_seconds: float) -> float:
    """Work between two checkpoints (Young 1974): sqrt(2 delta M).

    Args:
        checkpoint_seconds: delta, what writing one takes.
        mean_seconds: M, the mean time between losses.
    """
    _refuse(checkpoint_seconds, mean_seconds)
    return sqrt(2 * checkpoint_seconds * mean_seconds)


def daly_seconds(checkpoint_seconds: float, mean_seconds: float) -> float:
    """Work between two checkpoints (Daly 2006, equation 37).

    sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta; M where delta >= 2M.
    """
    _refuse(checkpoint_seconds, mean_seconds)
    if checkpoint_seconds >= 2 * mean_seconds:
        return mean_seconds
    part = checkpoint_seconds / (2 * mean_seconds)
    series = 1 + sqrt(part) / 3 + part / 9
    return sqrt(2 * checkpoint_seconds * mean_seconds) * series - checkpoint_seconds


def lost_share(interval_seconds: float, checkpoint_seconds: float, mean_seconds: float) -> float:
    """The part of the time that checkpoints and repeated work take, to first order (Young).

    delta / tau for writing, and half an interval again, (tau + delta) / 2, for each loss.
    """
    _refuse(checkpoint_seconds, mean_seconds)
    again = (interval_seconds + checkpoint_seconds) / (2 * mean_seconds)
    return checkpoint_seconds / interval_seconds + again


def _refuse(checkpoint_seconds: float, mean_seconds: float) -> None:
    for name, value in (("checkpoint", checkpoint_seconds), ("mean time", mean_seconds)):
        if not (isfinite(value) and value > 0):
            raise ProblemError(f"a {name} must be finite and > 0 s, got {value:g}")

"""Compare the terms of a run's step: predicted and measured."""

from ..schema.run import RunRecord, TermComparison
from .grid import grid, milliseconds


def terms_table(run: RunRecord) -> str:
    """One row per term; terms that are off by more than 5 % of the step are marked."""
    rows = [
        (
            _name(entry),
            entry.device_type or "-",
            milliseconds(entry.predicted_seconds),
            milliseconds(entry.measured_seconds),
            _of_step(entry, run.measured_step_seconds),
            "off" if entry.is_off else "",
        )
        for entry in run.terms
    ]
    return grid(("term", "device", "predicted", "measured", "error of the step", ""), rows)


def _name(entry: TermComparison) -> str:
    return entry.term if entry.times == 1 else f"{entry.term}, {entry.times} times"


def _of_step(entry: TermComparison, step: float | None) -> str:
    if entry.predicted_seconds is None or not step:
        return "-"
    error = entry.times * (entry.predicted_seconds - entry.measured_seconds)
    return f"{100 * error / step:+.1f} %"

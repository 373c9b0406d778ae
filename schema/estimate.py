"""The record of how a profile was estimated instead of measured."""

from .choices import Precision
from .records import Name, Ratio, record


@record
class Estimate:
    """How a profile, or a part of a plan, was estimated.

    Args:
        device_type: The device type that the estimate is for.
        spec: The row of the device table whose peak figures were used.
        source: The source of those figures.
        precision: The assumed precision of products of 32-bit matrices; None is torch's default
            (convolutions in TF32 if the device has it, everything else in float32).
        step_error: Relative error. Nine in ten estimates were within this fraction of the measured
            time, on devices that the efficiencies were not fitted to
            (benchmarks/device_estimates.py).
        ratio_error: The same of how many times as long as on another type a pass takes; None in
            files of earlier versions.
        carried_from: The type whose measured profile was scaled to this one; None if nothing was
            measured.
    """

    device_type: Name
    spec: Name
    source: str
    precision: Precision | None = None
    step_error: Ratio
    ratio_error: Ratio | None = None
    carried_from: Name | None = None

    def __str__(self) -> str:
        origin = "" if self.carried_from is None else f", carried from {self.carried_from}"
        return (
            f"{self.device_type} estimated, not measured (figures of {self.spec}{origin}; "
            f"9 in 10 held-out estimates were within {self.step_error:.0%})"
        )

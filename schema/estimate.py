"""What says that a profile was computed, not measured."""

from typing import Literal

from .records import Name, Ratio, record, register_keys

Precision = Literal["float32", "tf32", "float16", "bfloat16"]


@record
class Estimate:
    """How a profile, or a part of a plan, was estimated.

    Args:
        device_type: Of which type.
        spec: The row of the device table whose peak figures were used.
        source: Where those figures come from.
        precision: How products of 32-bit matrices were taken to be computed; None: as torch does
            by default (convolutions in TF32 where the device has it, all others in float32).
        step_error: Within this fraction of the measured time lay nine in ten estimates of devices
            that the efficiencies had not been fitted to (benchmarks/device_estimates.py).
        carried_from: The type whose measured profile was carried to this one; None where nothing
            was measured.
    """

    device_type: Name
    spec: Name
    source: str
    precision: Precision | None = None
    step_error: Ratio
    carried_from: Name | None = None

    def __str__(self) -> str:
        origin = "" if self.carried_from is None else f", carried from {self.carried_from}"
        return (
            f"{self.device_type} estimated, not measured (figures of {self.spec}{origin}; "
            f"9 in 10 held-out estimates were within {self.step_error:.0%})"
        )


register_keys(Estimate)

"""The time of an operator on a device from its counts: a roofline with fitted efficiencies.

An operator takes its launch and the longer of computing and moving (Williams et al., Roofline,
2009): ``launch + max(flops / (peak * compute), bytes / (bandwidth * memory))``. Operators of a
pass run one after another, so their times add up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...schema.layers import Operator
from ...schema.options import Precision
from .device_table import DeviceSpec

Unit = Literal["vector", "tf32", "half"]
UNITS: tuple[Unit, ...] = ("vector", "tf32", "half")


UNLIMITED_WATTS = 4e-12
"""For an operation a second, above which the power of a board limits no unit."""


def powered(spec: DeviceSpec, peak: float) -> float:
    """The watts for each operation of a unit at its peak rate, over those that limit nothing."""
    return min(spec.board_watts / (peak * UNLIMITED_WATTS), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What share of a peak rate training reaches. Fractions but for the last three.

    Args:
        vector: Of 32-bit products on vector units.
        tf32: Of 32-bit products on matrix units.
        half: Of 16-bit products on matrix units.
        convolution_vector: Of convolutions on vector units. This and the next two may be above 1:
            cuDNN's algorithms take fewer operations than are counted.
        convolution_tf32: Of convolutions of 32 bits on matrix units.
        convolution_half: Of convolutions of 16 bits on matrix units.
        memory: Of the memory's bandwidth.
        convolution_memory: The same of convolutions, whose algorithms move more than is counted.
        channels_last_memory: The same of convolutions in channels_last, which change no layouts.
        link: Of a link's bandwidth, in an all-reduce of large messages.
        launch_seconds: Of each operator, whatever its size.
        power: How a unit's share falls with the watts that its device has for each operation: to
            this power, below ``UNLIMITED_WATTS``. Boards run matrix units below their peak's clock.
        forms: How many times these shares of its units a form reaches, by its row's name; 1 where
            no run tells.
    """

    vector: float
    tf32: float
    half: float
    convolution_vector: float
    convolution_tf32: float
    convolution_half: float
    memory: float
    convolution_memory: float
    channels_last_memory: float
    link: float
    launch_seconds: float
    power: float
    forms: Mapping[str, float] = field(default_factory=dict)

    def of(self, unit: Unit, peak: float, operator: Operator, spec: DeviceSpec) -> float:
        """That of an operator on a unit of a form of device, whose peak rate is known."""
        times: float = self.forms.get(spec.name, 1.0) * powered(spec, peak) ** self.power
        if operator.is_convolution:
            shares = self.convolution_vector, self.convolution_tf32, self.convolution_half
            return times * dict(zip(UNITS, shares, strict=True))[unit]
        shares = self.vector, self.tf32, self.half
        return min(times * dict(zip(UNITS, shares, strict=True))[unit], 1.0)

    def memory_of(self, operator: Operator) -> float:
        """That of an operator on the memory's bandwidth."""
        if not operator.is_convolution:
            return self.memory
        return self.channels_last_memory if operator.channels_last else self.convolution_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutError:
    """Nine in ten held-out estimates were within this fraction of the measured time.

    Args:
        products: Of models whose work is products of matrices.
        convolutions: Of models most of whose work is convolutions.
    """

    products: float
    convolutions: float

    def of(self, operators: Iterable[Operator]) -> float:
        """Of a model, by which of the two most of its floating-point operations are."""
        work = {True: 0.0, False: 0.0}
        for operator in operators:
            work[operator.is_convolution] += operator.flops * operator.count
        return self.convolutions if work[True] > work[False] else self.products


def unit_of(
    operator: Operator, spec: DeviceSpec, precision: Precision | None = None
) -> tuple[Unit, float]:
    """Which unit of a device computes an operator's products, and its peak rate.

    Args:
        operator: What is computed.
        spec: The device.
        precision: How products of 32-bit tensors are computed; None as torch does by default: on
            matrix units for convolutions where they take TF32, on vector units for all others.
    """
    kind = operator.dtype
    if kind == "float32":
        kind = precision or ("tf32" if operator.is_convolution else "float32")
    half = spec.half_flops_per_second
    if half is not None and (kind == "float16" or (kind == "bfloat16" and spec.has_bfloat16)):
        return "half", half
    if kind == "tf32" and spec.tf32_flops_per_second is not None:
        return "tf32", spec.tf32_flops_per_second
    return "vector", spec.float32_flops_per_second


def operator_seconds(
    operator: Operator,
    spec: DeviceSpec,
    efficiency: Efficiency,
    precision: Precision | None = None,
) -> float:
    """The time of one call."""
    unit, peak = unit_of(operator, spec, precision)
    compute = operator.flops / (peak * efficiency.of(unit, peak, operator, spec))
    move = operator.num_bytes / (spec.memory_bytes_per_second * efficiency.memory_of(operator))
    return efficiency.launch_seconds + max(compute, move)


def seconds_of(
    operators: Iterable[Operator],
    spec: DeviceSpec,
    efficiency: Efficiency,
    precision: Precision | None = None,
) -> float:
    """The time of operators that run one after another."""
    return sum(
        operator.count * operator_seconds(operator, spec, efficiency, precision)
        for operator in operators
    )

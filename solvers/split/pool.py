"""Sizes and times of a batch split's devices, as flat arrays."""

import numpy as np
import numpy.typing as npt

from ...planning.costs.comm import exposed_seconds
from ...schema.plan import ReplicaGroup, device_group
from ...schema.problem import DeviceOption, SplitProblem
from ...schema.profile import BatchPoint

Ints = npt.NDArray[np.int64]


class SplitPool:
    """Sizes and times of plans on two or more devices, as flat arrays, type after type.

    A plan on one device is none of these: what it costs may be measured apart (levels.py).

    Attributes:
        batch: B, samples to share out.
        counts: Devices of each type.
        sizes: [entries] samples per pass, s.
        seconds: [entries] time per pass, t_i(s).
        exposed: [entries] what synchronisation adds at that size beyond the least, e_i(s): once
            for a device, however many passes it makes.
        limits: [entries] most passes of one of several devices, floor((B - 1) / s).
        starts: [types] first entry of each type.
    """

    def __init__(self, problem: SplitProblem) -> None:
        self.options = [
            (option, points) for option in problem.devices if (points := problem.points(option))
        ]
        flat = [point for _, points in self.options for point in points]
        self.batch = problem.global_batch_size
        self.counts = tuple(option.num_devices for option, _ in self.options)
        self.sizes = np.array([point.batch_size for point in flat], dtype=np.int64)
        self.seconds = np.array([point.step_seconds for point in flat], dtype=np.float64)
        self.exposed = np.array(
            [
                exposed_seconds(option.sync, point.batch_size) or 0.0
                for option, points in self.options
                for point in points
            ],
            dtype=np.float64,
        )
        self.limits = (self.batch - 1) // np.maximum(self.sizes, 1)
        lengths = [len(points) for _, points in self.options]
        self.starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
        self.ends = np.cumsum(lengths).astype(np.int64)

    def passes(self, seconds: float) -> Ints:
        """[entries] the most passes of each size within ``seconds``, what is exposed included."""
        left = np.maximum(seconds - self.exposed, 0.0)
        capped = np.minimum(left / self.seconds, self.limits)
        fit: Ints = capped.astype(np.int64)
        fit += self.device_seconds(fit + 1) <= seconds  # division may round across a whole number
        fit -= (fit > 0) & (self.device_seconds(fit) > seconds)
        capped_fit: Ints = np.minimum(fit, self.limits)
        return capped_fit

    def device_seconds(self, passes: Ints) -> npt.NDArray[np.float64]:
        """[entries] how long a device takes for ``passes`` of each size: v t_i(s) + e_i(s)."""
        found: npt.NDArray[np.float64] = passes * self.seconds + self.exposed
        return found

    def tops(self, passes: Ints) -> list[int]:
        """[types] the most samples one device of each type can do with ``passes``."""
        most: list[int] = np.maximum.reduceat(passes * self.sizes, self.starts).tolist()
        return most

    def entries(self, passes: Ints, kind: int) -> list[tuple[int, int]]:
        """(size, passes) of one type, those with at least one pass."""
        span = slice(self.starts[kind], self.ends[kind])
        pairs = zip(self.sizes[span].tolist(), passes[span].tolist(), strict=True)
        return [(size, count) for size, count in pairs if count]


def group_on(
    option: DeviceOption, num_devices: int, passes: int, point: BatchPoint
) -> ReplicaGroup:
    """Devices of a type, among several, that each make so many passes of a measured size."""
    return device_group(
        device_type=option.device_type,
        num_devices=num_devices,
        virtual_nodes=passes,
        virtual_node_batch_size=point.batch_size,
        memory_bytes=point.peak_memory_bytes,
        pass_seconds=point.step_seconds,
        interpolated=point.batch_size in option.interpolated_sizes,
        measured_busy=option.alone is not None,
        exposed_seconds=exposed_seconds(option.sync, point.batch_size),
    )

"""The sums of a step as float32 numbers, which travel with a bucket of gradients.

What is summed stays exact. Each loss and each weight comes from one worker, and zeros from the
others; a double is the sum of three float32 numbers. Flags and counts are small whole numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_THIRDS = 3
"""Float32 numbers whose sum is a double."""


@dataclass(frozen=True, slots=True)
class PackedSums:
    """Where which number is: flags, thirds of losses, thirds of weights, which parameters are used.

    Unpacked, in float64, they are: flags, losses * weights, weights, which parameters are used.

    Attributes:
        num_flags: Numbers of 0 and 1.
        num_nodes: Virtual nodes, which have a loss and a weight each.
        num_parameters: Parameters.
    """

    num_flags: int
    num_nodes: int
    num_parameters: int

    @property
    def length(self) -> int:
        """How many numbers there are."""
        return self.num_flags + 2 * NUM_THIRDS * self.num_nodes + self.num_parameters

    def pack(
        self,
        flags: Sequence[float],
        losses: Mapping[int, Tensor],
        weights: Mapping[int, float],
        unused: Sequence[int],
        into: Tensor,
    ) -> None:
        """Write one worker's numbers; the host waits for nothing.

        Args:
            flags: In order.
            losses: By virtual node, on the device.
            weights: By virtual node.
            unused: Numbers of the parameters that this worker has not used.
            into: [length] where they are summed.
        """
        nodes, first = self.num_nodes, self.num_flags
        host = [*flags, *[0.0] * (2 * NUM_THIRDS * nodes), *[1.0] * self.num_parameters]
        for node, weight in weights.items():
            for number, part in enumerate(_thirds_of_number(weight), start=NUM_THIRDS):
                host[first + number * nodes + node] = part
        for index in unused:
            host[index - self.num_parameters] = 0.0
        into.copy_(torch.tensor(host, dtype=torch.float32), non_blocking=True)
        for node, loss in losses.items():
            thirds = _thirds_of(loss) if loss.dtype == torch.float64 else [loss]
            for number, third in enumerate(thirds):
                into[first + number * nodes + node] = third

    def unpack(self, sums: Tensor) -> Tensor:
        """[flags, losses * weights, weights, used] in float64, of [length] sums over workers."""
        first, nodes = self.num_flags, self.num_nodes
        wide = sums.double()
        rest = first + 2 * NUM_THIRDS * nodes
        losses, weights = wide[first:rest].view(2, NUM_THIRDS, nodes).sum(1)
        return torch.cat([wide[:first], losses * weights, weights, wide[rest:]])


def _thirds_of_number(value: float) -> list[float]:
    if value.is_integer() and value < 1 << 24:
        return [value]
    return [float(third) for third in _thirds_of(torch.tensor(value, dtype=torch.float64))]


def _thirds_of(value: Tensor) -> list[Tensor]:
    """The nearest float32, the nearest of what is left, and the rest; of infinity, zeros."""
    first = value.float()
    rest = (value - first).nan_to_num(0.0, 0.0, 0.0)
    second = rest.float()
    return [first, second, (rest - second).float()]

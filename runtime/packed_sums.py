"""Pack the sums of a step into float32 numbers, which travel with a bucket of gradients.

The sums stay exact. Each loss and each weight comes from one worker, and the others send zeros; a
double is sent as three float32 numbers that add up to it. Flags and counts are small integers.
"""

from collections.abc import Mapping, Sequence
from ctypes import c_float, memmove
from dataclasses import dataclass
from struct import pack

import torch
from torch import Tensor

NUM_THIRDS = 3
"""How many float32 numbers represent a double exactly."""


@dataclass(frozen=True, slots=True)
class PackedSums:
    """The layout of the packed numbers.

    Packed, in float32: flags; losses as three numbers each; weights as three numbers each; for
    every parameter whether it is used. Unpacked, in float64: flags, losses * weights, weights,
    used parameters.

    On the host these are plain numbers: between two passes torch's and numpy's code is no longer
    in the caches.

    Attributes:
        num_flags: Number of flags: small integers, whose sums are below 2**24.
        num_nodes: Number of virtual nodes; each has a loss and a weight.
        num_parameters: Number of parameters.
    """

    num_flags: int
    num_nodes: int
    num_parameters: int

    @property
    def length(self) -> int:
        """The number of packed float32 numbers."""
        return self.num_flags + 2 * NUM_THIRDS * self.num_nodes + self.num_parameters

    def pack(
        self,
        flags: Sequence[float],
        losses: Mapping[int, Tensor | float],
        weights: Mapping[int, Tensor | float],
        unused: Sequence[int],
        into: Tensor,
    ) -> None:
        """Write one worker's numbers without making the host wait.

        Args:
            flags: [num_flags] in order.
            losses: Loss by virtual node, on the device or as a number.
            weights: Weight by virtual node, as losses.
            unused: Indices of the parameters that this worker has not used.
            into: [length] float32, contiguous, where they are summed.
        """
        nodes, first = self.num_nodes, self.num_flags
        host = [*flags, *[0.0] * (2 * NUM_THIRDS * nodes), *[1.0] * self.num_parameters]
        on_device: list[tuple[slice, Tensor]] = []
        for start, values in ((first, losses), (first + NUM_THIRDS * nodes, weights)):
            for node, value in values.items():
                place = slice(start + node, start + node + NUM_THIRDS * nodes, nodes)
                if isinstance(value, Tensor):
                    on_device.append((place, value))
                else:
                    host[place] = _thirds_of_number(value)
        for index in unused:
            host[index - self.num_parameters] = 0.0
        if into.is_cpu:
            memmove(into.data_ptr(), pack(f"{len(host)}f", *host), 4 * len(host))
        else:
            into.copy_(torch.tensor(host, dtype=torch.float32), non_blocking=True)
        for place, value in on_device:
            if value.dtype == torch.float64:
                into[place] = torch.stack(_thirds_of(value)).reshape(-1)
            else:
                into[place.start] = value

    def unpack(self, sums: Tensor) -> Tensor:
        """Unpack [length] sums over workers to float64; the class's docstring gives the order."""
        if sums.is_cpu:
            return torch.tensor(self.unpack_on_host(sums), dtype=torch.float64)
        first, nodes = self.num_flags, self.num_nodes
        rest = first + 2 * NUM_THIRDS * nodes
        wide = sums.double()
        losses, weights = wide[first:rest].view(2, NUM_THIRDS, nodes).sum(1)
        return torch.cat([wide[:first], losses * weights, weights, wide[rest:]])

    def unpack_on_host(self, sums: Tensor) -> list[float]:
        """Like ``unpack``, of sums that are on the host."""
        numbers: list[float] = sums.tolist()
        first, nodes = self.num_flags, self.num_nodes
        middle, rest = first + NUM_THIRDS * nodes, first + 2 * NUM_THIRDS * nodes
        losses = [sum(numbers[first + node : middle : nodes]) for node in range(nodes)]
        weights = [sum(numbers[middle + node : rest : nodes]) for node in range(nodes)]
        products = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
        return [*numbers[:first], *products, *weights, *numbers[rest:]]


def _thirds_of_number(value: float) -> list[float]:
    if c_float(value).value == value:
        return [value, 0.0, 0.0]
    return [float(third) for third in _thirds_of(torch.tensor(value, dtype=torch.float64))]


def _thirds_of(value: Tensor) -> list[Tensor]:
    """Three float32 numbers that add up to a double; zeros after the first for infinity."""
    first = value.float()
    rest = (value - first).nan_to_num(0.0, 0.0, 0.0)
    second = rest.float()
    return [first, second, (rest - second).float()]

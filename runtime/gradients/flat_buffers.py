"""The gradient buffers of a worker that holds a whole model, cut into buckets (VirtualFlow 3.2).

Every parameter's gradient is a view into one flat buffer (one per dtype and device). The order is
the reverse of registration, which is about the order in which backward fills it. All virtual
nodes of a device add into it, so memory does not grow with their number. A bucket of the
all-reduce is a slice of the buffer. The last bucket has space for a few more numbers, so the sums
of a step need no collective of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor, nn

from ...devices.backend import backend_of

# Parameters' places in a flat buffer of gradients.

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
_kind = attrgetter("requires_grad", "dtype", "device", "shape")


def view_like(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """The part of ``flat`` for one parameter, in the parameter's memory format."""
    part = flat[offset : offset + parameter.numel()]
    dense = any(
        parameter.dim() == dims and parameter.is_contiguous(memory_format=layout)
        for dims, layout in zip((4, 5), _CHANNELS_LAST, strict=True)
    )
    if dense and not parameter.is_contiguous():
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)


def layout_of(parameters: Sequence[nn.Parameter]) -> tuple[object, ...]:
    """What the views of parameters depend on; if it changes, buffers must be made again.

    It changes where parameters are frozen, unfrozen, cast, moved, or get another memory format.
    """
    # By ``map``, which takes half as long as a loop.
    return *map(_kind, parameters), *map(Tensor.stride, parameters)


# The first bucket is small, so that a small model's reduction also begins during backward, as in
# DistributedDataParallel.
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(slots=True)
class Bucket:
    """A slice of a flat buffer that one collective reduces.

    Attributes:
        flat: The slice, as real numbers.
        place: Number of the flat buffer, start and end in it.
        parameters: Indices of those whose gradients are complete when all have come.
        num_ready: How many have come in an armed backward pass.
        last: The parameter whose gradient was the last to come; -1 if none was yet.
    """

    flat: Tensor
    place: tuple[int, int, int]
    parameters: list[int] = field(default_factory=list)
    num_ready: int = 0
    last: int = -1

    @property
    def is_ready(self) -> bool:
        """Whether all its gradients have come."""
        return self.num_ready == len(self.parameters)


class FlatBuffers:
    """Gradient buffers of the parameters that are trained, and their buckets.

    Args:
        parameters: All parameters, trainable or not, in the same order on every worker.
        bucket_bytes: Minimum size of a bucket; None takes that of the device kind.
        alignment: Buckets end at multiples of so many numbers; the remainder goes into the next.
        num_sums: How many further float32 numbers travel with the last bucket.

    Attributes:
        flats: The buffers.
        views: Of each trainable parameter, by its index, the view for its gradient.
        buckets: In the order of their sums, which all workers share.
        bucket_of: Of each trainable parameter, by its index, its bucket; none if it has no numbers.
        sums: [num_sums] view of the further numbers; None where the last buffer is not float32.
        first_with_sums: The number of the bucket in which they begin; -1 without such numbers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        bucket_bytes: int | None,
        alignment: int,
        num_sums: int,
    ) -> None:
        self._parameters = parameters
        self._bucket_bytes, self._alignment = bucket_bytes, alignment
        self.flats: list[Tensor] = []
        self.views: dict[int, Tensor] = {}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self.sums: Tensor | None = None
        self.first_with_sums = -1
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index in reversed(range(len(parameters))):
            parameter = parameters[index]
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        for number, ((dtype, device), members) in enumerate(kinds.items(), start=1):
            has_sums = number == len(kinds) and dtype == torch.float32
            self._lay_out(members, dtype, device, num_sums if has_sums else 0)

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(flat.nbytes for flat in self.flats)

    def _lay_out(
        self, members: Sequence[int], dtype: torch.dtype, device: torch.device, num_sums: int
    ) -> None:
        total = sum(self._parameters[index].numel() for index in members)
        unit = self._alignment
        flat = torch.zeros(-(-(total + num_sums) // unit) * unit, dtype=dtype, device=device)
        self.flats.append(flat)
        start, offset = 0, 0
        usual = self._bucket_bytes or backend_of(device).bucket_bytes
        bucket: list[int] = []
        for index in members:
            parameter = self._parameters[index]
            self.views[index] = view_like(flat, offset, parameter)
            bucket.append(index)
            offset += parameter.numel()
            least = usual if self.buckets else min(usual, FIRST_BUCKET_BYTES)
            if (offset - start) * flat.element_size() >= least or offset == total:
                end = len(flat) if offset == total else offset // unit * unit
                for cut in _cuts(start, end, usual // flat.element_size(), unit):
                    # Further buckets of a large parameter are ready together with its first.
                    self._add_bucket(flat, *cut, bucket)
                    bucket = []
                start = end
        if num_sums:
            self.sums = flat[total : total + num_sums]
            self.first_with_sums = next(
                number
                for number, bucket in enumerate(self.buckets)
                if bucket.place[0] == len(self.flats) - 1 and bucket.place[2] > total
            )

    def _add_bucket(self, whole: Tensor, start: int, end: int, members: list[int]) -> None:
        flat = whole[start:end]
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        made = Bucket(real, (len(self.flats) - 1, start, end), members)
        self.bucket_of.update(dict.fromkeys(members, made))
        self.buckets.append(made)


def _cuts(start: int, end: int, usual: int, unit: int) -> Iterator[tuple[int, int]]:
    """Cut [start, end) into about equal parts of about ``usual`` numbers, at multiples of unit."""
    parts = max(round((end - start) / max(usual, 1)), 1)
    length = max(-(-(end - start) // (parts * unit)) * unit, unit)
    for at in range(start, end, length):
        yield at, min(at + length, end)

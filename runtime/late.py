"""Numbers of a device that the host reads a step later, so that it need not wait for the step."""

import torch
from torch import Tensor

from ..devices.backend import Mark, backend_of


class LateValues:
    """A few numbers a step, of a device that works beside the host, through pinned memory.

    Read in the step after, they have long arrived. Where the host is a whole step ahead it waits
    for the step before, and the device still has work.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._arrives: tuple[torch.device, Mark] | None = None

    def exchange(self, values: Tensor) -> list[float] | None:
        """The numbers of the step before, None for the first; ``values`` are this step's.

        Args:
            values: [numbers], float64, on the device.
        """
        before = self._take()
        if self._buffer is None or self._buffer.shape != values.shape:
            self._buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._buffer.copy_(values, non_blocking=True)
        self._arrives = values.device, backend_of(values.device).mark(values.device)
        return before

    def forget(self) -> None:
        """The next step is a first one again."""
        self._arrives = None

    def _take(self) -> list[float] | None:
        if self._arrives is None:
            return None
        assert self._buffer is not None
        device, mark = self._arrives
        backend = backend_of(device)
        if not backend.has_passed(mark):
            backend.wait_for(mark)
        self._arrives = None
        found: list[float] = self._buffer.tolist()
        return found

"""Numbers from a device that the host reads one step later, so that it need not wait."""

import torch
from torch import Tensor

from ..devices.backend import Mark, backend_of


class LateValues:
    """Read a few numbers per step from an asynchronous device, through pinned memory.

    They are read in the next step, when they have usually arrived. If the host is a whole step
    ahead, it waits for the previous step, and the device still has work.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._arrives: tuple[torch.device, Mark] | None = None

    def exchange(self, values: Tensor) -> list[float] | None:
        """Hand in this step's numbers and get those of the step before.

        Args:
            values: [numbers] of this step, float64, on the device.

        Returns:
            [numbers] of the step before; None in the first step.
        """
        before = self._take()
        if self._buffer is None or self._buffer.shape != values.shape:
            self._buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._buffer.copy_(values, non_blocking=True)
        self._arrives = values.device, backend_of(values.device).mark(values.device)
        return before

    def forget(self) -> None:
        """Treat the next step as a first one."""
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

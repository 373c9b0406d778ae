"""A host that need not wait for its device: it is at most one step ahead of it."""

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
        before = self.take()
        if self._buffer is None or self._buffer.shape != values.shape:
            self._buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._buffer.copy_(values, non_blocking=True)
        self._arrives = values.device, backend_of(values.device).mark(values.device)
        return before

    def forget(self) -> None:
        """Treat the next step as a first one."""
        self._arrives = None

    def take(self) -> list[float] | None:
        """The numbers that were handed in last; None where there are none."""
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


class HostLead:
    """Keeps the host at most one step ahead: what it has asked of the device takes memory there.

    ``LateValues`` does so too, for an engine that reads numbers late.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, backend_of(device)
        self._last: Mark | None = None

    def end_step(self) -> None:
        """End a step; wait for the step before, which has usually ended long ago."""
        before, self._last = self._last, self._backend.mark(self._device)
        if before is not None and not self._backend.has_passed(before):
            self._backend.wait_for(before)

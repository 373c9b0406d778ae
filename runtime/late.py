"""Numbers of a device that the host reads a step later, so that it need not wait for the step."""

import torch
from torch import Tensor


class LateValues:
    """A few numbers a step, of a CUDA device, through pinned memory.

    Read in the step after, they have long arrived. Where the host is a whole step ahead it waits
    for the step before, and the device still has work.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._arrives: torch.cuda.Event | None = None
        self._is_on_its_way = False

    def exchange(self, values: Tensor) -> list[float] | None:
        """The numbers of the step before, None for the first; ``values`` are this step's.

        Args:
            values: [numbers], float64, on the device.
        """
        before = self._take()
        if self._buffer is None or self._buffer.shape != values.shape:
            self._buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        if self._arrives is None:
            self._arrives = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._buffer.copy_(values, non_blocking=True)
        self._is_on_its_way = True
        self._arrives.record(torch.cuda.current_stream(values.device))
        return before

    def forget(self) -> None:
        """The next step is a first one again."""
        self._is_on_its_way = False

    def _take(self) -> list[float] | None:
        if not self._is_on_its_way:
            return None
        assert self._buffer is not None
        assert self._arrives is not None
        if not self._arrives.query():  # type: ignore[no-untyped-call]
            self._arrives.synchronize()  # type: ignore[no-untyped-call]
        self._is_on_its_way = False
        found: list[float] = self._buffer.tolist()
        return found

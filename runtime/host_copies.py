"""Copy tensors to the host while the worker goes on."""

import torch
from torch import Tensor

from ..devices.backend import Mark, backend_of
from .checkpoint import copy_to_host


class HostCopies:
    """Copy device tensors through pinned memory, in the order of the device's own work.

    Later changes of a tensor do not change its copy. The host does not wait for the device until
    someone reads the copies.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        self._arrive: list[tuple[torch.device, Mark]] = []

    def take(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the host; its values are valid after ``wait``."""
        if backend_of(tensor.device).is_host:
            return copy_to_host(tensor)
        source = tensor.detach().contiguous()
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        copy.copy_(source, non_blocking=True)
        self._devices.add(tensor.device)
        return copy

    def close(self) -> None:
        """Mark the end of the copies. Call it in the thread that called ``take``."""
        self._arrive = [(device, backend_of(device).mark(device)) for device in self._devices]

    def wait(self) -> None:
        """Wait until all copies have arrived; any thread may call it."""
        for device, mark in self._arrive:
            backend_of(device).wait_for(mark)

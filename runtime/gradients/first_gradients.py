"""Write the first gradients of a step over what their views held.

A step's first gradient of a parameter is a tensor that autograd made. It is written into the
parameter's view of a flat buffer, which becomes the parameter's ``grad``; later passes add to it.
So a buffer need not be cleared and read first. On a host a gradient is written when it comes, while
it is in the caches. On an accelerator gradients are held back and written together, by one kernel.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...devices.backend import backend_of


class FirstGradients:
    """Writes first gradients into their views, at once or together.

    Args:
        none_is_zero: Whether a gradient that a hook of the script has used up (``grad`` is None)
            counts as zeros; otherwise the parameter counts as one without a gradient.
        host_adds_zero: Whether a gradient that is written at once has 0 added, so that -0 becomes
            +0, as by adding to a cleared buffer. It costs no more than a copy.
        device_adds_zero: The same for gradients that are written together; a kernel more.
        most_held_bytes: Gradients of so many bytes are written without waiting for more; by
            default it depends on the device kind.
    """

    def __init__(
        self,
        *,
        none_is_zero: bool = False,
        host_adds_zero: bool = False,
        device_adds_zero: bool = False,
        most_held_bytes: int | None = None,
    ) -> None:
        self._none_is_zero, self._most_held_bytes = none_is_zero, most_held_bytes
        self._host_adds_zero, self._device_adds_zero = host_adds_zero, device_adds_zero
        self._held: list[tuple[Tensor, Tensor]] = []  # parameter, view
        self._num_held_bytes = 0

    def begin(self) -> None:
        """Start a step: what an earlier one has left is forgotten."""
        self._held.clear()
        self._num_held_bytes = 0

    def take(self, parameter: Tensor, view: Tensor, at_once: bool) -> bool:
        """Put a parameter's first gradient into its view, at once or soon.

        Returns:
            Whether it has a gradient, or counts as having one.
        """
        # It runs between kernels, where Python's code is not in the caches, so it is kept short.
        gradient = parameter.grad
        if gradient is None:
            if self._none_is_zero:
                view.zero_()
            return self._none_is_zero
        if gradient.layout != torch.strided:
            parameter.grad = view.zero_().add_(gradient)
        elif not at_once:
            self._held.append((parameter, view))
            self._num_held_bytes += view.nbytes
            if self._num_held_bytes >= (
                self._most_held_bytes or backend_of(view.device).bucket_bytes
            ):
                self.write()
        elif self._host_adds_zero:
            parameter.grad = torch.add(gradient, 0.0, out=view)
        else:
            parameter.grad = view.copy_(gradient)
        return True

    def take_all(self, pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        """Put the first gradients of parameters into their views, on a device by one kernel.

        Args:
            pairs: Each parameter, and its view.
        """
        for parameter, view in pairs:
            gradient = parameter.grad
            if gradient is None or gradient.is_cpu or gradient.layout != torch.strided:
                self.take(parameter, view, True)
            else:
                self._held.append((parameter, view))
        self.write()

    def write(self) -> None:
        """Write the gradients that were held back."""
        if not self._held:
            return
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for parameter, view in self._held:
            gradient = parameter.grad
            if gradient is not None:
                found.append((parameter, view, gradient))
            elif self._none_is_zero:
                found.append((parameter, view, torch.zeros_like(view)))
        if found:
            views = [view for _, view, _ in found]
            with torch.no_grad():
                torch._foreach_copy_(views, [gradient for _, _, gradient in found])
                if self._device_adds_zero:
                    torch._foreach_add_(views, 0.0)
            for parameter, view, _ in found:
                parameter.grad = view
        self.begin()

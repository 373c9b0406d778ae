"""The end of a step for a worker that missed it: the state of one who has it.

Nobody completes a step before everybody has given its part, but a death can leave some without
the others' parts while those ahead have updated their parameters already. Those behind then take
the parameters from one ahead, who gives them in its next operation, where its gradients are gone.
So the rest of this step runs on gradients of zero, and what it leaves is replaced: parameters as
soon as the optimizer has stepped, all the rest at the next operation, which is the one that the
state comes from.
"""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..job import Job

State = dict[str, Any]


class Behind:
    """What this worker takes over from another, and when."""

    def __init__(self, job: "Job") -> None:
        self._job = job
        self._found: State | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def give(self, buffers: dict[str, Any]) -> State:
        """This worker's state between two operations, as a checkpoint has it, and gradients.

        Args:
            buffers: All virtual nodes' buffers.
        """
        job, saver = self._job, self._job._checkpoints
        assert saver is not None
        header, state = saver.describe(buffers)
        gradients = {
            name: parameter.grad
            for name, parameter in job._parameters.items()
            if parameter.grad is not None
        }
        return {"header": header, "state": state, "gradients": gradients}

    def take(self, found: State) -> None:
        """Go through the rest of a step without its gradients."""
        job, self._found = self._job, found
        for parameter in job._parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in job._optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def settle(self) -> None:
        """The next operation begins: from here on this worker is where the other one was."""
        if self._found is None:
            return
        self._unhook()
        found, self._found, job = self._found, None, self._job
        assert job._checkpoints is not None
        job._checkpoints.adopt(found["state"])
        for name, parameter in job._parameters.items():
            gradient = found["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What the script does with the parameters from here on, it does with the right ones.

        Of several optimizers each one's are replaced when it has stepped.
        """
        assert self._found is not None
        job = self._job
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if len(job._optimizers) == 1:
            self._unhook()
            held = {id(parameter) for parameter in job._parameters.values()}
        with torch.no_grad():
            for name, parameter in job._parameters.items():
                if id(parameter) in held:
                    parameter.copy_(self._found["state"]["parameters"][name])

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

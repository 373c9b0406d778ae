"""Let a lagging worker catch up: it copies the state of a worker that finished the step.

No worker can finish step k before all have contributed to its all-reduce. If a worker dies during
the all-reduce, some survivors may have received the result and stepped the optimizer (the leading
workers), while others have not (the lagging workers). A lagging worker copies the state of a
leading one, which sends it in its next operation. By then the gradients of step k are gone. So the
lagging worker runs the rest of its script's step on zero gradients, and then overwrites the result:
the parameters after the optimizer has stepped, everything else at the next operation.
"""

from pathlib import Path
from typing import Any

import torch

from ..progress import Progress
from ..session import Session
from ..split_engine import WholeState

State = dict[str, Any]
THE_RUNNING_JOB = Path("the running job")  # shown in messages in place of a checkpoint's path


class Behind:
    """The state that a lagging worker copies from a leading one, and when it takes effect.

    Args:
        session: The state that the parts of the job share.
        whole: Captures and restores the state of the job.
        progress: The registered objects, and the script's position.
    """

    def __init__(self, session: Session, whole: WholeState, progress: Progress) -> None:
        self._session, self._whole, self._progress = session, whole, progress
        self._found: State | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def give(self, buffers: dict[str, Any]) -> State:
        """This worker's state between two operations: a checkpoint's state, and the gradients.

        Args:
            buffers: All virtual nodes' buffers.
        """
        state = self._whole.with_buffers(buffers, self._progress.registered)
        gradients = {
            name: parameter.grad
            for name, parameter in self._session.parameters.items()
            if parameter.grad is not None
        }
        return {"header": self._progress.header(), "state": state, "gradients": gradients}

    def take(self, found: State) -> None:
        """Let the script run the rest of a step without the step's gradients."""
        self._found = found
        for parameter in self._session.parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in self._session.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def settle(self) -> None:
        """At the start of the next operation, load the rest of the leading worker's state."""
        if self._found is None:
            return
        self._unhook()
        found, self._found = self._found, None
        self._whole.restore_trained(THE_RUNNING_JOB, found["state"])
        self._progress.load_registered(found["state"]["registered"])
        for name, parameter in self._session.parameters.items():
            gradient = found["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Overwrite the parameters, so that the rest of the script's step sees the right ones.

        With several optimizers, each one's parameters are overwritten after it has stepped.
        """
        assert self._found is not None
        session = self._session
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if len(session.optimizers) == 1:
            self._unhook()
            held = {id(parameter) for parameter in session.parameters.values()}
        with torch.no_grad():
            for name, parameter in session.parameters.items():
                if id(parameter) in held:
                    parameter.copy_(self._found["state"]["parameters"][name])

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

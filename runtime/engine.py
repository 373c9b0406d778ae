"""The interfaces of an engine, which runs the steps of a job, and of a runner of its operations.

Each kind of plan has its own engine.

An engine is built from a session. It holds only what belongs to the steps: passes or stages, the
reduction of gradients, the buffers of virtual nodes. It knows nothing of epochs, checkpoints on
disk, or workers that join and leave.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .agreement.agreement import Agreement, SharedTensors
from .buffers import VirtualNodeBuffers
from .checkpoints.parts import Wanted
from .data import Batch
from .promise.promise import Promise

LossFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ``job.backward``.

    Attributes:
        function: The script's function, which gives the loss of a pass.
        batch: The global batch, as this worker sees it.
        scaler: The script's GradScaler, if it has one.
        agreement: Checks that the workers still agree; it observes the passes.
        has_aux: Whether the function returns (loss, other values).
        over_batch: Makes the loss of all samples' outputs, if the function gives outputs.
        waiting: A context in which this worker waits for the others.
        promise: Tests the function where only the engine can: on a pipeline's last stage.
        round: How many steps over the same batch came before it.
        has_run: Whether the script's own loop has run the passes.
        rest: [virtual nodes with samples] the other values, once the step is over.
    """

    function: LossFunction
    batch: Batch
    scaler: "torch.amp.GradScaler | None"
    agreement: Agreement
    has_aux: bool = False
    over_batch: LossFunction | None = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    promise: Promise | None = None
    round: int = 0
    has_run: bool = False
    rest: list[Any] = field(default_factory=list)


class StateParts(Protocol):
    """How a worker captures, writes and restores its part of the state of a job."""

    @property
    def is_in_parts(self) -> bool:
        """Whether every worker writes its own part; else the first worker writes everything."""

    def describe(self) -> dict[str, Any]:
        """What must be equal where training resumes, and whose part of the state this is."""

    def capture(
        self, registered: Sequence[Any], share: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Any] | None:
        """The state that this worker writes; None where another worker writes it.

        Call it on every worker.

        Args:
            registered: The objects that the script registered.
            share: Runs a function that needs all workers.
        """

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """Restore a state of ``capture``, except for the objects that the script registered.

        Raises:
            TargetError: The state does not fit the model or its optimizers.
        """

    @property
    def wanted(self) -> Wanted | None:
        """The share of a checkpoint in parts that this worker needs; None for all of it."""


class StepEngine(Protocol):
    """Runs one global batch after another on this worker."""

    @property
    def buffers(self) -> VirtualNodeBuffers:
        """The virtual nodes' buffers."""

    @property
    def state(self) -> StateParts:
        """How this worker captures, writes and restores the state of the job."""

    @property
    def flushes(self) -> bool:
        """Whether all updates of a step have been made before the next step begins."""

    @property
    def keeps_groups(self) -> bool:
        """Whether the optimizer's parameter groups must stay as they are."""

    def run(self, step: Step) -> Tensor:
        """Put a global batch's mean gradient into ``param.grad``; return its mean loss."""

    @property
    def settings_differ(self) -> bool:
        """Whether the last step's sums, if the host has them, show unlike optimizer settings."""

    @property
    def all_stop(self) -> bool:
        """Whether a worker wanted to stop when the last step ended. Waits for the device."""

    def shared(self) -> list[SharedTensors]:
        """The tensors that must be equal on several workers."""

    def begin_epoch(self, epoch: int, num_batches: int, last_batch_samples: int) -> None:
        """Prepare for an epoch of ``num_batches >= 1`` global batches."""

    def drain(self) -> None:
        """Finish all microbatches in flight between two steps. Call it on all workers."""

    @property
    def is_drained(self) -> bool:
        """Whether nothing is in flight, so each parameter has only its newest value."""

    def digest(self) -> str:
        """The digest of all trained tensors, with merged buffers. Call it on all workers."""

    def gather(self) -> None:
        """Bring the whole model's parameters to every worker, on one device or on the host.

        Call it on all workers.
        """

    def whole_model(self) -> AbstractContextManager[None]:
        """A context in which the model, after ``gather``, can be called as without hetflow."""

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which the model can be called where its parts are, in evaluation mode.

        Enter it on all workers.
        """

    @property
    def runs_whole(self) -> bool:
        """Whether each worker runs passes of the whole model."""

    def check_predicts(self) -> bool:
        """Refuse ``job.predict`` where no worker can run a whole pass.

        Returns:
            Whether workers call the model together, each in ``evaluating`` and equally often.

        Raises:
            TargetError: The plan is a pipeline.
        """

    def close(self) -> None:
        """End the engine: no step follows, and the model belongs to the script alone again."""


# The interface of a runner, which runs the operations of all workers.
#
# An operation is something that all workers do at the same time and in the same order: take a step,
# draw an order, merge buffers. ``Alone`` (job.py) only calls them; where workers may join and
# leave, ``Member`` (elastic/member.py) runs them.

Answer = TypeVar("Answer")


class Runner(Protocol):
    """Runs operations of all workers, and does what is due between two steps."""

    @property
    def changes(self) -> bool:
        """Whether workers may join and leave."""

    @property
    def is_behind(self) -> bool:
        """Whether this worker's script lags: it has not reached the other workers' position."""

    def join(self) -> None:
        """Get the others' state, if this worker started later. Call it before state is needed."""

    def run(self, function: Callable[[], Answer]) -> Answer:
        """Run a function that needs all workers; if one is lost, the survivors run it again."""

    def meet(self, function: Callable[[], Answer]) -> Answer:
        """Like ``run``, for a function that may contain no collective: a barrier is added."""

    def step(self, step: Step) -> Tensor:
        """Run a step and return its global batch's mean loss: [] float64."""

    def waiting(self) -> "AbstractContextManager[None]":
        """A context in which this worker waits for the others."""

    def runs_passes(self, *, resizes: bool) -> None:
        """Note that the script's own loop runs passes, so that a step cannot be repeated.

        Args:
            resizes: Whether workers may still join and leave between steps.
        """

    def boundary(self) -> None:
        """Do what is due between two steps, once the first one's checkpoint is taken."""

    def order_of(
        self, call: int, loader: "DataLoader[Any]", draw: Callable[[], list[int]]
    ) -> Sequence[int]:
        """The order of an epoch's samples, even if others began it before this worker joined."""

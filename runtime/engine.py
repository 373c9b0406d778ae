"""What runs the steps of a job: a protocol, so that a kind of plan brings an engine of its own.

An engine is made of a session and holds what belongs to the steps alone: passes or stages, the
gradients' reduction, the buffers of virtual nodes. It knows nothing of epochs, checkpoints on disk
or workers that come and go.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .agreement.agreement import Agreement, SharedTensors
from .buffers import VirtualNodeBuffers
from .checkpoint import Checkpoint
from .data import Batch

LossFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One call of ``job.backward``.

    Attributes:
        function: The script's, which gives the loss of a pass.
        batch: The global batch, as this worker sees it.
        scaler: The script's GradScaler, if it has one.
        agreement: Looks into the passes.
        settings_number: What this worker's optimizers add to the sums of the step.
    """

    function: LossFunction
    batch: Batch
    scaler: "torch.amp.GradScaler | None"
    agreement: Agreement
    settings_number: int


class StateParts(Protocol):
    """What a worker keeps of the state of a job, and how it takes it back."""

    @property
    def is_in_parts(self) -> bool:
        """Whether every worker writes a part of its own; else the first writes all of it."""

    def describe(self) -> dict[str, Any]:
        """What must be the same where a run goes on, and whose part of the state this is."""

    def capture(
        self, registered: Sequence[Any], share: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Any] | None:
        """What this worker writes; called on every worker. None where it is another's to write.

        Args:
            registered: What the script registered.
            share: Runs what needs all workers.
        """

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """Take back what ``capture`` gave, but for what the script registered.

        Args:
            path: Where it is from, for messages.
            state: The state.
        """

    def reader(self) -> Callable[[Path], Checkpoint]:
        """Reads one checkpoint, or the part of it that this worker needs."""

    def write(
        self,
        folder: Path,
        header: dict[str, Any],
        encoded: Any,
        tensors: list[Tensor],
        broken: set[Path],
    ) -> None:
        """Write what ``capture`` gave to the disk; arguments as for ``checkpoint.write``."""


class StepEngine(Protocol):
    """Runs one global batch after another on this worker."""

    @property
    def buffers(self) -> VirtualNodeBuffers:
        """The virtual nodes' buffers."""

    @property
    def state(self) -> StateParts:
        """What this worker keeps of the state of the job."""

    @property
    def flushes(self) -> bool:
        """Whether all workers have made the same updates between two steps."""

    @property
    def keeps_groups(self) -> bool:
        """Whether the optimizer's groups must stay as they are."""

    def run(self, step: Step) -> Tensor:
        """Leave the mean gradient of a global batch in ``param.grad``; return the mean loss."""

    @property
    def settings_sums(self) -> Sequence[Any] | Tensor:
        """Of the last step: how many workers, the sum of ``settings_number``, and of squares."""

    @property
    def all_stop(self) -> bool:
        """Whether some worker wanted to stop when the last step ended; waits for the device."""

    def shared(self) -> list[SharedTensors]:
        """What several workers must hold alike."""

    def begin_epoch(self, epoch: int, num_batches: int, last_batch_samples: int) -> None:
        """The script is about to read an epoch of at least one batch."""

    def drain(self) -> None:
        """Finish what is in flight between two steps. Call it on all workers."""

    @property
    def is_drained(self) -> bool:
        """Whether nothing is in flight: each parameter has its newest value only."""

    def digest(self) -> str:
        """The digest of all that is trained, after buffers are merged. Call it on all workers."""

    def gather(self) -> None:
        """Bring the parameters of the whole model to every worker, on one device or the host.

        Call it on all.
        """

    def whole_model(self) -> AbstractContextManager[None]:
        """Inside, after ``gather``, the model can be called as without hetflow."""

    def check_predicts(self) -> None:
        """Refuse ``job.predict`` where passes are not whole on one worker."""

    def close(self) -> None:
        """No further step; the model is the script's again."""

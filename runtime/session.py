"""The state that all parts of one worker's job share, built completely before any of the parts.

A session knows none of the parts that use it. So each part refers to the session, and no part has
to refer to another one just to read a counter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .agreement.agreement import CompareSchedule
from .group import Place
from .measurements import StepClock
from .setup import named_parameters, state_dict_names
from .sharding.precision import AS_IS, Precision
from .virtual_nodes import batch_sizes_of, holders_of, pass_holder_of


class Position(NamedTuple):
    """How far a script is.

    Attributes:
        call: Number of the call of ``job.batches`` whose epoch it is in, or is about to begin.
        step: The step whose batch it got.
        steps_before: Global steps before that one.
    """

    call: int = 0
    step: int = 0
    steps_before: int = 0


class Session:
    """One worker of a job: the model, this worker among the others, and the progress.

    The engine places the model on the device; see ``runtime/start.py``.

    Attributes:
        place: This worker among the others; it changes where workers join and leave.
        position: How far the script is.
        parameters: Every parameter to synchronise, by name.
        state_dict_names: As ``setup.state_dict_names`` gives them of the whole model.
        device: Where the passes run.
        clock: Marks the parts of each step.
        holder: Stretches the passes of an emulated device; None on a real one.
        batch_sizes: [virtual nodes of the job] samples of each; empty under plain python.
        num_steps: Global steps so far.
        num_calls: Calls of ``job.batches`` so far.
        next_epoch: The number of the epoch that the next call gives.
        last_loss: The last step's mean loss, [] float64; None before the first step.
        wants_stop: Whether this worker was asked to save and leave.
        is_finished: Whether the job has ended on this worker.
        has_evaluated: Whether the script has evaluated the model by the job.
        blocks: Names of the modules that are units of shared states; empty for repeated layers.
        precision: The types of shared states.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        place: Place,
        *,
        seed: int,
        watch: CompareSchedule,
        blocks: Sequence[str] = (),
        precision: Precision = AS_IS,
    ) -> None:
        self.model, self.optimizers, self.seed = model, tuple(optimizers), seed
        self.device = place.device
        self.parameters = named_parameters(model, self.optimizers)
        self.state_dict_names = state_dict_names(model)
        self.clock, self.holder = StepClock(place.device), pass_holder_of(place)
        self.batch_sizes = batch_sizes_of(place)
        self.watch = watch
        self.num_steps, self.num_calls, self.next_epoch = 0, 0, 0
        self.last_loss: Tensor | None = None
        self.wants_stop, self.is_finished, self.has_evaluated = False, False, False
        self.place = place
        self.position = Position()
        self.blocks, self.precision = tuple(blocks), precision

    @property
    def rank(self) -> int:
        """Rank of this worker, 0 to the number of workers - 1."""
        return self.place.rank

    @property
    def is_main(self) -> bool:
        """Whether this worker prints, logs and saves."""
        return self.place.rank == 0

    @property
    def local_nodes(self) -> list[int]:
        """The indices of this worker's virtual nodes."""
        slot = self.place.slot
        return [node.index for node in slot.virtual_nodes] if slot else [0]

    @property
    def holders(self) -> list[int]:
        """[virtual nodes] the rank that holds each."""
        return holders_of(self.place)

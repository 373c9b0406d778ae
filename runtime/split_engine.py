"""The engine of a split plan: a worker runs its virtual nodes one after another.

Each pass runs the whole model. Gradients add up in one buffer, which is reduced over the workers
during the last backward pass (VirtualFlow 3.2).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..devices.backend import backend_of
from ..devices.collectives import is_on_devices
from ..devices.emulated import base_type
from . import checkpoint, parts
from .agreement.agreement import SharedTensors
from .buffers import VirtualNodeBuffers
from .checkpoint import Checkpoint
from .data import Pass
from .determinism import refusal_of
from .digest import digest_of
from .engine import Step
from .gradients.reducer import GradientReducer
from .group import Place
from .manifest import shapes_of
from .optimizers import state_of
from .places import invariant_of
from .restoring import load_optimizers, load_parameters
from .session import Session
from .setup import final_tensors
from .streams import seed_streams
from .totals import StepTotals, Sums, packed_sums


class SplitEngine:
    """Runs steps under a split plan; see ``StepEngine``.

    Args:
        session: The state that the parts of the job share.
        overlap: Whether the last backward pass of a step overlaps with the reduction.

    Attributes:
        reducer: This worker's part in the sums of gradients.
        totals: The sums of a step.
    """

    flushes, keeps_groups, is_drained = True, False, True

    def __init__(self, session: Session, *, overlap: bool) -> None:
        self._session, self._overlap = session, overlap
        self._holder = session.holder
        self.buffers = VirtualNodeBuffers(
            session.model, session.local_nodes, session.batch_sizes or (1,)
        )
        self.reducer = _reducer_of(session, has_buffers=bool(self.buffers.slots))
        self.totals = StepTotals(self.reducer, session.place, len(session.batch_sizes) or 1)
        self.state = WholeState(session, self.buffers, self.totals)

    # A step

    def run(self, step: Step) -> Tensor:
        """Run this worker's virtual nodes; make gradients the mean over all workers' samples."""
        self.run_passes(step)
        return self.close_sums(self.exchange())

    def run_passes(self, step: Step) -> None:
        """Run this worker's virtual nodes; after ``undo`` it can be called again for the step."""
        session, batch = self._session, step.batch
        session.clock.begin_step(is_full=batch.is_full)
        self.buffers.begin_step()
        if self._holder:
            self._holder.begin_step()
        self.reducer.begin(self._write_sums, num_passes=len(batch.passes))
        step.agreement.begin_passes()
        self.totals.settings_number = step.settings_number
        self.totals.wants_stop = self._session.wants_stop
        self.totals.begin(batch.num_samples)
        try:
            for number, (item, inputs) in enumerate(batch.inputs(), start=1):
                self._run_pass(step, item, inputs, last=number == len(batch.passes))
        except RuntimeError as error:
            refusal = refusal_of(error, session.place.start.determinism)
            if refusal is None:
                raise
            raise refusal from error
        self.reducer.launch_rest()
        session.clock.computed()

    def _write_sums(self, sums: Tensor) -> None:
        self.totals.wants_stop = self._session.wants_stop
        self.totals.write(sums)

    def exchange(self, start: Callable[[Tensor], Callable[[], Tensor]] | None = None) -> Sums:
        """Wait for the gradients, and sum the step's totals; see ``StepTotals.exchange``."""
        self.totals.wants_stop = self._session.wants_stop
        return self.totals.exchange(start)

    def close_sums(self, sums: Sums) -> Tensor:
        """Make the gradients the mean by the sums over all workers; return the mean loss."""
        return self.totals.close(sums)

    def undo(self) -> None:
        """Reset the gradients to their values before ``run_passes``."""
        self.reducer.undo()

    def _run_pass(self, step: Step, item: Pass, inputs: Any, *, last: bool) -> None:
        session, function = self._session, step.function
        began = session.clock.begin_pass()
        with self._holder.hold(item.num_samples) if self._holder else nullcontext():
            self.buffers.load(item.virtual_node)
            self.reducer.enter(item.virtual_node)
            seed_streams(session.seed, "pass", session.num_steps, item.virtual_node)
            answer = function(*inputs) if isinstance(inputs, tuple | list) else function(inputs)
            step.agreement.look_at(answer, item.num_samples)
            share = self.totals.add(answer, item.num_samples, item.virtual_node)
            if last and self._overlap:
                self.reducer.arm(defer_last=self._holder is not None)
            if share is not None:
                self._go_back(*share, step.scaler)
            self.buffers.save(item.virtual_node)
            self.reducer.leave()
        session.clock.end_pass(began, num_samples=item.num_samples, is_full=item.is_full)

    def _go_back(self, loss: Tensor, share: float, scaler: "torch.amp.GradScaler | None") -> None:
        gradient = self.totals.gradient(loss, share) if scaler is None else None
        if gradient is not None:
            loss.backward(gradient)  # type: ignore[no-untyped-call]
            return
        scaled = loss if share == 1 else loss * share
        (scaler.scale(scaled) if scaler is not None else scaled).backward()  # type: ignore[no-untyped-call]

    @property
    def settings_sums(self) -> Sequence[Any] | Tensor:
        """See ``StepEngine``."""
        return self.totals.settings_sums

    @property
    def all_stop(self) -> bool:
        """See ``StepEngine``."""
        return self.totals.all_stop

    # Other workers

    def take(self, place: Place) -> None:
        """Reduce with other workers from now on, in another place; ``move`` may follow."""
        self.reducer.close()
        self._session.take(place)
        self.reducer = _reducer_of(self._session, has_buffers=bool(self.buffers.slots))
        self.totals.move(self.reducer, place)

    def shared(self) -> list[SharedTensors]:
        """Parameters, and buffers as the script last wrote them: equal on all workers."""
        held: dict[str, Tensor] = dict(self._session.parameters)
        # Buffers that are not persistent are caches, which may depend on a worker's own inputs.
        held |= {slot.name: slot.base for slot in self.buffers.slots if slot.is_persistent}
        return [SharedTensors(None, held)]

    # Every worker has the whole model, and every update is made when a step is over.

    def begin_epoch(self, epoch: int, num_batches: int, last_batch_samples: int) -> None:
        """Do nothing: passes need not know the epoch's length."""

    def drain(self) -> None:
        """Do nothing: no microbatch is in flight between steps."""

    def digest(self) -> str:
        """See ``StepEngine``."""
        return digest_of(final_tensors(self._session.model, self._session.parameters))

    def gather(self) -> None:
        """Do nothing: every worker has the whole model."""

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """Do nothing: every worker has the whole model."""
        yield

    def evaluating(self) -> AbstractContextManager[None]:
        """Do nothing: every worker has the whole model."""
        return nullcontext()

    def check_predicts(self) -> None:
        """Accept ``job.predict``: each worker runs whole passes."""

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self.reducer.close()


def _reducer_of(session: Session, *, has_buffers: bool) -> GradientReducer:
    place = session.place
    return GradientReducer(
        session.parameters,
        distributed=place.distributed,
        invariant=invariant_of(place),
        is_first=place.rank == 0,
        keeps_carried=place.control is not None and place.control.changes,
        num_sums=_num_sums(session, has_buffers=has_buffers),
    )


def _num_sums(session: Session, *, has_buffers: bool) -> int:
    """How many numbers the step's sums are, if they travel with gradients, else 0."""
    place = session.place
    on_host = backend_of(place.device).is_host
    if not place.distributed or _sums_are_apart(place, on_host=on_host, has_buffers=has_buffers):
        return 0
    num_nodes, num_parameters = len(session.batch_sizes) or 1, len(session.parameters)
    return packed_sums(num_nodes, num_parameters, on_host=on_host).length


def _sums_are_apart(place: Place, *, on_host: bool, has_buffers: bool) -> bool:
    """Whether sums travel alone, or with mirrored buffers, which others may continue from."""
    if is_on_devices():
        return place.control is not None and place.control.survives_on_devices
    return has_buffers or not on_host or not _are_alike(place)


def _are_alike(place: Place) -> bool:
    """Whether all workers' devices are of one type: else some may be hosts, and others not."""
    config = place.start.config
    return config is None or len({base_type(w.device_type, config) for w in config.workers}) == 1


class WholeState:
    """The state of a job whose workers all hold the whole state; the first worker writes it.

    Args:
        session: The state that the parts of the job share.
        buffers: The virtual nodes' buffers.
        totals: The sums of a step.
    """

    is_in_parts = False

    def __init__(self, session: Session, buffers: VirtualNodeBuffers, totals: StepTotals) -> None:
        self._session, self._buffers, self._totals = session, buffers, totals

    def describe(self) -> dict[str, Any]:
        """See ``StateParts``."""
        return {
            "virtual_nodes": list(self._session.batch_sizes),
            "seed": self._session.seed,
            "parameters": shapes_of(self._session.parameters),
        }

    def capture(
        self, registered: Sequence[Any], share: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Any] | None:
        """See ``StateParts``."""
        session = self._session
        buffers = share(lambda: self._buffers.capture(session.holders, session.place.distributed))
        return self.with_buffers(buffers, registered) if session.is_main else None

    def with_buffers(self, buffers: dict[str, Any], registered: Sequence[Any]) -> dict[str, Any]:
        """The whole state; ``buffers`` are all virtual nodes' buffers from their ``capture``."""
        return {
            "parameters": dict(self._session.parameters),
            "optimizer": state_of(self._session.optimizers),
            "buffers": buffers,
            "registered": [thing.state_dict() for thing in registered],
            "last_weight": self._totals.last_weight,
        }

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """See ``StateParts``."""
        self.restore_trained(path, state)
        self._buffers.restore(state["buffers"])
        self._totals.last_weight = state["last_weight"]

    def restore_trained(self, path: Path, state: dict[str, Any]) -> None:
        """Restore parameters and optimizers only."""
        session = self._session
        load_parameters(session.parameters, state["parameters"])
        loads = [optimizer.load_state_dict for optimizer in session.optimizers]
        load_optimizers(path, session.optimizers, loads, state["optimizer"])

    def reader(self) -> Callable[[Path], Checkpoint]:
        """See ``StateParts``."""
        return parts.reader()

    def write(
        self,
        folder: Path,
        header: dict[str, Any],
        encoded: Any,
        tensors: list[Tensor],
        broken: set[Path],
    ) -> None:
        """See ``StateParts``."""
        checkpoint.write(folder, header, encoded, tensors, broken)

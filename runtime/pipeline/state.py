"""One pipeline worker's own part of the state (thesis 2.4.4).

Each worker writes its part at the same step. None waits for another, because by construction the
position is the same on all. The parts name parameters and not stages, so a plan with another
partition of the same model can resume from them.

A schedule without flushes drains before a checkpoint. Then one version of the weights is live and
no message is outstanding, so the state is as small as with any other schedule. It drains at the
same steps whether or not the run is ever restarted, so a restarted run ends with the same bits.
"""

import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ...schema.launch import PipelineWork
from .. import checkpoint, parts
from ..checkpoint import Checkpoint
from ..restoring import load_optimizers, load_parameters
from ..session import Session
from ..tensor.operators import TensorGroup, parts_of_all
from .optimizer import OwnShare
from .ownership import Ownership
from .stage import StageBuffers
from .synchronise import Synchroniser


class StageState:
    """Captures, writes and restores a pipeline worker's state; see ``StateParts``.

    Args:
        session: The state that the parts of the job share.
        work: The stages.
        buffers: The virtual nodes' buffers.
        ownership: Which parameters belong to this worker.
        share: The worker's share of the optimizer, if there is one.
        synchroniser: Keeps the previous batch's loss, if the schedule does not flush.
        group: The workers that share layers with this one.
    """

    is_in_parts = True

    def __init__(
        self,
        session: Session,
        work: PipelineWork,
        buffers: StageBuffers,
        ownership: Ownership,
        share: OwnShare | None,
        synchroniser: Synchroniser,
        group: TensorGroup,
    ) -> None:
        self._session, self._buffers, self._ownership = session, buffers, ownership
        self._share, self._synchroniser, self._group = share, synchroniser, group
        self._stages = [[list(stage.layers), list(stage.ranks)] for stage in work.stages]
        self._registered_sha256 = ""

    @cached_property
    def _run(self) -> str:
        """An identifier that is equal in all parts of one run. Call it on every worker."""
        store, token = self._session.place.store, secrets.token_hex(8)
        if store is None:
            return token
        if self._session.is_main:
            store.set("checkpoint run", token)
        return store.get("checkpoint run")

    def describe(self) -> dict[str, Any]:
        """See ``StateParts``."""
        session = self._session
        return {
            "virtual_nodes": list(session.batch_sizes),
            "seed": session.seed,
            "parameters": self._ownership.described,
            "part": session.rank,
            "num_parts": session.place.world_size,
            "run": self._run,
            "stages": self._stages,
            "optimizer_order": self._share.order if self._share else [],
            "registered_sha256": self._registered_sha256,
        }

    def capture(
        self, registered: Sequence[Any], share: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Any]:
        """See ``StateParts``; workers wait only for those that they share layers with."""
        tensors: list[Tensor] = []
        states = [thing.state_dict() for thing in registered]
        self._registered_sha256 = parts.digest_of(checkpoint.encode(states, tensors), tensors)
        return {
            "parameters": self._parameters(),
            "optimizer": self._share.state_dict(self._joined) if self._share else None,
            "buffers": self._buffers.capture_own(),
            "registered": states,
            "last_weight": None,
            "late_loss": self._synchroniser.late_loss,
        }

    def _parameters(self) -> dict[str, Tensor]:
        """The parameters that this worker is the first to hold; cut ones are joined."""
        ownership, found = self._ownership, dict[str, Tensor]()
        for name, parameter in self._session.parameters.items():
            if ownership.holders[name][0] in self._group.ranks:
                value = self._joined(name, parameter)
                if name in ownership.first:
                    found[name] = value
        return found

    def _joined(self, name: str, value: Any) -> Any:
        """Join a parameter, or an optimizer's state of it. Call it on all workers of a group.

        Parts are joined on the host, so no device needs memory for the whole tensor.
        """
        ownership = self._ownership
        is_part = isinstance(value, Tensor) and value.shape == ownership.parameters[name].shape
        if name not in ownership.cut or not is_part:
            return value
        lanes, shape = ownership.lanes, ownership.whole_shape(name)
        shapes = [lanes.part_shape(name, shape, rank) for rank in self._group.ranks]
        return lanes.whole(name, parts_of_all(value, self._group, shapes))

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """See ``StateParts``."""
        session, share, ownership = self._session, self._share, self._ownership
        own = {name: session.parameters[name] for name in ownership.own}
        saved = {name: ownership.own_part(name, state["parameters"][name]) for name in own}
        load_parameters(own, saved)
        if share is not None:
            loads = [share.load_state_dict]
            load_optimizers(path, session.optimizers, loads, state["optimizer"])
        self._synchroniser.late_loss = state.get("late_loss")
        self._buffers.restore(state["buffers"])

    def reader(self) -> Callable[[Path], Checkpoint]:
        """See ``StateParts``."""
        own, buffers = self._ownership.own, self._buffers.names
        kept = self._share.kept if self._share else None
        return parts.reader(parts.Wanted(own, buffers, self._stages, self._session.rank, kept))

    def write(
        self,
        folder: Path,
        header: dict[str, Any],
        encoded: Any,
        tensors: list[Tensor],
        broken: set[Path],
    ) -> None:
        """See ``StateParts``."""
        parts.write(folder, header, encoded, tensors, broken)

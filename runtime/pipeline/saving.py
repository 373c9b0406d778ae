"""Checkpoints of a pipeline: each worker writes its own part, at the same step (thesis 2.4.4).

No worker waits for another: the position is the same on all by construction. What a part holds is
named by parameter, not by stage, so another partition of the same model goes on from it.

A schedule without flushes drains before a checkpoint: then one version of the weights is live,
no message is on its way, and the state is as small as that of any other schedule. It drains at the
same steps whether or not the run is ever restarted, so a restarted run ends with the same bits.
"""

import json
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...protocol import handover
from ...schema.errors import FileError, TargetError
from .. import checkpoint, parts
from ..checkpoint import Checkpoint
from ..saving import Checkpoints, say

if TYPE_CHECKING:
    from .job import PipelineJob


class StageCheckpoints(Checkpoints):
    """The checkpoints of one worker of a pipeline; arguments as for ``Checkpoints``.

    Without a folder of the user's, parts go to the launch's own when the plan changes, and only
    then.
    """

    _job: "PipelineJob"

    def __init__(self, job: "PipelineJob", folder: Path | None, every: int) -> None:
        self._run, self._registered_sha256 = self._agree_on_run(job), ""
        self._is_asked_for, self._is_training = folder is not None, False
        super().__init__(job, folder or job._place.start.handover_folder, every)

    @property
    def is_asked_for(self) -> bool:
        """Whether the user gave the folder."""
        return self._is_asked_for

    def _signals(self) -> list[signal.Signals]:
        own = [handover.SIGNAL] if self._job._place.start.handover_folder is not None else []
        return [*(super()._signals() if self._is_asked_for else []), *own]

    def _agree(self) -> Checkpoint | None:
        found = super()._agree()
        if found is None and self._job._place.start.follows:
            raise TargetError(
                f"{self._folder}: there is no complete checkpoint to go on from",
                hint="the warnings above say what is wrong with those that are there",
            )
        return found

    def first_step(self, call: int, num_steps: int, length: int) -> int:
        """Where to start in an epoch; see ``Checkpoints.first_step``."""
        first = super().first_step(call, num_steps, length)
        if not self.is_catching_up:
            self._tell_training()
        return first

    def _tell_training(self) -> None:
        store = self._job._place.store
        if store is not None and not self._is_training:
            self._is_training = True
            handover.tell_training(store)

    def finish(self) -> None:
        """Keep the final state, where the user gave a folder; the first worker sees it whole."""
        self._tell_training()
        if self._is_asked_for:
            super().finish()
            self._gather_unwritten()

    def _gather_unwritten(self) -> None:
        """Tell the first worker, whose words are shown, what the others could not write."""
        job = self._job
        store = job._place.store
        if store is None:
            return
        if not job.is_main:
            told = {"steps": self._unwritten, "failed": self._failed is not None}
            store.set(f"unwritten/{job.rank}", json.dumps(told))
            return
        others = [json.loads(store.get(f"unwritten/{r}")) for r in range(1, job.world_size)]
        self._unwritten = sorted({*self._unwritten, *(s for told in others for s in told["steps"])})
        last = self._folder / checkpoint.name_of(job.num_steps)
        is_known = self._failed is not None or any(told["failed"] for told in others)
        if not is_known and not parts.is_complete(last):
            self._failed = FileError(
                f"{last}: only some of its {job.world_size} parts are there",
                hint="give a --checkpoint folder that every worker sees",
            )

    @staticmethod
    def _agree_on_run(job: "PipelineJob") -> str:
        """By which the parts of one run know each other."""
        store, token = job._place.store, secrets.token_hex(8)
        if store is None:
            return token
        if job.is_main:
            store.set("checkpoint run", token)
        return store.get("checkpoint run")

    def boundary(self, call: int, step: int) -> None:
        """A step is complete. At ``static``, a stop does not drain where no other run would."""
        job = self._job
        if job._totals.all_stop and job.is_main and job._place.store is not None:
            handover.tell_stopped(job._place.store)
        if job._totals.all_stop and job._place.start.determinism != "none" and not job.is_drained:
            self._settle()
            say(job, f"asked to stop; a restart goes on from the newest in {self._folder}")
            self.leave()
        super().boundary(call, step)

    def save(self, *, wait: bool) -> None:
        """Write this worker's part; call it on every worker. See ``Checkpoints.save``."""
        self._job.drain()
        super().save(wait=wait)

    def _describe(self) -> dict[str, Any]:
        job = self._job
        return {
            "virtual_nodes": list(job._batch_sizes),
            "seed": job._seed,
            "parameters": job.shapes,
            "part": job.rank,
            "num_parts": job.world_size,
            "run": self._run,
            "stages": job.layers_and_ranks,
            "optimizer_order": job.share.order if job.share else [],
            "registered_sha256": self._registered_sha256,
        }

    def _reader(self) -> Callable[[Path], Checkpoint]:
        job = self._job
        return parts.reader(parts.Wanted(job._ownership.own, job.layers_and_ranks, job.rank))

    def _state(self) -> dict[str, Any]:
        job, tensors = self._job, list[Tensor]()
        registered = [thing.state_dict() for thing in self._registered]
        self._registered_sha256 = parts.digest_of(checkpoint.encode(registered, tensors), tensors)
        return {
            "parameters": {name: job._parameters[name] for name in job._ownership.first},
            "optimizer": job.share.state_dict() if job.share else None,
            "buffers": job._buffers.capture_own(is_first=job.is_main),
            "registered": registered,
            "last_weight": None,
            "late_loss": job._synchroniser.late_loss,
        }

    def _put(self, header: dict[str, Any], encoded: Any, tensors: list[Tensor]) -> None:
        parts.write(self._folder, header, encoded, tensors, self._broken)

    def _restore(self) -> None:
        assert self._found is not None
        job, state = self._job, self._found.state
        with torch.no_grad():
            for name in job._ownership.own:
                job._parameters[name].copy_(state["parameters"][name])
        if job.share is not None:
            self._load_optimizers([job.share.load_state_dict], state["optimizer"])
        job._synchroniser.late_loss = state.get("late_loss")
        self._restore_rest(state)

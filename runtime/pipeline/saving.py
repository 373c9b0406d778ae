"""Checkpoints of a pipeline: each worker writes its own part, at the same step (thesis 2.4.4).

No worker waits for another: the position is the same on all by construction.

A schedule without flushes drains before a checkpoint: then one version of the weights is live,
no message is on its way, and the state is as small as that of any other schedule. It drains at the
same steps whether or not the run is ever restarted, so a restarted run ends with the same bits.
"""

import json
import signal

from ...protocol import handover
from ...schema.errors import FileError, TargetError
from .. import checkpoint, parts
from ..checkpoint import Checkpoint
from ..saving import Checkpoints
from ..stopping import leave


class StageCheckpoints(Checkpoints):
    """The checkpoints of one worker of a pipeline; arguments as for ``Checkpoints``.

    Without a folder of the user's, parts go to the launch's own when the plan changes, and only
    then.
    """

    _is_training = False

    @property
    def is_asked_for(self) -> bool:
        """Whether the user gave the folder."""
        return self._session.place.start.checkpoint_folder is not None

    def _signals(self) -> list[signal.Signals]:
        is_handed_over = self._session.place.start.handover_folder is not None
        own = [handover.SIGNAL] if is_handed_over else []
        return [*(super()._signals() if self.is_asked_for else []), *own]

    def _agree(self) -> Checkpoint | None:
        found = super()._agree()
        if found is None and self._session.place.start.follows:
            raise TargetError(
                f"{self._folder}: there is no complete checkpoint to go on from",
                hint="the warnings above say what is wrong with those that are there",
            )
        return found

    def first_step(self, call: int, num_steps: int, length: int) -> int:
        """Where to start in an epoch; see ``Progress.first_step``."""
        first = super().first_step(call, num_steps, length)
        if not self._progress.is_catching_up:
            self._tell_training()
        return first

    def _tell_training(self) -> None:
        store = self._session.place.store
        if store is not None and not self._is_training:
            self._is_training = True
            handover.tell_training(store)

    def finish(self) -> None:
        """Keep the final state, where the user gave a folder; the first worker sees it whole."""
        self._tell_training()
        if self.is_asked_for:
            super().finish()
            self._gather_unwritten()

    def _gather_unwritten(self) -> None:
        """Tell the first worker, whose words are shown, what the others could not write."""
        session = self._session
        store, world_size = session.place.store, session.place.world_size
        if store is None:
            return
        if not session.is_main:
            told = {"steps": self._unwritten, "failed": self._failed is not None}
            store.set(f"unwritten/{session.rank}", json.dumps(told))
            return
        others = [json.loads(store.get(f"unwritten/{r}")) for r in range(1, world_size)]
        self._unwritten = sorted({*self._unwritten, *(s for told in others for s in told["steps"])})
        last = self._folder / checkpoint.name_of(session.num_steps)
        is_known = self._failed is not None or any(told["failed"] for told in others)
        if not is_known and not parts.is_complete(last):
            self._failed = FileError(
                f"{last}: only some of its {world_size} parts are there",
                hint="give a --checkpoint folder that every worker sees",
            )

    def boundary(self, call: int, step: int) -> None:
        """A step is complete. At ``static``, a stop does not drain where no other run would."""
        place, engine = self._session.place, self._engine
        if engine.all_stop and place.rank == 0 and place.store is not None:
            handover.tell_stopped(place.store)
        if engine.all_stop and place.start.determinism != "none" and not engine.is_drained:
            self._settle()
            self._say(f"asked to stop; a restart goes on from the newest in {self._folder}")
            leave(self._session)
        super().boundary(call, step)

"""Report to the launch, so that workers of another plan can take over.

Under a pipeline each worker keeps a part of the state, so none can stay while others join. All
workers write their parts and leave; the next workers resume from these (protocol/handover.py).
"""

import signal
from pathlib import Path

from ..protocol import handover
from ..schema.errors import TargetError
from .session import Session


class Handover:
    """One worker's side of a handover; it does nothing where a handover is not possible.

    Args:
        session: The state that the parts of the job share.
        is_possible: Whether every worker keeps a part of the state.

    Attributes:
        folder: The folder for the parts when the plan changes, if the user gave no folder.
    """

    def __init__(self, session: Session, *, is_possible: bool) -> None:
        place = session.place
        self._is_main = session.is_main
        self._follows = is_possible and place.start.follows
        self._store = place.store if is_possible else None
        self.folder: Path | None = place.start.handover_folder if is_possible else None
        self._is_training = False

    @property
    def signals(self) -> list[signal.Signals]:
        """The signals by which the launch asks for a handover."""
        return [handover.SIGNAL] if self.folder is not None else []

    def check(self, folder: Path, *, has_found: bool) -> None:
        """Refuse to start from step 0 in the place of workers that have trained.

        Raises:
            TargetError: Those workers left no state to resume from.
        """
        if self._follows and not has_found:
            raise TargetError(
                f"{folder}: there is no complete checkpoint to go on from",
                hint="the warnings above say what is wrong with those that are there",
            )

    def tell_training(self) -> None:
        """Tell the launch that the script has caught up with its state, or has ended."""
        if self._store is not None and not self._is_training:
            self._is_training = True
            handover.tell_training(self._store)

    def tell_stopped(self) -> None:
        """Tell the launch that all workers have finished their last step."""
        if self._store is not None and self._is_main:
            handover.tell_stopped(self._store)

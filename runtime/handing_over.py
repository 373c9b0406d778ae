"""What workers tell the launch so that those of another plan can take over from them.

Where every worker keeps a part of the state, no worker can stay while others come: all of them
write their parts, leave, and the next ones go on from these (protocol/handover.py).
"""

import signal
from pathlib import Path

from ..protocol import handover
from ..schema.errors import TargetError
from .session import Session


class Handover:
    """One worker's part in it; nothing at all where it is not possible.

    Args:
        session: What the parts of the job share.
        is_possible: Whether every worker keeps a part of the state.

    Attributes:
        folder: Where parts go when the plan changes, if the user gave no folder.
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
        """By which the launch asks for it."""
        return [handover.SIGNAL] if self.folder is not None else []

    def check(self, folder: Path, *, has_found: bool) -> None:
        """Refuse to start anew in the place of workers that have trained.

        Raises:
            TargetError: They have left nothing to go on from.
        """
        if self._follows and not has_found:
            raise TargetError(
                f"{folder}: there is no complete checkpoint to go on from",
                hint="the warnings above say what is wrong with those that are there",
            )

    def tell_training(self) -> None:
        """The script stands where its state is from, or is at its end."""
        if self._store is not None and not self._is_training:
            self._is_training = True
            handover.tell_training(self._store)

    def tell_stopped(self) -> None:
        """The last step of all workers is over."""
        if self._store is not None and self._is_main:
            handover.tell_stopped(self._store)

"""The progress of a job, and how a worker takes over the state of a checkpoint or of a worker.

The position is the number of the call of ``job.batches``, and the steps done in it. A restarted
script runs from its top. Epochs that are done give no batches. The first one that is not done
continues at the position, with the state of that time; changes that the script's own code made on
the way there are overwritten.
"""

from collections.abc import Sequence
from typing import Any

from ...schema.errors import TargetError
from ...schema.options import option
from ..buffers import VirtualNodeBuffers
from ..engine import StateParts
from ..log import log
from ..session import Position, Session
from ..worker import ScriptRun
from .checkpoint import Checkpoint, shape_difference
from .restoring import check_buffers, load_registered, unregistered_copy


class Progress:
    """The position of one worker's script, and its part of the state.

    Attributes:
        found: The state to resume from; None once the script has reached its position.
    """

    def __init__(self, session: Session, parts: StateParts, buffers: VirtualNodeBuffers) -> None:
        self._session, self._parts, self._buffers = session, parts, buffers
        self._registered: list[Any] = []
        self._length = 0  # samples of the epoch's dataset
        self.found: Checkpoint | None = None

    @property
    def registered(self) -> tuple[Any, ...]:
        """The objects that the script registered, in order."""
        return tuple(self._registered)

    @property
    def is_catching_up(self) -> bool:
        """Whether the script has not yet reached the position of its state."""
        return self.found is not None

    def check(self, found: Checkpoint) -> None:
        """Refuse a checkpoint of another model or of other virtual nodes.

        Raises:
            TargetError: Names the first difference, in one line.
        """
        check_fits(found, self._parts.describe())
        buffers = self._buffers
        check_buffers(found.path, found.state["buffers"], buffers.all(), buffers.names)

    def go_on_from(self, found: Checkpoint) -> None:
        """Take a state that fits; the script then runs on to the state's position."""
        self.found = found
        self.restore()

    def restore(self) -> None:
        """Restore the state of ``found``."""
        found, session = self.found, self._session
        assert found is not None
        for optimizer in session.optimizers:
            # Else torch's schedulers warn that no step was taken, because epochs were skipped.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._parts.restore(found.path, found.state)
        session.num_steps = found.header["step"]
        position = found.header["position"]
        session.position = Position(position["call"], position["step"], session.num_steps)
        self._length = position["length"]
        for number in range(len(self._registered)):
            self._load_registered(found, number)

    def register(self, thing: Any) -> None:
        """Save and restore an object with ``state_dict`` and ``load_state_dict``."""
        self._registered.append(thing)
        if self.found is not None:
            self._load_registered(self.found, len(self._registered) - 1)

    def _load_registered(self, found: Checkpoint, number: int) -> None:
        saved = found.state["registered"]
        if number >= len(saved):
            raise TargetError(
                f"the script registers object {number + 1}, {found.path} has {len(saved)}",
                hint="register the same objects in the same order, or start with an empty folder",
            )
        load_registered(found.path, number + 1, self._registered[number], saved[number])

    def load_registered(self, states: Sequence[Any]) -> None:
        """Load the states that another worker's registered objects have."""
        for thing, state in zip(self._registered, states, strict=True):
            thing.load_state_dict(state)

    # The script's position

    def first_step(self, call: int, num_steps: int, length: int) -> int:
        """The step at which to start in the epoch of a call of ``job.batches``.

        Args:
            call: Number of the call.
            num_steps: Steps in the epoch; this is returned where the epoch is to be skipped.
            length: Number of samples in the dataset.

        Raises:
            TargetError: The dataset's length has changed.
        """
        first = 0
        if self.found is not None:
            position = self.found.header["position"]
            if call < position["call"]:
                ScriptRun.skipped_epochs = True
                return num_steps
            if call == position["call"]:
                self._check_position(self.found, length, num_steps)
                self.restore()
                copy = unregistered_copy(self._session.model, self._registered)
                if copy is not None and self._session.is_main:
                    log.warning(
                        f"a copy of the model ({copy}) is not registered: if it follows the "
                        f"training, as an average of the weights does, this restart began it anew; "
                        f"call job.register(copy)"
                    )
                first = position["step"]
                if first == num_steps:
                    self._session.position = Position(call + 1, 0, self._session.num_steps)
            self.found = None
        self._length = length
        return first

    def _check_position(self, found: Checkpoint, length: int, num_steps: int) -> None:
        """Check that the script reached the position of its state in the same way as before."""
        position, name = found.header["position"], found.path.name
        saved = found.state["registered"]
        if position["step"] and position["length"] != length:
            raise TargetError(
                f"the dataset has {length} samples, and had {position['length']} when {name} was "
                f"written in the middle of an epoch",
                hint=f"give the same dataset, or start with an empty {option('checkpoint')} folder",
            )
        if position["step"] > num_steps:
            raise TargetError(
                f"{name} was written after step {position['step']} of an epoch, which has "
                f"{num_steps} here",
                hint=f"give the same loader, or start with an empty {option('checkpoint')} folder",
            )
        if len(saved) > len(self._registered):
            raise TargetError(
                f"the script registers {len(self._registered)} object(s), {found.path} has "
                f"{len(saved)}",
                hint="register the same objects in the same order, or start with an empty folder",
            )

    def header(self) -> dict[str, Any]:
        """The header of the present state: what it belongs to, and its position."""
        num_steps, (call, step, before) = self._session.num_steps, self._session.position
        position = {"call": call, "step": step + int(num_steps > before), "length": self._length}
        return {**self._parts.describe(), "step": num_steps, "position": position}


def check_fits(found: Checkpoint, own: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model or of other virtual nodes.

    Raises:
        TargetError: Names the first difference, in one line.
    """
    theirs = found.header
    differs = None
    if theirs["virtual_nodes"] != own["virtual_nodes"]:
        differs = (
            f"has virtual nodes of {_short(theirs['virtual_nodes'])} samples, this plan has "
            f"{_short(own['virtual_nodes'])}"
        )
    elif theirs["seed"] != own["seed"]:
        differs = f"was made with seed {theirs['seed']}, this run has {own['seed']}"
    elif theirs["parameters"] != own["parameters"]:
        differs = (
            f"is of another model: {shape_difference(theirs['parameters'], own['parameters'])}"
        )
    if differs:
        raise TargetError(
            f"{found.path} {differs}",
            hint="give the checkpoint's own model, plan and seed, or another "
            f"{option('checkpoint')} folder",
        )


def _short(sizes: list[int]) -> str:
    alike = len(set(sizes)) == 1
    return f"{len(sizes)} x {sizes[0]}" if alike else "+".join(str(size) for size in sizes)

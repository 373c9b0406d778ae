"""One worker's part in a job whose workers change: operations, losses, resizes.

All workers do the same operations in the same order: draw an order, take a step, merge buffers.
Every operation contains a collective, which acts as a barrier; so after a failure any two workers
are at most one operation apart. Lagging workers get the operation's result from a leading one (for
a step: ``Behind``). If no worker has completed it, all repeat it under the new mapping.
The buffers of the dead worker's virtual nodes come from the mirror. Only the step in progress is
lost (VirtualFlow 4.1 and 7).
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...devices.backend import backend_of
from ...devices.collectives import is_on_devices
from ...schema.errors import PeerLostError
from .. import wire
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.restoring import Progress, check_fits
from ..data import Batch, is_drawn
from ..engine import Step
from ..epoch import Epochs
from ..finish import leave
from ..group import Place, close_group, enter_generation, enter_handover, num_groups
from ..peers import abort_groups, give_up_when
from ..protocol.ended import forget_frames, is_lost_peer, may_be_echo
from ..protocol.messages import Fragile, Joined, Lost, Paused, Ready, Recover, Resize
from ..session import Session
from ..sharding.saving import SharedState
from ..split_engine import SplitEngine, WholeState
from ..totals import Sums
from ..virtual_nodes import holdings_of
from .control import Control
from .mirror import Mirror

# Let a lagging worker catch up: it copies the state of a worker that finished the step.
#
# No worker can finish step k before all have contributed to its all-reduce. If a worker dies during
# the all-reduce, some survivors may have received the result and stepped the optimizer (the leading
# workers), while others have not (the lagging workers). A lagging worker copies the state of a
# leading one, which sends it in its next operation. By then the gradients of step k are gone. So
# the lagging worker runs the rest of its script's step on zero gradients, and then overwrites the
# result: the parameters after the optimizer has stepped, everything else at the next operation.

State = dict[str, Any]
THE_RUNNING_JOB = Path("the running job")  # shown in messages in place of a checkpoint's path


class Behind:
    """The state that a lagging worker copies from a leading one, and when it takes effect."""

    def __init__(
        self, session: Session, state: WholeState | SharedState, progress: Progress
    ) -> None:
        self._session, self._state, self._progress = session, state, progress
        self._found: State | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def give(self, buffers: dict[str, Any]) -> State:
        """This worker's state between two operations: a checkpoint's state, and the gradients."""
        state = self._state.with_buffers(buffers, self._progress.registered)
        gradients = self._state.gradients()
        return {"header": self._progress.header(), "state": state, "gradients": gradients}

    def take(self, found: State) -> None:
        """Let the script run the rest of a step without the step's gradients."""
        self._found = found
        for parameter in self._session.parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in self._session.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def settle(self) -> None:
        """At the start of the next operation, load the rest of the leading worker's state."""
        if self._found is None:
            return
        self._unhook()
        found, self._found = self._found, None
        self._state.restore_trained(THE_RUNNING_JOB, found["state"])
        self._progress.load_registered(found["state"]["registered"])
        for name, parameter in self._session.parameters.items():
            gradient = found["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Overwrite the parameters, so that the rest of the script's step sees the right ones."""
        assert self._found is not None
        session = self._session
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # All parameters, also what the one optimizer does not hold. With several, each overwrites
        # only its own: the script may read the others' before their step, as a GAN's does.
        if len(session.optimizers) == 1:
            self._unhook()
            held = {id(parameter) for parameter in session.parameters.values()}
        with torch.no_grad():
            for name, parameter in session.parameters.items():
                if id(parameter) in held:
                    parameter.copy_(self._found["state"]["parameters"][name])

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Answer = TypeVar("Answer")
# After the script's own collective failed: how long to wait for the controller to see a death.
CONFIRMATION_SECONDS = 2.0


class Member:
    """The runner of a worker whose controller can change the workers; see ``Runner``.

    Attributes:
        mirror: Every virtual node's buffers, as of the last step that was agreed on.
    """

    changes = True

    def __init__(
        self,
        session: Session,
        engine: SplitEngine,
        epochs: Epochs,
        progress: Progress,
        control: Control,
    ) -> None:
        self._session, self._engine, self._epochs = session, engine, epochs
        self._progress, self._control = progress, control
        self._last: Any = None
        self._last_is_step = False
        self._behind = Behind(session, engine.state, progress)
        self._next: Resize | None = None
        self._arrived: Place | None = None
        self._position: dict[str, int] | None = None
        self._order: list[int] | None = None
        self.mirror = Mirror(engine.buffers, len(session.batch_sizes))
        engine.buffers.follow(self.mirror)
        self._is_outside = session.place.is_outside
        self._has_said_so = self._is_outside
        self._survives = control.survives
        self._waits = False
        self._repeats = engine.shared_states is None or engine.is_kept_twice
        self._unsettled = False  # shares are still with the workers before a loss
        self._check_backend()

    def runs_passes(self, *, resizes: bool) -> None:
        """See ``Runner``."""
        if not resizes:
            self._control.close("the script's loop takes a device's batch in one part")
        if self._repeats:
            self._repeats = False
            self._check_backend()

    def _check_backend(self) -> None:
        """Go on without lost workers over NCCL only where asked to: it takes a wait a step."""
        self._waits = False
        if not self._repeats and self._survives:
            self._survives = False
            self._control.send(Fragile(why="passes of a loop of the script's own run once"))
        on_host = self._survives and not is_on_devices()
        give_up_when((lambda: self._control.is_broken) if on_host else None)
        if not self._survives or on_host:
            return
        needed = backend_of(self._session.device).abortable_with
        is_set = needed is not None and all(os.environ.get(n) == v for n, v in needed.items())
        if self._control.survives_on_devices and is_set:
            # NCCL does not tell the host when a collective is complete, so the host waits for it.
            self._waits = True
            self._control.abort = abort_groups
        else:
            self._survives = False
            self._control.send(Fragile(why="collectives of its devices are not given up"))

    def _complete(self) -> None:
        """Wait until the device has done this operation; PeerLostError if its result is garbage."""
        if not self._waits:
            return
        backend = backend_of(self._session.device)
        with self.waiting():
            backend.wait_for(backend.mark(self._session.device))
        # When another worker is lost, the controller's message aborts the collectives in another
        # thread. The device then goes on, with garbage in place of their results. So the flag is
        # read after the wait: before it, an abort could still come.
        if self._control.is_broken:
            raise PeerLostError("another worker is gone")

    # Operations

    def run(self, function: Callable[[], Answer], batch: Batch | None = None) -> Answer:
        """Run one operation of all workers, and repeat it if a worker is lost.

        Args:
            function: The operation; it may run several times.
            batch: The global batch, if the operation is a step.

        Returns:
            The function's result, or a leading worker's.

        Raises:
            PeerLostError: A worker is lost, and the job cannot continue without it.
        """
        if not self._has_said_so:  # from its first operation on, others can continue without it
            self._has_said_so = True
            self._control.send(Joined(generation=self._control.generation))
        self._behind.settle()
        while True:
            if function == self._switch and self._next is None:
                return None  # type: ignore[return-value]  # given up, and not an operation
            has_begun = False
            try:
                if self._control.is_broken:
                    raise PeerLostError("another worker is gone")
                self._settle_shares()
                # From here on gradients and buffers may be half made: a repetition undoes them.
                has_begun = True
                answer = function()
                self._complete()
                break
            except Exception as error:
                if not self._is_loss(error):
                    raise
                is_behind, found = self._recover(batch, error, has_begun=has_begun)
                if is_behind:
                    return found  # type: ignore[no-any-return]
        self._agree(answer, batch)
        if self._arrived is not None:
            self._move(self._arrived)
            self._session.watch.changed(self._session.num_steps)
            self._arrived = None
        return answer

    def _settle_shares(self) -> None:
        """Share out anew what is left after a loss: all who are left have made the same updates."""
        if not self._unsettled:
            return
        # While shares move, some workers have new ones and some still the old. So another loss ends
        # the job here (``_is_loss``).
        survives, self._survives = self._survives, False
        config = self._session.place.start.config
        assert config is not None
        self._engine.move_shares(self._session.place, config)
        self._engine.take_shares()
        self._survives, self._unsettled = survives, False

    def _agree(self, answer: Any, batch: Batch | None) -> None:
        """Complete the operation: from here on, all workers can be brought to its end."""
        self._control.num_operations += 1
        self._last, self._last_is_step = answer, batch is not None
        if batch is not None:
            batch.is_done = True
            self.mirror.commit()

    def meet(self, function: Callable[[], Answer]) -> Answer:
        """See ``Runner``."""

        def met() -> Answer:
            answer = function()
            self._engine.totals.meet()
            return answer

        return self.run(met)

    def step(self, step: Step) -> Tensor:
        """See ``Runner``."""

        def taken() -> tuple[Sums, list[Any]]:
            self._note_wish_to_move()  # sums that travel with gradients are sent before the end
            self._engine.run_passes(step)
            return self._exchange(), list(step.rest)

        sums, step.rest[:] = self.run(taken, step.batch)
        loss = self._engine.close_sums(sums)
        self.stepped()
        return loss

    def _exchange(self) -> Sums:
        """End a step's passes: exchange gradients, mirrored buffers and sums at the same time."""
        session, engine, totals = self._session, self._engine, self._engine.totals
        if num_groups() > 1:
            self._control.close("the script has process groups of its own")
        self._note_wish_to_move()
        self._control.is_waiting = True  # as ``waiting``, which takes longer
        try:
            if not self._survives:
                return engine.exchange()
            num_wishes = len(engine.wishes)
            # [wishes, then one flag for each buffer that is not mirrored], added over the workers.
            totals.extra = [*engine.wishes, *self.mirror.found]
            sums = engine.exchange(self._start if self.mirror.names else None)
            # Before the sums are read: the host decides by them whether there is a second exchange,
            # and garbage would let workers decide unlike.
            self._complete()
            found = [*map(float, totals.extras_of(sums)[num_wishes:])]
            # Rare: a pass changed a buffer for the first time. All workers see it in the sums, so
            # all exchange once more.
            if found and self.mirror.grow(found):
                self.mirror.launch(holdings_of(session.place), session.rank)
                self.mirror.wait()
            return sums
        finally:
            self._control.is_waiting = False

    def _note_wish_to_move(self) -> None:
        control = self._control
        self._engine.totals.wants_move = control.announced is not None and not control.is_closed

    def _start(self, sums: Tensor) -> Callable[[], Tensor]:
        """Start to exchange the mirrored buffers, with the sums in the same message."""
        place = self._session.place
        self.mirror.launch(holdings_of(place), place.rank, sums)
        return self.mirror.wait

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the controller that this worker waits, so that it can find the worker that hangs."""
        self._control.is_waiting = True
        try:
            yield
        finally:
            self._control.is_waiting = False

    def stepped(self) -> None:
        """After a step is complete on this worker, note what its sums say."""
        announced, world_size = self._control.announced, self._session.place.world_size
        # The controller's message reaches workers in unlike steps. The sums count who had it when
        # the step ended, so all see the same count, and change after the same step.
        if announced is not None and self._engine.totals.num_moving == world_size:
            self._next = announced

    def boundary(self) -> None:
        """Between two steps: change the workers, if all of them have been told to."""
        if self._next is not None:
            self.run(self._switch)

    # Losses

    def _is_loss(self, error: Exception) -> bool:
        if not self._survives:
            return False
        if is_lost_peer(error):
            return True
        # The script's own collectives also fail when a worker dies or connections are closed.
        # That counts as a loss only if the controller knows of one.
        return may_be_echo(error) and self._control.is_broken_within(CONFIRMATION_SECONDS)

    def _recover(
        self, batch: Batch | None, error: Exception, *, has_begun: bool
    ) -> tuple[bool, Any]:
        """Continue with the surviving workers.

        Args:
            batch: The batch of the step that this worker is in; None outside of a step.
            error: The error by which it noticed the loss.
            has_begun: Whether it has changed the gradients in that step.

        Returns:
            Whether this worker lagged; if so, also the result of the operation that it was in.
        """
        # A resize under way is given up, as the controller gives it up: its workers may be gone.
        self._next = None
        shares = self._engine.shared_states is not None
        if batch is not None and has_begun:
            # With shares not yet: a lagging worker still steps its share with these gradients, and
            # whether it lags is known only from the controller's answer.
            if not shares:
                self._engine.reducer.undo()
            self.mirror.undo()
        while True:
            # The error's frames hold the broken group. Its connections are cut before it is closed:
            # a group with open ones would wait for collectives that never end.
            forget_frames(error)
            if self._waits:
                self._control.abort()
            self._control.connections.cut()
            close_group(is_lost=True)
            message = self._await_recovery(error)
            try:
                place = enter_generation(self._session.place, message, self._control)
                found = self._catch_up(message)
                break
            except Exception as again:
                if not self._is_loss(again):
                    raise
                # Another worker died during the recovery: once more, into the next generation.
                error = again
        is_behind = self._control.worker in message.behind
        if is_behind:
            # None where the operation was no step: its answer is then all that is missing.
            if found["state"] is not None:
                self.mirror.names = found["mirrored"]
                self.mirror.reset(found["state"]["state"]["buffers"])
                if not shares:  # else all had their gradients before any had the sums
                    self._behind.take(found["state"])
            self._agree(found["answer"], batch)
        elif batch is not None and has_begun:
            # It was counted when it began, and is about to begin again.
            self._session.clock.undo_step()
            if shares:
                self._engine.reducer.undo()
        self._unsettled = shares
        self._move(place, again=not is_behind)
        # Leading workers have counted the step that lagging workers are about to count.
        counted = self._session.num_steps + int(is_behind and batch is not None)
        self._session.watch.changed(counted)
        self._control.send(Joined(generation=message.generation))
        return is_behind, found["answer"] if is_behind else None

    def _await_recovery(self, error: Exception) -> Recover:
        """Report that this generation is lost, and wait for the controller to name the next."""
        control = self._control
        reported = [-1]

        def tick() -> None:
            self._stop_if_asked()
            # Once for each generation that is lost: while this worker waits, another one may be
            # lost, and then the controller counts anew who has reported.
            lost = max(control.generation, control.broken)
            if lost > reported[0]:
                reported[0] = lost
                operation, why = control.num_operations, str(error)
                control.send(Lost(generation=lost, operation=operation, why=why))

        def is_there() -> bool:
            found = control.recovery
            # An answer to an earlier loss names a worker that has been lost since.
            return found is not None and found.generation > max(control.broken, reported[0])

        with self.waiting():
            tick()
            control.wait(is_there, tick)
        assert control.recovery is not None
        return control.recovery

    def _catch_up(self, message: Recover) -> dict[str, Any]:
        """Send the result of the last operation to the lagging workers."""
        ranks, behind = message.ranks, message.behind
        if self._control.worker in behind:
            try:
                found: dict[str, Any] = wire.receive(ranks[message.donor])
            except Exception as error:
                if self._control.is_broken:  # aborted, so what came is garbage
                    raise PeerLostError("another worker is gone") from error
                raise
            self._complete()
            return found
        # No lagging worker is further back than one operation, so the last result is enough.
        if behind and self._control.worker == message.donor:
            state = self._behind.give(self.mirror.state()) if self._last_is_step else None
            told = {"answer": self._last, "state": state, "mirrored": self.mirror.names}
            wire.send(told, [ranks[worker] for worker in behind])
        return {}

    def _stop_if_asked(self) -> None:
        if self._session.wants_stop:
            leave(self._session)

    # Changes

    def _move(self, place: Place, *, again: bool = False) -> None:
        """Take another place; ``again`` repeats the step after the last one agreed on."""
        before = self._session.local_nodes
        self._engine.take(place)
        # After a loss shares still lie as before; ``_settle_shares`` moves them, with all others.
        if not self._unsettled:
            self._engine.take_shares()
        self._check_backend()
        local = self._session.local_nodes
        # ``again`` loads the buffers even where the nodes are as before: the lost step's passes
        # have changed them.
        if not again and local == before:
            return
        self._engine.buffers.move(local, self.mirror.state())
        self._epochs.move(local)

    def _switch(self) -> None:
        """Change to the next generation, with joining workers and without leaving ones."""
        message = self._next
        if message is None:
            return
        began, session, control = time.perf_counter(), self._session, self._control
        # Who survives no loss keeps no mirror: all exchange buffers while the old group is there.
        if not self._survives:
            state = self._engine.buffers.capture(session.holders, session.place.distributed)
            self.mirror.reset(state)
        taking = [name for name, donor in message.donors.items() if donor == control.worker]
        state = self._state() if taking else {}
        close_group()
        # ``guests`` leave, and yet hold what joining workers need. They meet them once, in a group
        # of their own, before those who stay form the next generation without them.
        if message.guests and control.worker in message.together:
            self._hand_over(enter_handover(session.place, message, control), message, state, taking)
            close_group()
        if control.worker not in message.ranks:
            pause = time.perf_counter() - began
            control.send(Paused(generation=message.generation, pause_seconds=pause))
            self._leave()
        place = enter_generation(session.place, message, control)
        if not message.guests:
            self._hand_over(place, message, state, taking)
        self._next, control.announced, self._arrived = None, None, place
        pause = time.perf_counter() - began
        control.send(Joined(generation=message.generation, pause_seconds=pause))

    def _hand_over(self, place: Place, message: Resize, state: Any, taking: list[str]) -> None:
        """Send the state to joining workers, and move shares, among workers that have met."""
        if taking:
            wire.send(state, [message.ranks[name] for name in taking])
        self._engine.move_shares(place, message.config)

    def _leave(self) -> None:
        """Wait until the others no longer need this worker; then leave the script for good."""
        control = self._control

        def tick() -> None:
            self._stop_if_asked()
            if control.is_broken:
                raise PeerLostError("the resize did not come about")

        control.wait(lambda: control.may_leave or control.is_broken, tick)
        tick()
        # The others go on without this worker: its exit functions must not wait for them.
        self._session.is_finished = True
        sys.exit(0)

    def _state(self) -> dict[str, Any]:
        """All state that a joining worker needs, in a checkpoint's form."""
        drawn = None if self._epochs.open is None else self._epochs.open.drawn
        return {
            **self._behind.give(self.mirror.state()),
            # With the switch itself, which those who stay count when it has succeeded (``_agree``).
            "operations": self._control.num_operations + 1,
            "mirrored": self.mirror.names,
            "watched": self._session.watch.steps,
            "order": None if drawn is None else torch.tensor(drawn),
        }

    # Joining workers

    def join(self) -> None:
        """Wait until the others finish a step, and get their state from one of them.

        Raises:
            TargetError: This worker's script builds another model than the others did.
        """
        if not self._is_outside:
            return
        self._is_outside = False
        session, control = self._session, self._control
        control.send(Ready())
        control.wait(lambda: control.announced is not None, lambda: None)
        message = control.announced
        assert message is not None
        control.announced = None
        if message.guests:
            found = self._take_over(enter_handover(session.place, message, control), message)
            close_group()
        place = enter_generation(session.place, message, control)
        if not message.guests:
            found = self._take_over(place, message)
        self._restore(found, place)
        control.send(Joined(generation=message.generation))

    def _take_over(self, place: Place, message: Resize) -> dict[str, Any]:
        """Receive the state and its share on a joining worker, as ``_hand_over`` sends them."""
        found: dict[str, Any] = wire.receive(message.together[message.donors[self._control.worker]])
        if self._engine.shared_states is not None:
            self._check(found)
            self._engine.state.restore(THE_RUNNING_JOB, found["state"])
        self._engine.move_shares(place, message.config)
        return found

    def _check(self, found: dict[str, Any]) -> Checkpoint:
        start = Checkpoint(THE_RUNNING_JOB, found["header"], found["state"])
        check_fits(start, self._engine.state.describe())
        return start

    def _restore(self, found: dict[str, Any], place: Place) -> None:
        session = self._session
        self.mirror.names = found["mirrored"]
        self.mirror.reset(found["state"]["buffers"])
        self._move(place, again=True)
        self._position = found["header"]["position"]
        self._order = found["order"].tolist() if found["order"] is not None else None
        self._control.num_operations = found["operations"]
        self._progress.go_on_from(self._check(found))
        session.watch.joined(session.num_steps, found["watched"])
        for name, gradient in found["gradients"].items():
            session.parameters[name].grad = gradient.to(session.device)

    @property
    def is_behind(self) -> bool:
        """Whether this joining worker's script has not yet reached the others' position."""
        return self._position is not None and self._progress.is_catching_up

    def order_of(
        self, call: int, loader: "DataLoader[Any]", draw: Callable[[], list[int]]
    ) -> Sequence[int]:
        """The order of an epoch that the others began before this worker joined."""
        assert self._position is not None
        if call < self._position["call"]:
            return range(len(loader.sampler))  # type: ignore[arg-type]
        return self._order if is_drawn(loader) and self._order is not None else draw()

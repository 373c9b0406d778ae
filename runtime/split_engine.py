"""The engine of a split plan: a worker runs its virtual nodes one after another.

Each pass runs the whole model. Gradients add up in one buffer, which is reduced over the workers
during the last backward pass (VirtualFlow 3.2).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.backend import backend_of
from ..devices.collectives import is_on_devices
from ..devices.cpu import base_type
from ..schema.errors import TargetError
from ..schema.launch import LaunchConfig
from .agreement.agreement import SharedTensors
from .buffers import VirtualNodeBuffers, buffers_apart, joined, over_workers, warn_of_saving
from .checkpoints.checkpoint import shapes_of
from .checkpoints.restoring import load_optimizers, load_parameters
from .data import Pass, called, copied
from .determinism import (
    is_invariant,
    refusal_of,
    seed_streams,
    seed_streams_in_step,
    streams_kept,
)
from .engine import LossFunction, Step
from .gradients import NOTHING, GradientReducer, ScriptHooks
from .group import Place
from .nested_tensors import digest_of
from .outputs import OutputsOfBatch, in_order, message_of
from .promise.promise import Promise
from .session import Session
from .setup import final_tensors, state_of
from .sharding.leaves import NodeOrder
from .sharding.precision import AS_IS
from .sharding.saving import SharedState, kept_of, move, shares_of
from .sharding.states import SharedStates
from .totals import (
    StepTotals,
    Sums,
    Weighted,
    loss_and_rest,
    outputs_in,
    packed_sums,
)
from .virtual_nodes import holdings_of, invariant_of, share_out, slices
from .wire import Message


class SplitEngine:
    """Runs steps under a split plan; see ``StepEngine``.

    Attributes:
        reducer: This worker's part in the sums of gradients.
        totals: The sums of a step.
        wishes: [virtual nodes] see ``Promise.wishes``; empty where states are not shared.
    """

    flushes, keeps_groups, is_drained, runs_whole = True, False, True, True

    def __init__(self, session: Session, *, overlap: bool) -> None:
        self._session, self._overlap = session, overlap
        self._holder = session.holder
        self.buffers = VirtualNodeBuffers(
            session.model, session.local_nodes, session.batch_sizes or (1,)
        )
        warn_of_saving(session.model, self.buffers)
        self.shared_states = _shared_states_of(session)
        if self.shared_states is not None:
            self.shared_states.serve_script()
        self.reducer: GradientReducer | SharedStates = self.shared_states or _reducer_of(
            session, has_buffers=bool(self.buffers.slots)
        )
        # The reducer has space for the totals behind its last bucket, so it comes first.
        self.totals = StepTotals(
            self.reducer,
            session.place,
            len(session.batch_sizes) or 1,
            are_alike=_are_alike(session.place),
        )
        self.state: WholeState | SharedState = (
            WholeState(session, self.buffers, self.totals)
            if self.shared_states is None
            else SharedState(session, self.buffers, self.totals, self.shared_states)
        )
        self.settings_differ = False
        self._rest: dict[int, Message] = {}
        self.wishes: list[float] = []
        self._promise: Promise | None = None  # that the sums of a step tell of all workers' wishes
        modules = session.model.modules()
        self._norms = [module for module in modules if isinstance(module, nn.SyncBatchNorm)]
        self._script_hooks = ScriptHooks(session.parameters)

    # A step

    def run(self, step: Step) -> Tensor:
        """Run this worker's virtual nodes; make gradients the mean over all workers' samples."""
        self.run_passes(step)
        return self.close_sums(self.exchange())

    def run_passes(self, step: Step) -> None:
        """Run this worker's virtual nodes; after ``reducer.undo`` they can run again."""
        if step.has_run:
            return
        self.begin(step)
        batch = step.batch
        try:
            if self._norms:
                self._run_at_once(step)
            elif step.over_batch is not None:
                self._run_twice(step, step.over_batch)
            else:
                for number, (item, inputs) in enumerate(batch.inputs(), start=1):
                    with self._passing(item):
                        answer = self._call(step, item, inputs)
                        if step.has_aux:
                            answer, rest = loss_and_rest(answer)
                            self._rest[item.virtual_node] = message_of(rest)
                        self._give(step, item, answer, last=number == len(batch.passes))
        except RuntimeError as error:
            self._refuse(error)
            raise
        self.end(step)
        if step.has_aux:
            step.rest[:] = self._in_order(step, self._rest)

    def _refuse(self, error: RuntimeError) -> None:
        """Say in one line what the level of determinism does not allow, if that is the error."""
        refusal = refusal_of(error, self._session.place.start.determinism)
        if refusal is not None:
            raise refusal from error

    def begin(self, step: Step) -> None:
        """Begin the passes of a step."""
        session, batch = self._session, step.batch
        if self.shared_states is not None:
            self.shared_states.check_step(batch.num_samples, session.batch_sizes)
            self.shared_states.share_overflows(step.scaler)
            self.shared_states.hide_slices()
        if not step.round:
            session.clock.begin_step(is_full=batch.is_full)
        self.buffers.begin_step()
        if self._holder:
            self._holder.begin_step()
        self._script_hooks.take()
        # Before the totals: a scaler's factor is for this step's gradients, and ``begin`` drops it.
        if self.shared_states is None:
            self.reducer.begin(self._write_sums, num_passes=len(batch.passes))
        else:  # a script's own loop may clear gradients behind its forward pass
            self.shared_states.begin(late=step.has_run)
        self.totals.begin(batch.num_samples, step.agreement.settings_number, step.scaler)
        self._rest = {}  # a step that is repeated after a loss runs its passes anew

    def end(self, step: Step) -> None:
        """End the passes of a step: ``exchange`` follows."""
        self._script_hooks.check(are_carried=bool(self.reducer.carried))
        if step.has_run:  # the last part of a worker without samples may have brought a scaler
            self._take_scaler(step)
        if self.shared_states is not None:
            self._promise = step.promise
            self.wishes = [] if step.promise is None else step.promise.wishes()
            self.totals.extra = self.wishes
        # After all that the sums hold is known: the last bucket may carry them (totals.py).
        self.reducer.launch_rest()
        self._session.clock.computed()

    @contextmanager
    def looping(self, step: Step, item: Pass) -> Iterator[None]:
        """Let the script's own loop run a virtual node's pass in the body; ``give`` ends it."""
        try:
            with self._passing(item, counts=not step.round):
                self._seed(step, item)
                yield
        except RuntimeError as error:
            self._refuse(error)
            raise

    def check_loops(self) -> None:
        """Refuse a loop of the script's own where a worker's share must run in one pass."""
        if self._norms:
            raise TargetError(
                "SyncBatchNorm runs a worker's whole share in one pass, and goes with no loop of "
                "the script's own",
                hint="job.backward(lambda x, y: loss(model(x), y), batch); or use BatchNorm",
            )

    def drop(self) -> None:
        """Leave a step that ``begin`` began, and of which no loss came.

        Raises:
            TargetError: Gradients came all the same.
        """
        self._script_hooks.put_back()
        if self.reducer.has_some:
            raise TargetError(
                "the script called loss.backward(), and the gradients are of this worker's "
                "samples alone",
                hint="write job.backward(loss) in its place",
            )

    @contextmanager
    def looping_idly(self) -> Iterator[None]:
        """Let the script's own loop run a pass in the body that leaves nothing behind."""
        reads = self.shared_states.reading() if self.shared_states else nullcontext()
        with streams_kept(), buffers_apart(self._session.model.modules()), reads:
            yield

    def give(self, step: Step, item: Pass, answer: Any, *, last: bool) -> Tensor:
        """Take the loss of a pass and run its backward pass; return the mean loss so far: []."""
        self._take_scaler(step)
        self._give(step, item, answer, last=last)
        return self.totals.own_mean()

    def _take_scaler(self, step: Step) -> None:
        self.totals.take_scaler(step.scaler)
        if self.shared_states is not None:
            self.shared_states.share_overflows(step.scaler)

    def _write_sums(self, sums: Tensor) -> None:
        self.totals.wants_stop = self._session.wants_stop
        self.totals.write(sums)

    def exchange(self, start: Callable[[Tensor], Callable[[], Tensor]] | None = None) -> Sums:
        """Wait for the gradients, and sum the step's totals; see ``StepTotals.exchange``."""
        self.totals.wants_stop = self._session.wants_stop
        return self.totals.exchange(start, last=self.is_kept_twice)

    @property
    def is_kept_twice(self) -> bool:
        """Whether another worker keeps each share, too."""
        config = self._session.place.start.config
        return self.shared_states is not None and config is not None and config.redundancy > 0

    def close_sums(self, sums: Sums) -> Tensor:
        """Make the gradients the mean by the sums over all workers; return the mean loss."""
        totals = self.totals
        loss = totals.close(sums)
        self.settings_differ = totals.settings_differ
        if self._promise is not None:
            self._promise.hear(totals.extras_of(sums)[: len(self.wishes)])
        if totals.may_overflow_elsewhere:
            if self.shared_states is not None:
                raise TargetError(
                    "another worker has a GradScaler and this one has none, and each would see "
                    "overflows in its own share of the gradients only",
                    hint="let all workers scale, or none",
                )
            totals.skip_overflow(self._session.optimizers)
        if self.shared_states is not None:
            self.shared_states.show_slices(gradients=True)
        if self._script_hooks.held:  # after the mean: a hook may clip, or draw noise once for all
            seed_streams(self._session.seed, "hooks", self._session.num_steps)
            self._script_hooks.run()
        return loss

    def _give(self, step: Step, item: Pass, answer: Any, *, last: bool) -> None:
        share = self.totals.add(answer, item.num_samples, item.virtual_node)
        if step.agreement.looks:
            step.agreement.look_at(answer.loss if isinstance(answer, Weighted) else answer)
        if step.promise is not None and share is not None:
            step.promise.look(share[0], item)
        if last:
            self._arm()
        if share is not None:
            self.totals.go_back(*share, step.scaler)
        # A pass of weight 0 goes back all the same where each pass has collectives (gathers, and
        # reductions): the other workers wait in them. What it gives is dropped.
        elif self.shared_states is not None and self.shared_states.in_rounds:
            loss = answer.loss if isinstance(answer, Weighted) else answer
            with self.shared_states.discarding():
                self.totals.go_back(loss, 0.0, step.scaler)

    def _arm(self) -> None:
        """Let the sums over the workers begin during the backward pass that follows."""
        # Only now: a function that goes back by itself (a penalty's gradients) has done so, and a
        # bucket that was sent before the last gradient came would miss it.
        if self._overlap and self._session.place.world_size > 1:
            self.reducer.arm(defer_last=self._holder is not None)

    @contextmanager
    def _passing(self, item: Pass, *, counts: bool = True) -> Iterator[None]:
        """Run a virtual node's pass in the body: with its buffers, into its gradient."""
        session, reducer = self._session, self.reducer
        began = session.clock.mark()
        holding = self._holder.hold(item.num_samples) if self._holder else NOTHING
        with holding, reducer.cutting():
            reducer.enter(item.virtual_node)
            self.buffers.load(item.virtual_node)
            yield
            self.buffers.save(item.virtual_node)
            reducer.leave()
        number = item.num_samples if counts else 0
        # After the emulated device has held the pass: its time is what a plan predicts.
        session.clock.end_pass(began, num_samples=number, is_full=item.is_full)

    def _call(self, step: Step, item: Pass, inputs: Any) -> Any:
        self._seed(step, item)
        return called(step.function, inputs)

    def _seed(self, step: Step, item: Pass) -> None:
        session = self._session
        # By step and virtual node, never by worker: dropout draws the same masks wherever the node
        # runs. A second round of one step draws others.
        again = ("round", step.round) if step.round else ()
        seed_streams_in_step(session.seed, "pass", session.num_steps, item.virtual_node, *again)

    def _run_twice(self, step: Step, over_batch: LossFunction) -> None:
        """Run the passes of a loss over the whole batch; see outputs.py."""
        session, batch = self._session, step.batch
        # First all outputs, without graphs: graphs of all passes at once would be the memory of the
        # whole batch. The loss gives their gradients, with which each pass then runs again. Both
        # runs have one seed (``_call``), and the first one's statistics are dropped.
        held, own = list(batch.inputs()), {}
        for item, inputs in held:
            self.buffers.load(item.virtual_node)
            reads = self.shared_states.reading() if self.shared_states else nullcontext()
            with buffers_apart(session.model.modules()), torch.no_grad(), reads:
                answer = self._call(step, item, copied(inputs))
                outputs_in(answer, item.num_samples)
                own[item.virtual_node] = message_of(answer)
        torch.clear_autocast_cache()  # else casts of weights made here would have no graph below
        whole = OutputsOfBatch(self._in_order(step, own), session.device)
        seed_streams(session.seed, "over batch", session.num_steps)
        cuts = slices(batch.num_samples, session.batch_sizes or (batch.num_samples,))
        first = next(node for node, (start, end) in enumerate(cuts) if end > start)
        loss, scaled = whole.differentiate(over_batch, step.scaler, keeps=first in own)
        for number, (item, inputs) in enumerate(held, start=1):
            with self._passing(item):
                answer = self._call(step, item, inputs)
                roots, gradients = whole.roots(answer, cuts[item.virtual_node][0])
                if item.virtual_node == first:  # parameters that the loss reads are counted once
                    roots, gradients = [*roots, scaled], [*gradients, torch.ones_like(scaled)]
                step.agreement.look_at(roots)
                self.totals.add(loss, item.num_samples, item.virtual_node)
                if number == len(held):
                    self._arm()
                if roots:
                    torch.autograd.backward(roots, gradients)

    def _run_at_once(self, step: Step) -> None:
        """Run this worker's whole share in one pass; see buffers.py."""
        session, batch = self._session, step.batch
        if step.has_aux or step.over_batch is not None:
            raise TargetError(
                "job.backward: has_aux and over_batch do not go with SyncBatchNorm",
                hint="use BatchNorm, whose batch is the virtual node's",
            )
        shares = share_out(batch.num_samples, session.batch_sizes or (batch.num_samples,))
        running = {rank for rank, n in zip(session.holders, shares, strict=True) if n}
        if len(running) < session.place.world_size:
            raise TargetError(
                f"a batch of {batch.num_samples} samples leaves a worker without any, and "
                f"SyncBatchNorm needs all",
                hint="give the DataLoader drop_last=True",
            )
        items, inputs = zip(*batch.inputs(), strict=True)
        whole = replace(items[0], num_samples=sum(item.num_samples for item in items))
        given = joined(inputs, [item.num_samples for item in items])
        with over_workers(self._norms, session.place), self._passing(whole):
            answer = self._call(step, whole, given)
            share = self.totals.add(answer, whole.num_samples, whole.virtual_node)
            if share is None:
                raise TargetError("with SyncBatchNorm the loss of a worker cannot have weight 0")
            if step.promise is not None:
                step.promise.look(share[0], whole)
            # Not overlapped: sums of gradients could meet the layers' sums in another order.
            self.totals.go_back(*share, step.scaler)
        for item in items[1:]:  # they may run elsewhere later
            self.buffers.save(item.virtual_node)

    def _in_order(self, step: Step, own: dict[int, Message]) -> list[Any]:
        session, number = self._session, step.batch.num_samples
        shares = share_out(number, session.batch_sizes or (number,))
        nodes = [node for node, share in enumerate(shares) if share]
        return in_order(own, nodes, session.holders, session.place, waiting=step.waiting)

    @property
    def all_stop(self) -> bool:
        """See ``StepEngine``."""
        return self.totals.all_stop

    # Other workers

    def take(self, place: Place) -> None:
        """Reduce with other workers from now on; ``take_shares`` follows when shares have moved."""
        if self.shared_states is None:
            self.reducer.close()
            self._session.place = place
            self.reducer = _reducer_of(self._session, has_buffers=bool(self.buffers.slots))
        else:
            self._session.place = place
        self.totals.move(self.reducer, place, are_alike=_are_alike(place))

    def move_shares(self, place: Place, config: LaunchConfig) -> None:
        """Move shared states to the workers of another config; ``take`` follows.

        In ``place`` those of the config come first.
        """
        if self.shared_states is not None:
            move(self.shared_states, self._session.optimizers, place, config)

    def take_shares(self) -> None:
        """Share states with the other workers, whose shares have moved."""
        if self.shared_states is not None:
            place = self._session.place
            self.shared_states.take(place, _order_of(place))
            self.shared_states.treat(place.activations)

    def shared(self) -> list[SharedTensors]:
        """Parameters, and buffers as the script last wrote them: equal on all workers."""
        held: dict[str, Tensor] = {}
        if self.shared_states is None:
            held |= self._session.parameters
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
        self.totals.look()
        final = final_tensors(self._session.model, self._session.parameters)
        return digest_of(final) if self.shared_states is None else self.shared_states.digest(final)

    def gather(self) -> None:
        """Bring shared weights to every worker; otherwise each has the whole model."""
        if self.shared_states is not None:
            self.shared_states.make_whole()

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """Do nothing: every worker has the whole model."""
        yield

    def evaluating(self) -> AbstractContextManager[None]:
        """Gather shared weights as layers run; otherwise each worker has the whole model."""
        return nullcontext() if self.shared_states is None else self.shared_states.open()

    def check_predicts(self) -> bool:
        """See ``StepEngine``: where weights are shared, workers call the model together."""
        return self.shared_states is not None and self.shared_states.shares_weights

    def close(self) -> None:
        """Remove the hooks from the parameters, and give the script's own back."""
        self.reducer.close()
        self._script_hooks.put_back()


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


def _shared_states_of(session: Session) -> SharedStates | None:
    config, precision = session.place.start.config, session.precision
    shares = config is not None and config.shard is not None
    if not shares and precision == AS_IS:
        return None
    order = _order_of(session.place)
    if config is None or config.shard is None:  # one worker, which casts
        return SharedStates(session, "optimizer", [1], order, precision=precision)
    states = SharedStates(
        session, config.shard, shares_of(config), order, kept_of(config), session.blocks, precision
    )
    states.treat(session.place.activations)
    return states


def _order_of(place: Place) -> NodeOrder | None:
    config = place.start.config
    is_fixed = config is not None and is_invariant(config.determinism)
    return NodeOrder(holdings_of(place)) if is_fixed else None


def _num_sums(session: Session, *, has_buffers: bool) -> int:
    """How many numbers the step's sums are, if they travel with gradients, else 0."""
    # They travel alone, or with mirrored buffers, where others may continue from these.
    place = session.place
    on_host = backend_of(place.device).is_host
    # Workers on unlike kinds of devices: some may be hosts, and others not.
    are_apart = has_buffers or not on_host or not _are_alike(place, emulated=False)
    if is_on_devices():
        are_apart = place.control is not None and place.control.survives_on_devices
    if not place.distributed or are_apart:
        return 0
    num_nodes, num_parameters = len(session.batch_sizes) or 1, len(session.parameters)
    return packed_sums(num_nodes, num_parameters, on_host=on_host).length


def _are_alike(place: Place, *, emulated: bool = True) -> bool:
    """Whether all workers' devices are of one type; ``emulated`` ones have types of their own."""
    config = place.start.config
    types = [worker.device_type for worker in config.workers] if config is not None else []
    if config is not None and not emulated:
        types = [base_type(kind, config) for kind in types]
    return len(set(types)) <= 1


class WholeState:
    """The state of a job whose workers all hold the whole state; the first worker writes it."""

    is_in_parts, wanted = False, None

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
        self._totals.look()
        return {
            "parameters": dict(self._session.parameters),
            "optimizer": state_of(self._session.optimizers),
            "buffers": buffers,
            "registered": [thing.state_dict() for thing in registered],
            "last_weight": self._totals.last_weight,
        }

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that there are, by name."""
        found = {name: p.grad for name, p in self._session.parameters.items()}
        return {name: grad for name, grad in found.items() if grad is not None}

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

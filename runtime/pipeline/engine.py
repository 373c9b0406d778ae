"""The engine of a pipeline plan: the script is the same, and the model runs stage by stage.

On every worker ``job.backward`` calls the script's function once for each microbatch. When the
function calls the model, this worker's stage runs instead. On the last stage the function then
continues to the loss; on the others it ends there. So whatever the function does around the model
(autocast, preparation of inputs) holds on every stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...schema.errors import ProblemError, TargetError
from ...schema.launch import PipelineWork
from ...schema.operations import Kind, Operation
from ..agreement.agreement import SharedTensors
from ..digest import InPieces, digest_of_pieces
from ..engine import Step
from ..gradients.hooks import ScriptHooks
from ..protocol.lower import microbatches_of, schedule_of
from ..session import Session
from ..setup import check_same_shapes, final_tensors
from ..streams import key_of, seed_streams_by
from ..tensor.groups import Lanes
from ..tensor.regions import check_attention
from ..tensor.roles import Sharing, check_degree, check_pairs, check_shared, sharing_of
from ..tensor.sharded import ShardedModel, tensor_group
from .channels import Message
from .cut import CALL, StageModule, any_call, check_crossing, cut, holdings_of, like, whole
from .evaluation import StageEvaluation, refusing_calls
from .executor import Executor, Unflushed, held
from .microbatches import LossScaling, SpreadModel, StageDone, StepMicrobatches
from .optimizer import OwnShare, ShardedUpdates, StageState, check_shardable
from .ownership import (
    Holders,
    Ownership,
    broadcast_parts,
    move_buffers,
    place_own,
    put_back,
    shapes_on,
)
from .stage import (
    Stage,
    StageBuffers,
    buffer_holders,
    hold_own,
    parameters_of,
    refuse_saving,
    refusing_reads,
)
from .synchronise import Synchroniser
from .trace import layers_of
from .transport import Routes, transport_of


def _sharing_of(model: nn.Module, work: PipelineWork, device: torch.device) -> Sharing:
    """How the model's layers are shared, where some tensor-parallel group has several workers."""
    degrees = {len(group) for group in work.groups}
    if degrees == {1}:
        return Sharing({}, {}, {})
    check_attention(model, device)
    sharing = sharing_of(model)
    for degree in sorted(degrees):
        check_degree(model, sharing, degree)
    if work.sequence_parallel:
        sharing = sharing.over_sequences(model)
    check_pairs([(s.layers, {len(ranks) for ranks in s.replicas}) for s in work.stages], sharing)
    return sharing


class PipelineEngine:
    """Runs steps under a pipeline plan; see ``StepEngine``.

    Until it is closed, the model can be called only in the function of a step.

    Raises:
        TargetError: The model cannot be cut as planned, the optimizer cannot be shared among
            workers, or the workers built different models.
    """

    keeps_groups, runs_whole = True, False

    def __init__(self, session: Session, work: PipelineWork, *, overlap: bool = True) -> None:
        self._session, model, place = session, session.model, session.place
        optimizer = next(iter(session.optimizers), None)
        self._work = work
        groups = work.groups
        group = next(n for n, ranks in enumerate(groups) if place.rank in ranks)
        self._position = group  # in the schedule
        # Every worker makes process groups in the same order, here and in the parts below: a group
        # is a collective of all workers, also of those outside of it.
        sharing = _sharing_of(model, work, place.device)
        spreads = bool(work.sequence_parallel and sharing.roles)
        self._tensor = tensor = tensor_group(place, groups)
        self._holdings_of = partial(holdings_of, sharing=sharing, sequence_parallel=spreads)
        self._sharded = ShardedModel(model, sharing, tensor, sequence_parallel=spreads)
        named = session.parameters
        self._whole_shapes = [(parameter, parameter.shape) for parameter in named.values()]
        if place.distributed:
            check_same_shapes({**named, **dict(model.named_buffers())}, place)
        with self._sharded.traceable():
            parts, check_call = self._parts()
        check_shared(parts, sharing, model)
        self._last_stage = len(parts) - 1
        held_here = {number: parts[number] for number in work.stages_of_rank[place.rank]}
        self._schedule = schedule_of(work, work.num_microbatches)
        self._ownership = Ownership(
            dict(model.named_parameters()),
            parameters_of(parts),
            [stage.ranks for stage in work.stages],
            place,
            Lanes(groups, sharing.cuts, sharing.inner),
        )
        self.flushes = self._schedule.weight_semantics == "flush"
        self._check_semantics()
        own = self._ownership.own
        self._script_hooks = ScriptHooks(session.parameters)
        self._script_hooks.refuse()
        shards = bool(work.shard_optimizer and optimizer is not None)
        if shards:
            check_shardable(optimizer, is_main=session.is_main)
        share = (
            OwnShare(optimizer, self._ownership, rank=place.rank, is_sharded=shards)
            if optimizer
            else None
        )
        # The share takes parameters while they are whole, and knows their order in the optimizer.
        # Then own parameters and buffers move here, get the first worker's values, and are cut
        # last: a broadcast sends whole tensors.
        place_own(
            [p for name, p in self._ownership.parameters.items() if name in own],
            list(held_here.values()),
            session.optimizers,
            place,
        )
        holders = buffer_holders(model, parts, [stage.ranks for stage in work.stages])
        hold_own(model, holders, place)
        held = {name for name, ranks in holders.items() if place.rank in ranks}
        broadcast_parts(model, session.parameters, own | held, place)
        self._ownership.strip()
        # Stages note forwards and buffers as they are: shared layers are in their places by now.
        self._sharded.install()
        self._stages = {
            number: Stage(
                part,
                recompute=work.recomputes(number),
                recompute_cores=bool(work.stages[number].recompute_cores),
                device=place.device,
                passing=self._sharded.passing,
            )
            for number, part in held_here.items()
        }
        self.buffers = StageBuffers(
            model,
            session.local_nodes,
            session.batch_sizes,
            holders,
            [
                (part, microbatches_of(self._schedule, group, number))
                for number, part in held_here.items()
            ],
            place,
            tells=self._ownership.lanes.lane(place.rank) == 0,
        )
        self._transport = transport = transport_of(place, [s.replicas for s in work.stages])
        self._synchroniser = Synchroniser(
            self._ownership, place, work, transport, overlaps=overlap, shares_updates=shards
        )
        self._updates: ShardedUpdates | None = None  # of a sharded optimizer
        if shards and optimizer is not None and share is not None:
            self._updates = ShardedUpdates(
                optimizer,
                self._ownership,
                share.keepers,
                place.rank,
                self._synchroniser.group_of,
            )
        self._executor = Executor(
            group,
            transport,
            Routes(place.rank, groups),
            tensor,
            place.device,
            self._holdings_of(parts),
        )
        self._model = SpreadModel(model, None if parts[0].arguments == (CALL,) else check_call)
        refuse_saving(model, self._ownership, self.buffers)
        self._microbatches: StepMicrobatches | None = None  # of the step in progress
        self._seeds: dict[tuple[int, int], int] = {}  # of a step that flushes, by pass
        self._evaluation: StageEvaluation | None = None  # made when it is first asked for
        # If the schedule does not flush, stages read weight versions, never the parameters.
        self._strangers = {
            id(parameter): name
            for name, parameter in self._ownership.parameters.items()
            if name not in own or not self.flushes
        }
        self.state = StageState(
            session, work, self.buffers, self._ownership, share, self._synchroniser, tensor
        )
        self._unflushed: Unflushed | None = None
        if not self.flushes and optimizer is not None:
            self._unflushed = Unflushed(
                work, self._stages, self._executor, self._synchroniser, optimizer
            )

    def _parts(
        self, *, evaluates: bool = False
    ) -> tuple[list[StageModule], Callable[[Mapping[str, Any]], None]]:
        """The model's stages and a check of its calls; parameters return to their places after.

        A parallel plan of one stage needs no graph, so its model need not be traceable.
        """
        session, work = self._session, self._work
        if work.is_tensor_parallel and len(work.stages) == 1:
            return [whole(session.model)], any_call
        with shapes_on(session.device, session.model, self._whole_shapes):
            layered = layers_of(session.model, work.trace)
        stages = [stage.layers for stage in work.stages]
        return cut(layered, like(layered, stages) if evaluates else stages), layered.check_call

    def _check_semantics(self) -> None:
        if self.flushes:
            return
        if self._work.shard_optimizer:
            raise TargetError(
                f"{self._work.schedule} updates by itself, so the optimizer's state cannot be "
                "sharded",
                hint="use a schedule that flushes, such as 1f1b",
            )
        if self._ownership.tied:
            raise TargetError(
                f"{self._ownership.tied[0]} is shared by several stages, which "
                f"{self._work.schedule} would update apart",
                hint="use a schedule that flushes, such as 1f1b",
            )
        if not self._session.optimizers:
            raise TargetError(
                f"{self._work.schedule} updates by itself: give prepare the optimizer"
            )

    def shared(self) -> list[SharedTensors]:
        """Tensors that must be equal: on a stage's replicas, and on stages with a tied weight."""
        ownership = self._ownership
        sets: dict[Holders, dict[str, Tensor]] = {}
        for name, parameter in ownership.parameters.items():
            for label, holders in ownership.lanes.alike(name, ownership.holders[name]):
                if len(holders) > 1:
                    held = sets.setdefault(holders, {})
                    if self._session.rank in holders:
                        held[label] = parameter
        return [SharedTensors(holders, held) for holders, held in sorted(sets.items())]

    @property
    def weight_versions(self) -> int:
        """The largest number of versions of a stage's weights held at once on this worker."""
        return self._unflushed.most_versions if self._unflushed is not None else 0

    @property
    def activations_held(self) -> int:
        """The largest number of microbatches of one stage whose activations were held at once."""
        return max(stage.most_in_flight for stage in self._stages.values())

    def run(self, step: Step) -> Tensor:
        """Run the schedule over one global batch; see ``StepEngine.run``.

        If the schedule flushes, ``param.grad`` of this worker's parameters is the gradient of the
        mean loss over the global batch. If not, the updates have been made, and the loss returned
        is that of the previous batch (in the first step, of the first batch).
        """
        session, batch = self._session, step.batch
        self._script_hooks.refuse()
        self._strip()
        scaling = LossScaling(step.scaler, self._ownership, self._synchroniser)
        session.clock.begin_step(is_full=batch.is_full)
        self.buffers.begin_step()
        self._synchroniser.wants_stop = session.wants_stop
        self._microbatches = StepMicrobatches(step, scaling, self._strangers)
        try:
            with refusing_reads():
                if self._unflushed is None:
                    return self._run_flush(step, scaling)
                scaling.refuse()
                self._unflushed.run(batch, self)
            session.clock.computed()
            return self._synchroniser.share_loss_late()
        finally:
            self._microbatches = None

    def _run_flush(self, step: Step, scaling: LossScaling) -> Tensor:
        number = min(self._work.num_microbatches, step.batch.num_samples)
        schedule = self._schedule
        if number != schedule.num_microbatches:
            schedule = schedule_of(self._work, number)
        self._synchroniser.begin(step.batch.num_samples)
        self._synchroniser.settings_number = step.settings_number
        self._synchroniser.expect(schedule.ranks[self._position])
        # All at once: between two passes this code is no longer in the caches.
        passes = [op for op in schedule.ranks[self._position] if op.kind is Kind.FORWARD]
        self._seeds = {
            (op.microbatch, op.stage): self._seed_of(op.microbatch, op.stage) for op in passes
        }
        self._executor.begin(schedule)
        self._executor.run(self)
        self._session.clock.computed()
        loss = self._synchroniser.finish()
        scaling.share_overflow()
        return loss

    def _seed_of(self, virtual_node: int, stage: int) -> int:
        session = self._session
        return key_of(session.seed, "pass", session.num_steps, virtual_node, "stage", stage)

    @property
    def settings_sums(self) -> Sequence[Any] | Tensor:
        """See ``StepEngine``."""
        return self._synchroniser.settings_sums

    @property
    def all_stop(self) -> bool:
        """See ``StepEngine``."""
        return self._synchroniser.stops > 0

    # Without flushes

    @property
    def is_drained(self) -> bool:
        """Whether no microbatch is in flight, so each parameter has only its newest value."""
        return self._unflushed is None or self._unflushed.is_drained

    def drain(self) -> None:
        """Finish the microbatches in flight if the schedule does not flush. Call it on all."""
        if self._unflushed is not None:
            self._unflushed.drain(self)

    def begin_epoch(self, epoch: int, num_batches: int, last_batch_samples: int) -> None:
        """Without flushes, run the schedule once over an epoch, with a drain at its end."""
        if self._unflushed is not None:
            self._unflushed.epoch_of(epoch, num_batches, last_batch_samples)
        elif last_batch_samples < self._work.num_microbatches:
            try:  # refuses a short last batch when the epoch begins, not when it ends
                schedule_of(self._work, last_batch_samples)
            except ProblemError as error:
                raise TargetError(
                    f"the last batch of an epoch has {last_batch_samples} samples for "
                    f"{self._work.num_microbatches} microbatches, and {error.message}",
                    hint="give the DataLoader drop_last=True",
                ) from None

    # Called by the executor

    def forward(self, operation: Operation, received: Message) -> tuple[Any, ...]:
        """Run this worker's stage inside the script's function; see ``Passes``."""
        number, microbatch = operation.stage, operation.microbatch
        late, session, batch = self._unflushed, self._session, self._microbatches
        assert batch is not None
        stage, is_last = self._stages[number], operation.stage == self._last_stage
        weights = None if late is None else late.weights(operation)
        made: list[Any] = []

        def run(arguments: dict[str, Any]) -> Any:
            answer = stage.forward(microbatch, arguments, received, weights)
            made.append(answer)
            if is_last:
                batch.answered(answer)
                return answer
            check_crossing(stage.part, answer, number)
            raise StageDone

        entered = session.clock.begin_pass()
        with held(self._work.stages[number].forward_seconds):
            # An emulated device does not wait for samples, as a real one finds them prefetched.
            item, inputs = batch.input_of(microbatch - (late.offset if late else 0))
            began = session.clock.begin_pass()
            self.buffers.load(item.virtual_node)
            place = (item.virtual_node, number)
            seed_streams_by(self._seeds.get(place) or self._seed_of(*place))
            loss = self._model.call(batch.step.function, run, inputs)
            if is_last:
                batch.look_at(loss)
                batch.test(item, made[0], loss, self._model.evaluating)
                scaled = self._synchroniser.add(loss, item.num_samples, scales=self.flushes)
                results = () if scaled is None else (batch.scaling.scale(scaled),)
            else:
                results = made[0]
            stage.keep(microbatch, results)
            self.buffers.save(item.virtual_node)
        if late is not None:
            late.passed(operation)
        session.clock.end_pass(began, num_samples=item.num_samples, is_full=item.is_full)
        session.clock.end_stage_pass(number, entered, is_backward=False)
        return tuple(results)

    def backward_pass(self, operation: Operation, gradients: Any) -> tuple[Any, ...]:
        """Run a backward pass, or half of one; see ``Passes``."""
        sums, stage = self._synchroniser.replica_sums, self._work.stages[operation.stage]
        began = self._session.clock.begin_pass()
        sums.enter(operation, is_stretched=stage.backward_seconds is not None)
        made = self._backward_pass(operation, gradients)
        sums.leave()
        self._session.clock.end_stage_pass(operation.stage, began, is_backward=True)
        return made

    def _backward_pass(self, operation: Operation, gradients: Any) -> tuple[Any, ...]:
        stage, number = self._stages[operation.stage], operation.stage
        seconds = self._work.stages[number].backward_seconds
        halves = operation.kind is not Kind.BACKWARD
        with held(seconds if seconds is None or not halves else seconds / 2):
            if operation.kind is Kind.BACKWARD_WEIGHT:
                stage.backward_weight(operation.microbatch)
                return ()
            if operation.kind is Kind.BACKWARD_INPUT:
                return stage.backward_input(operation.microbatch, gradients)
            if self._unflushed is not None:
                self._unflushed.lend(operation)
            made = stage.backward(operation.microbatch, gradients)
        if self._unflushed is not None:
            self._unflushed.collect(operation)
            self._unflushed.passed(operation)
        return made

    def reduce(self, operation: Operation) -> None:
        """Sum a round's gradients over the replicas; a flush sums them at its end instead."""
        if self._unflushed is not None:
            self._unflushed.reduce(operation)

    def update(self, operation: Operation) -> None:
        """Make the next weight version; after a flush, the script updates instead."""
        if self._unflushed is not None:
            self._unflushed.update(operation)

    # The whole model

    def digest(self) -> str:
        """See ``StepEngine``; no worker needs the others' parameters for it."""
        session, ownership, buffers = self._session, self._ownership, self.buffers
        final = final_tensors(session.model, session.parameters)

        def values_of(name: str) -> InPieces:
            if name in ownership.parameters:
                return ownership.values_of(name)
            if name in buffers.all():
                return buffers.values_of(name)
            return InPieces(name, final[name].dtype, tuple(final[name].shape), [final[name]])

        return digest_of_pieces(values_of(name) for name in sorted(final))

    def gather(self) -> None:
        """Bring the tensors of all stages to every worker. Call it on all workers."""
        self._ownership.gather()
        self.buffers.gather(self._ownership.device_of_whole)

    def _strip(self) -> None:
        self._ownership.strip()
        self.buffers.strip()

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """Use the whole model after ``gather``; afterwards, stages again."""
        model = self._session.model
        self._model.release()
        self._sharded.remove()
        buffers = move_buffers(model, self._ownership.device_of_whole)
        try:
            yield
        finally:
            self._model.spread()
            self._sharded.install()
            put_back(buffers)
            self._strip()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run calls of the model, in evaluation mode, on the stages where they are.

        Enter it on all workers.
        """
        if self._session.is_finished:
            yield
            return
        self._strip()
        if self._evaluation is None:
            self._evaluation = self._evaluation_of()
        with ExitStack() as stack:
            for name, module in self._session.model.named_modules():
                if self._ownership.lacks_some_of(module):
                    stack.enter_context(refusing_calls(module, name))
            stack.enter_context(refusing_reads())
            stack.enter_context(self._model.evaluating(self._evaluation.call))
            yield
            self._evaluation.serve()

    def _evaluation_of(self) -> StageEvaluation:
        """Cut the model as it computes in evaluation mode, at the same layers."""
        session, work, ownership = self._session, self._work, self._ownership
        self._model.release()
        self._sharded.remove()
        try:
            with self._sharded.traceable():
                parts, check_call = self._parts(evaluates=True)
            ownership.check_held(parameters_of(parts), [stage.ranks for stage in work.stages])
        finally:
            self._model.spread()
            self._sharded.install()
        # Without flushes replicas update at different times; calls go to the first.
        replicas = [stage.replicas[: None if self.flushes else 1] for stage in work.stages]
        return StageEvaluation(
            session.model,
            parts,
            replicas,
            session.place,
            self._transport,
            self._model.signature,
            check_call,
            group=self._tensor,
            holdings=self._holdings_of(parts),
            passing=self._sharded.passing,
        )

    def check_predicts(self) -> None:
        """Refuse ``job.predict``: no worker of a pipeline runs a whole pass.

        Raises:
            TargetError: Always.
        """
        raise TargetError(
            "job.predict is for split plans",
            hint="call the model inside job.evaluation(): each call runs on all stages",
        )

    def close(self) -> None:
        """End the engine; the model belongs to the script again, if all of it is here."""
        self._synchroniser.replica_sums.close()
        if not (self._ownership.is_whole and self.buffers.is_readable):
            return
        self._model.release()
        self._sharded.remove()
        if self._ownership.device_of_whole != self._session.device:
            move_buffers(self._session.model, self._ownership.device_of_whole)

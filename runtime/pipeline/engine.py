"""The engine of a pipeline plan: the script is the same, and the model runs stage by stage.

On every worker ``job.backward`` calls the script's function once for each microbatch. When the
function calls the model, this worker's stage runs instead. On the last stage the function then
continues to the loss; on the others it ends there. So whatever the function does around the model
(autocast, preparation of inputs) holds on every stage.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...devices.host import TORCH_DEVICE as HOST
from ...schema.errors import ProblemError, TargetError
from ...schema.launch import PipelineWork
from ...schema.schedule import PASSES, Kind, Operation
from ..agreement.agreement import SharedTensors, leaves_of, nodes_of
from ..buffers import put_back
from ..data import Pass, called
from ..determinism import key_of, seed_streams_by
from ..engine import LossFunction, Step
from ..gradients import ScriptHooks
from ..initial_values import fill
from ..nested_tensors import InPieces, digest_of_pieces, tensors_in
from ..protocol.lower import microbatches_of, schedule_of
from ..session import Session
from ..setup import check_same_shapes, final_tensors, refuse_saving
from ..tensor.regions import check_attention
from ..tensor.roles import Lanes, SharedParts, check_degree, check_pairs, check_shared, sharing_of
from ..tensor.sharded import ShardedModel, tensor_group
from ..totals import Weighted
from .channels import Message
from .cut import (
    CALL,
    StageModule,
    any_call,
    by_placeholder,
    check_crossing,
    cut,
    holdings_of,
    like,
    whole,
)
from .evaluation import StageEvaluation, refusing_calls
from .executor import Executor, Unflushed, held
from .norms import plain
from .optimizer import OwnShare, ShardedUpdates, StageState, check_shardable, shares_of
from .ownership import (
    Elsewhere,
    Holders,
    Ownership,
    broadcast_parts,
    move_buffers,
    place_own,
    shapes_on,
)
from .shares import StageShares, first_sharers, shared_names, shares_weights
from .stage import (
    StageBuffers,
    StageRunner,
    buffer_holders,
    hold_own,
    parameters_of,
)
from .synchronise import Synchroniser
from .trace import layers_of
from .transport import Routes, transport_of

# The microbatches of one step on a worker: their inputs, and the treatment of their losses.
#
# Losses are checked for the parameters that they read. The last stage's worker has stand-ins for
# other stages' parameters, so a loss that reads these (a weight-decay term) would be silently
# wrong. Autograd's graph shows which parameters a loss reads.
#
# Under a GradScaler, every worker must learn of an overflow on another one. Each worker's scaler
# inspects its own optimizer's gradients only. An overflow in one stage must skip the step in all
# stages, so it is made visible in the gradients of each.


class LossScaling:
    """The scaling of one step's loss; it does nothing without a scaler.

    Raises:
        TargetError: This worker's stages have no parameters, so its scaler has nothing to inspect.
    """

    def __init__(
        self,
        scaler: "torch.amp.GradScaler | None",
        ownership: Ownership,
        synchroniser: Synchroniser,
    ) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._own: list[nn.Parameter] = []
        self._synchroniser = synchroniser
        synchroniser.loss_scale = 1.0
        synchroniser.checks_overflow = self._scaler is not None
        if self._scaler is None:
            return
        self._own = [ownership.parameters[name] for name in sorted(ownership.own)]
        if not self._own:
            raise TargetError(
                "a GradScaler needs parameters on every worker, and this one's stages have none",
                hint="solve for another cut, or use bfloat16 without a scaler",
            )
        # A scaler makes its state at the first loss, which only the last stage has.
        self._scaler.scale(torch.zeros((), device=self._own[0].device))
        # ``get_scale`` would make the host wait.
        on_device = self._scaler._get_scale_async() if synchroniser.stays_on_device else None
        synchroniser.loss_scale = self._scaler.get_scale() if on_device is None else on_device

    def scale(self, loss: Tensor) -> Tensor:
        """The tensor to differentiate: the loss, scaled where there is a scaler."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def refuse(self) -> None:
        """Refuse a scaler if the schedule makes the updates, because no step can be skipped."""
        if self._scaler is not None:
            raise TargetError(
                "a GradScaler needs a schedule that flushes", hint="such as 1f1b; or use bfloat16"
            )

    def share_overflow(self) -> None:
        """Make an overflow of any stage visible to this worker's scaler."""
        is_finite = self._synchroniser.is_finite
        if self._scaler is None or is_finite is True:
            return
        # One entry suffices: a scaler looks whether any is not finite, and skips the whole step.
        for parameter in self._own:
            if parameter.grad is not None and parameter.grad.numel():
                gradient = plain(parameter.grad)
                entry = gradient[(0,) * gradient.dim()]
                if isinstance(is_finite, Tensor):
                    entry.copy_(torch.where(is_finite, entry, math.inf))
                else:
                    entry.fill_(math.inf)
                return


class StepMicrobatches:
    """The microbatches of one call of ``job.backward`` on this worker; made anew for each call.

    ``strangers`` are names of the parameters that the loss may not read, by ``id``.
    """

    def __init__(self, step: Step, scaling: LossScaling, strangers: Mapping[int, str]) -> None:
        self.step, self.scaling = step, scaling
        self._strangers = strangers
        self._feeding = step.batch.inputs()
        self._inputs: dict[int, tuple[Pass, Any]] = {}
        self._answered: set[Any] = set()
        self._loss_is_checked = not strangers

    def input_of(self, microbatch: int) -> tuple[Pass, Any]:
        """The pass and the function's arguments; the first stage to ask reads the loader."""
        # The loader gives microbatches in their order; a schedule may ask in another.
        while microbatch not in self._inputs:
            item, inputs = next(self._feeding)
            self._inputs[item.virtual_node] = (item, inputs)
        return self._inputs[microbatch]

    def forget(self, microbatch: int) -> None:
        """Let go of a microbatch's arguments, which no pass of this worker asks for again."""
        del self._inputs[microbatch]

    def answered(self, answer: Any) -> None:
        """Remember the last stage's answer before the function computes a loss from it."""
        if not self._loss_is_checked or self.step.agreement.looks:
            self._answered = set(nodes_of(answer))

    def test(
        self,
        item: Pass,
        answer: Any,
        loss: Any,
        answering: Callable[[Callable[..., Any]], AbstractContextManager[None]],
    ) -> None:
        """Test the function where that is due; see ``Promise.test_after_model``."""
        step = self.step
        if step.promise is not None:
            inputs = self._inputs[item.virtual_node][1]
            step.promise.test_after_model(
                step.function, inputs, answer, item.num_samples, loss, answering
            )

    def look_at(self, answer: Any) -> None:
        """Check the loss that the function returned, also by ``job.agreement``.

        Raises:
            TargetError: It reads parameters whose stage reads another version.
        """
        loss = answer.loss if isinstance(answer, Weighted) else answer
        if not self._loss_is_checked:  # later microbatches run the same code
            for leaf in leaves_of(loss, self._answered):
                if id(leaf) in self._strangers:
                    raise TargetError(
                        f"the loss reads parameter {self._strangers[id(leaf)]}, of which a "
                        "pipeline without flushes computes with another version",
                        hint="use the optimizer's weight_decay, or compute the term inside the "
                        "model",
                    )
        self._loss_is_checked = True
        self.step.agreement.look_at(loss, self._answered)
        self._answered = set()  # else the graph would outlive its backward pass


RunStage = Callable[[dict[str, Any]], Any]
"""Runs this worker's stage. Takes the model's arguments by the names of the traced graph, and the
whole call under ``CALL``."""


class StageDone(BaseException):
    """Ends the script's function on a worker whose stage is not the last one."""


class SpreadModel:
    """Replaces a model's ``forward``: inside ``call`` it runs one stage, elsewhere it refuses.

    ``check_call`` refuses arguments for which the traced stages are not valid. It is None where the
    only stage is the model as it is, which takes the call itself.

    Attributes:
        signature: The parameters of a call of the model.
    """

    def __init__(
        self, model: nn.Module, check_call: Callable[[dict[str, Any]], None] | None
    ) -> None:
        self._model, self._check_call = model, check_call
        self._forward = model.forward
        self.signature = inspect.signature(model.forward)
        self._run_stage: RunStage | None = None
        self._evaluate: Callable[..., Any] | None = None
        self.spread()

    def spread(self) -> None:
        """Make calls of the model run a stage, or refuse them, from now on."""
        self._model.forward = self._meet

    def release(self) -> None:
        """Give the model its own ``forward`` back."""
        self._model.forward = self._forward

    @contextmanager
    def evaluating(self, evaluate: Callable[..., Any]) -> Iterator[None]:
        """Within the context, calls of the model outside of ``call`` go to another function."""
        self._evaluate = evaluate
        try:
            yield
        finally:
            self._evaluate = None

    def call(self, function: LossFunction, run: RunStage, inputs: Any) -> Any:
        """Call the script's function, with ``run`` in place of the model.

        Returns:
            The function's result; None where ``run`` raised ``StageDone``.

        Raises:
            TargetError: The function did not call the model, or called it twice.
        """
        self._run_stage = run
        try:
            answer = called(function, inputs)
        except StageDone:
            return None
        finally:
            unused, self._run_stage = self._run_stage is run, None
        if unused:
            raise TargetError("the function did not call the model")
        return answer

    def _meet(self, *arguments: Any, **named: Any) -> Any:
        if self._run_stage is None and self._evaluate is not None:
            return self._evaluate(*arguments, **named)
        if self._run_stage is None:
            raise TargetError(
                "the model is spread over several workers",
                hint="call it inside job.backward's function, or inside job.evaluation()",
            )
        run, self._run_stage = self._run_stage, self._refuse_second
        call = {CALL: (arguments, named)}
        if self._check_call is None:
            return run(call)
        given = by_placeholder(self.signature, arguments, named)
        self._check_call(given)
        return run({**given, **call})

    def _refuse_second(self, arguments: object) -> Any:
        raise TargetError(
            "the function calls the model twice; a pipeline runs it once a microbatch",
            hint="join the inputs into one call",
        )


def _sharing_of(model: nn.Module, work: PipelineWork, device: torch.device) -> SharedParts:
    """How the model's layers are shared, where some tensor-parallel group has several workers."""
    degrees = {len(group) for group in work.groups}
    if degrees == {1}:
        return SharedParts({}, {}, {})
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
            OwnShare(
                optimizer,
                self._ownership,
                rank=place.rank,
                is_sharded=shards,
                shares=shares_of(place.start.config) if place.start.config else None,
            )
            if optimizer
            else None
        )
        # What replicas share stays where it is until their shares are made: the first of each group
        # gets its values, and sends them to the others.
        config, parameters = place.start.config, self._ownership.parameters
        shared = shared_names(self._ownership) if shares_weights(config) else frozenset()
        others = first_sharers(self._ownership, work.stages, place.rank) if shared else frozenset()
        for name in sorted(own & shared & others):
            fill(parameters[name], torch.device(HOST), computes=place.rank == 0)
        # The share takes parameters while they are whole, and knows their order in the optimizer.
        # Then own parameters and buffers move here, get the first worker's values, and are cut
        # last: a broadcast sends whole tensors.
        place_own(
            [p for name, p in parameters.items() if name in own - shared],
            list(held_here.values()),
            session.optimizers,
            place,
            [p for name, p in parameters.items() if name in own & shared],
        )
        holders = buffer_holders(model, parts, [stage.ranks for stage in work.stages])
        hold_own(model, holders, place)
        held = {name for name, ranks in holders.items() if place.rank in ranks}
        broadcast_parts(model, session.parameters, own - shared | own & others | held, place)
        self._ownership.strip()
        # Stages note forwards and buffers as they are: shared layers are in their places by now.
        self._sharded.install()
        self._stages = {
            number: StageRunner(
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
        holdings = self._holdings_of(parts)  # before shares change the graphs
        self._transport = transport = transport_of(place, [s.replicas for s in work.stages])
        self._synchroniser = Synchroniser(
            self._ownership,
            place,
            work,
            transport,
            overlaps=overlap,
            shares_updates=shards,
            keepers=share.keepers if share is not None and work.shard_gradients else None,
            shared=shared,
        )
        self._shares: StageShares | None = None
        if shared and config is not None:
            self._shares = StageShares(
                session,
                self._ownership,
                work.stages,
                held_here,
                [slot.state_share_bytes or 0 for slot in config.workers],
                self._synchroniser.group_of,
                work.recomputes,
            )
        self._following: dict[Operation, Operation | None] = {}  # of a step's passes, the next
        self._updates: ShardedUpdates | None = None  # of a sharded optimizer
        if shards and optimizer is not None and share is not None:
            self._updates = ShardedUpdates(
                optimizer, self._ownership, share.keepers, place.rank, self._synchroniser.group_of
            )
        self._executor = Executor(
            group, transport, Routes(place.rank, groups), tensor, place.device, holdings
        )
        self._model = SpreadModel(model, None if parts[0].arguments == (CALL,) else check_call)
        is_part = bool(shared or shards or len(own - self._ownership.cut) < len(named))
        self._saving = refuse_saving(
            model,
            session.optimizers,
            lacks=self._lacks,
            is_part=lambda _: is_part,
            is_finished=lambda: session.is_finished,
        )
        self._microbatches: StepMicrobatches | None = None  # of the step in progress
        self._seeds: dict[tuple[int, int], int] = {}  # of a step that flushes, by pass
        self._last_stages: dict[int, int] = {}  # likewise, of this worker's, by microbatch
        self._evaluation: StageEvaluation | None = None  # made when it is first asked for
        # If the schedule does not flush, stages read weight versions, never the parameters.
        # Those of other stages refuse to be read.
        of_versions = {} if self.flushes else self._ownership.parameters
        self._strangers = {id(parameter): name for name, parameter in of_versions.items()}
        self.state = StageState(
            session,
            work,
            self.buffers,
            self._ownership,
            share,
            self._synchroniser,
            tensor,
            self._shares,
        )
        self._unflushed: Unflushed | None = None
        if not self.flushes and optimizer is not None:
            self._unflushed = Unflushed(
                work, self._stages, self._executor, self._synchroniser, optimizer
            )

    def _lacks(self, module: nn.Module) -> bool:
        """Whether this worker now lacks numbers of a module, or of one within it."""
        if any(isinstance(buffer, Elsewhere) for buffer in module.buffers()):
            return True
        if self._shares is not None and not self._shares.is_readable:
            shared = self._shares.places()
            if any(id(parameter) in shared for parameter in module.parameters()):
                return True
        return not self._ownership.is_readable_in(module)

    def _parts(
        self, *, evaluates: bool = False
    ) -> tuple[list[StageModule], Callable[[Mapping[str, Any]], None]]:
        """The model's stages and a check of its calls; parameters return to their places after."""
        session, work = self._session, self._work
        # One stage needs no graph, so its model need not be traceable.
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
            if self._shares is not None and name in self._shares.all_names:
                continue
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
        self._check_rounds(batch.num_samples)
        scaling = LossScaling(step.scaler, self._ownership, self._synchroniser)
        session.clock.begin_step(is_full=batch.is_full)
        self.buffers.begin_step()
        self._synchroniser.wants_stop = session.wants_stop
        self._microbatches = StepMicrobatches(step, scaling, self._strangers)
        try:
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
        self._synchroniser.settings_number = step.agreement.settings_number
        self._synchroniser.expect(schedule.ranks[self._position])
        if self._shares is not None:
            ways = [op for op in schedule.ranks[self._position] if op.kind in PASSES]
            self._shares.begin(ways[0])
            self._following = dict(zip(ways, [*ways[1:], None], strict=True))
        # All at once: between two passes this code is no longer in the caches.
        passes = [op for op in schedule.ranks[self._position] if op.kind is Kind.FORWARD]
        self._seeds = {
            (op.microbatch, op.stage): self._seed_of(op.microbatch, op.stage) for op in passes
        }
        self._last_stages = {op.microbatch: op.stage for op in passes}
        self._executor.begin(schedule)
        self._executor.run(self)
        if self._shares is not None:
            self._shares.finish()
        self._session.clock.computed()
        loss = self._synchroniser.finish()
        scaling.share_overflow()
        return loss

    def _seed_of(self, virtual_node: int, stage: int) -> int:
        session = self._session
        return key_of(session.seed, "pass", session.num_steps, virtual_node, "stage", stage)

    @property
    def settings_differ(self) -> bool:
        """See ``StepEngine``: where the schedule does not flush, the updates are made already."""
        return self.flushes and self._synchroniser.settings_differ

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
            self._check_rounds(last_batch_samples)
            try:  # refuses a short last batch when the epoch begins, not when it ends
                schedule_of(self._work, last_batch_samples)
            except ProblemError as error:
                raise TargetError(
                    f"the last batch of an epoch has {last_batch_samples} samples for "
                    f"{self._work.num_microbatches} microbatches, and {error.message}",
                    hint="give the DataLoader drop_last=True",
                ) from None

    def _check_rounds(self, num_samples: int) -> None:
        """Refuse a batch that gives replicas that share weights unlike numbers of microbatches."""
        num_replicas = len(self._work.stages[0].replicas)
        if (
            self._shares is not None
            and num_samples % num_replicas
            and (num_samples < self._work.num_microbatches)
        ):
            raise TargetError(
                f"a batch of {num_samples} samples gives {num_replicas} replicas, which share "
                "weights, unequal numbers of microbatches",
                hint="give the DataLoader drop_last=True",
            )

    # Called by the executor

    def _passing(self, operation: Operation) -> AbstractContextManager[None]:
        if self._shares is None:
            return nullcontext()
        return self._shares.passing(operation, self._following[operation])

    def forward(self, operation: Operation, received: Message) -> tuple[Any, ...]:
        """Run this worker's stage inside the script's function; see ``StagePasses``."""
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

        entered = session.clock.mark()
        with held(self._work.stages[number].held_seconds(operation.kind)), self._passing(operation):
            # An emulated device does not wait for samples, as a real one finds them prefetched.
            item, inputs = batch.input_of(microbatch - (late.offset if late else 0))
            began = session.clock.mark()
            self.buffers.load(item.virtual_node)
            place = (item.virtual_node, number)
            seed_streams_by(self._seeds.get(place) or self._seed_of(*place))
            loss = self._model.call(batch.step.function, run, inputs)
            if is_last:
                batch.look_at(loss)
                batch.test(item, made[0], loss, self._model.evaluating)
                scaled = self._synchroniser.add(loss, item.num_samples, scales=self.flushes)
                if scaled is None and self._shares is not None:
                    scaled = self._nothing_of(made[0])
                results = () if scaled is None else (batch.scaling.scale(scaled),)
            else:
                results = made[0]
            stage.keep(microbatch, results)
            self.buffers.save(item.virtual_node)
        if self._last_stages.get(item.virtual_node) == number or len(self._stages) == 1:
            batch.forget(item.virtual_node)
        if late is not None:
            late.passed(operation)
        session.clock.end_pass(began, num_samples=item.num_samples, is_full=item.is_full)
        session.clock.end_stage_pass(number, entered, is_backward=False)
        return tuple(results)

    def _nothing_of(self, answer: Any) -> Tensor | None:
        """Of a microbatch of weight 0, a loss that is 0; None where no stage runs again for it."""
        # Stages that are recomputed gather their layers once more, and replicas meet in that. So
        # such a microbatch goes back too, with gradients of 0.
        work, tensors = self._work, [t for t in tensors_in(answer) if t.requires_grad]
        if not tensors or not any(work.recomputes(number) for number in range(len(work.stages))):
            return None
        nothing: Tensor = sum((t.sum() * 0 for t in tensors[1:]), tensors[0].sum() * 0)
        return nothing

    def backward_pass(self, operation: Operation, gradients: Any) -> tuple[Any, ...]:
        """Run a backward pass, or half of one; see ``StagePasses``."""
        number, kind, late = operation.stage, operation.kind, self._unflushed
        stage, work = self._stages[number], self._work.stages[number]
        sums = self._synchroniser.replica_sums
        made: tuple[Any, ...] = ()
        began = self._session.clock.mark()
        sums.enter(operation, is_stretched=work.backward_seconds is not None)
        with held(work.held_seconds(kind)), self._passing(operation):
            if late is not None and kind is Kind.BACKWARD:
                late.lend(operation)
            if kind is Kind.BACKWARD_WEIGHT:
                stage.backward_weight(operation.microbatch)
            elif kind is Kind.BACKWARD_INPUT:
                made = stage.backward_input(operation.microbatch, gradients)
            else:
                made = stage.backward(operation.microbatch, gradients)
        if late is not None and kind is Kind.BACKWARD:
            late.collect(operation)
            late.passed(operation)
        sums.leave()
        self._session.clock.end_stage_pass(operation.stage, began, is_backward=True)
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
                found = ownership.values_of(name)
                if self._shares is None or name not in self._shares.names:
                    return found
                return found._replace(pieces=self._shares.around(name, found.pieces))
            if name in buffers.all():
                return buffers.values_of(name)
            return InPieces(name, final[name].dtype, tuple(final[name].shape), [final[name]])

        return digest_of_pieces(values_of(name) for name in sorted(final))

    def gather(self) -> None:
        """Bring the tensors of all stages to every worker. Call it on all workers."""
        if self._shares is not None:
            self._shares.make_whole()
        self._ownership.gather()
        self.buffers.gather(self._ownership.device_of_whole)

    def _strip(self) -> None:
        self._ownership.strip()
        if self._shares is not None:
            self._shares.keep_own()
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
        if self._shares is not None:  # replicas answer other calls each, so they meet in none
            self._shares.make_whole()
        with ExitStack() as stack:
            for name, module in self._session.model.named_modules():
                if self._ownership.lacks_some_of(module):
                    stack.enter_context(refusing_calls(module, name))
            stack.enter_context(self._model.evaluating(self._evaluation.call))
            yield
            self._evaluation.serve()
        self._strip()

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

    def check_predicts(self) -> bool:
        """Refuse ``job.predict``: no worker of a pipeline runs a whole pass."""
        raise TargetError(
            "job.predict is for split plans",
            hint="call the model inside job.evaluation(): each call runs on all stages",
        )

    def close(self) -> None:
        """End the engine; the model belongs to the script again, if all of it is here."""
        self._synchroniser.replica_sums.close()
        is_whole = self._ownership.is_whole and self.buffers.is_readable
        if self._shares is not None:
            self._shares.close()
            is_whole &= self._shares.is_readable
        if not is_whole:
            return
        for hook in self._saving:
            hook.remove()
        self._model.release()
        self._sharded.remove()
        if self._ownership.device_of_whole != self._session.device:
            move_buffers(self._session.model, self._ownership.device_of_whole)

"""Turn the process of a script into one worker of a launch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..devices.backend import backend_of
from ..devices.torch_support import check_torch
from ..schema.errors import TargetError
from ..schema.launch import LaunchConfig
from ..schema.options import option
from .agreement.agreement import (
    Agreement,
    CompareSchedule,
    KnownParameters,
    OtherOptimizers,
    WorkerComparison,
)
from .buffers import put_back
from .checkpoints.restoring import Progress
from .checkpoints.saving import Checkpoints
from .determinism import apply_level, check_level, streams_kept
from .elastic.member import Member
from .engine import Runner, StepEngine
from .epoch import Epochs
from .finish import at_exit, report_when_asked, say_errors_in_one_line
from .group import Place, join
from .initial_values import settle
from .job import Alone, Job
from .log import log, speak
from .promise.promise import Promise
from .protocol.environment import read_environment
from .protocol.lower import check_pipeline_level
from .repeated_layers import agreed_blocks, listed_blocks
from .session import Session
from .setup import (
    Given,
    beyond_masters,
    broadcast_buffers,
    broadcast_state,
    check_batch_norms,
    check_model,
    keep_freed_memory,
    keeps_masters,
    named_parameters,
    optimizers_of,
    place_model,
    warning_of,
)
from .sharding.precision import AS_IS, Precision, precision_of
from .split_engine import SplitEngine


def prepare(
    model: nn.Module,
    optimizer: Given = None,
    *others: object,
    seed: int | None = None,
    device: torch.device | str | None = None,
    overlap: bool = True,
    blocks: Any = (),
    masters: torch.dtype | None = None,
    mp_policy: Any = None,
) -> Job:
    """Join the launch that this process belongs to, and prepare the model for it.

    Under plain ``python`` the job is one worker with one virtual node that holds the whole batch.
    The model and the optimizers' state are moved to ``job.device``; under a pipeline, only those
    of this worker's stages. Where several workers run, every parameter and buffer starts with the
    first worker's value. The model itself is not wrapped: call it, save it and evaluate it as
    before.

    Args:
        model: The model to train; not wrapped in DistributedDataParallel. It may be built without
            memory for its parameters (``deferred``).
        optimizer: Its optimizer, or a list of all optimizers that train it; parameters that they
            hold beside the model's are trained as well.
        others: None is taken; what other libraries take here gets an error that says its place.
        seed: Seed of the job's random streams; by default the launch's (0 under plain python).
        device: Where to run. By default the plan's device; under plain python the model's, or the
            first accelerator if the model is still on the CPU.
        overlap: Whether the last backward of a step overlaps with gradient synchronisation.
        blocks: What is gathered together where workers share states: modules, classes of modules,
            names of either, or a wrap policy of ``torch.distributed.fsdp``. Empty: repeated layers.
        masters: The type in which the weights are kept that the optimizer updates, and its state,
            where the model's have fewer bits: ``torch.float32`` for a model in bfloat16. It needs a
            plan whose workers share states, or one worker.
        mp_policy: A ``MixedPrecisionPolicy`` of ``torch.distributed.fsdp``: the model's weights are
            masters, and are gathered and run in its ``param_dtype``. It needs what masters need.

    Raises:
        TargetError: A model or optimizer that hetflow cannot train correctly, or an environment
            that does not fit the plan.
        HetflowError: This torch is older than hetflow supports.

    Example:
        >>> import hetflow, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> job = hetflow.prepare(model, optimizer)
        >>> data = torch.utils.data.TensorDataset(torch.ones(4, 2))
        >>> for batch in job.batches(torch.utils.data.DataLoader(data, batch_size=2)):
        ...     loss = job.backward(lambda x: model(x).mean(), batch)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    speak()
    say_errors_in_one_line()
    if others:
        raise TargetError(
            f"hf.prepare takes a model and its optimizers, got also a {type(others[0]).__name__}",
            hint="give a loader to job.batches(loader), a scheduler to job.register(scheduler), "
            "and several optimizers as a list",
        )
    check_torch(torch.__version__)
    check_model(model)
    if seed is not None and not hasattr(seed, "__index__"):
        raise TargetError(f"hf.prepare: the seed must be a whole number, got {seed!r}")
    optimizers = optimizers_of(optimizer)
    settle(model, optimizers)  # first: a deferred model's tensors have no values until then
    # What this worker can refuse by itself comes before ``join``: behind it others wait for it.
    listed = listed_blocks(model, blocks)
    start = read_environment()
    precision = _precision_of(masters, mp_policy, start.config)
    check_batch_norms(model, start.config, start.determinism)
    counted = start.config.optimizer if start.config else None
    masters_kept = keeps_masters(model, precision, start.config)
    warning = warning_of(optimizers, counted, masters=masters_kept)
    warning = warning or beyond_masters(model, precision, start.config)
    place = join(start, place_model(model, start.config, device, start.local_rank))
    if backend_of(place.device).is_host:
        keep_freed_memory()
    check_level(model, start.determinism, place)
    apply_level(start.determinism)
    if start.config is not None and start.config.pipeline is not None:
        check_pipeline_level(start.determinism)
    if warning is not None and place.rank == 0:
        log.info(warning)
    job = assemble(
        model,
        optimizers,
        place,
        seed=start.seed if seed is None else seed,
        watch=CompareSchedule(start.compare_every),
        overlap=overlap,
        blocks=_blocks_of(model, listed, place),
        precision=precision,
    )
    at_exit(job)
    return job


def _precision_of(masters: Any, policy: Any, config: LaunchConfig | None) -> Precision:
    """The types that a script asks for; refuse masters that nobody keeps."""
    if masters is not None and policy is not None:
        raise TargetError(
            "hf.prepare: masters and mp_policy both say in which type weights are kept",
            hint="give mp_policy alone for a float32 model, masters alone for a 16-bit one",
        )
    precision = precision_of(policy, masters=masters)
    is_kept = config is None or (config.shard is not None and config.pipeline is None)
    if precision == AS_IS or is_kept or config is None:
        return precision
    if config.pipeline is not None or config.world_size > 1:
        asked = "masters are" if policy is None else "weights that run as an mp_policy says are"
        raise TargetError(
            f"hf.prepare: {asked} kept by workers of a split that share states, and those of "
            "this plan do not",
            hint=f"solve a split with {option('shard', 'optimizer')}",
        )
    return precision


def _blocks_of(model: nn.Module, listed: Sequence[str], place: Place) -> Sequence[str]:
    """The blocks of shared states: the plan's, or those that the script lists."""
    config, speaks = place.start.config, place.rank == 0
    if config is None or config.shard is None:
        return listed
    if config.pipeline is None:
        return agreed_blocks(model, listed, config.blocks or (), speaks=speaks)
    if listed and speaks:
        log.warning("blocks are of splits, and are not read: stages share their repeated layers")
    return ()


def assemble(
    model: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    place: Place,
    *,
    seed: int,
    watch: CompareSchedule,
    overlap: bool = True,
    tests: bool = True,
    blocks: Sequence[str] = (),
    precision: Precision = AS_IS,
) -> Job:
    """Build the job of one worker from its parts: for a split plan, or for a pipeline.

    The job resumes from the newest checkpoint, if there is one. Call it on all workers.

    Raises:
        TargetError: The plan is a pipeline and there are several optimizers; or as ``prepare``.
    """
    start = place.start
    work = start.config.pipeline if start.config is not None else None
    if work is not None and len(optimizers) > 1:
        raise TargetError(
            f"a pipeline takes one optimizer, not {len(optimizers)}",
            hint="make one with a group of parameters for each of them",
        )
    session = Session(
        model, optimizers, place, seed=seed, watch=watch, blocks=blocks, precision=precision
    )
    epochs = Epochs(session)
    engine: StepEngine
    runner: Runner
    if work is not None:
        from .pipeline.engine import PipelineEngine

        engine = PipelineEngine(session, work, overlap=overlap)
        progress = Progress(session, engine.state, engine.buffers)
        runner = Alone(engine)
    else:
        # Shared weights begin as the first worker's when their vectors are made (``Flat``).
        if start.config is not None and start.config.shard is not None:
            broadcast_buffers(model, place)
        else:
            broadcast_state(model, session.optimizers, session.parameters, place)
        engine = SplitEngine(session, overlap=overlap)
        progress = Progress(session, engine.state, engine.buffers)
        control = place.control
        runner = Alone(engine)
        # Under hetflow's own controller workers change; those of a script's second job never do.
        if control is not None and control.changes and control.num_jobs < 2:
            runner = Member(session, engine, epochs, progress, control)
            if engine.shared_states is not None:
                engine.shared_states.run = runner.run
                engine.shared_states.is_behind = lambda: runner.is_behind
    agreement = _agreement_of(session, engine, runner)
    report_when_asked(session)
    try:
        checkpoints = Checkpoints(session, engine, progress, runner, agreement)
    except BaseException:
        # Else it goes on watching optimizers, and mistakes later parameters for this job's.
        engine.close()
        agreement.close()
        raise
    together = engine.shared_states if isinstance(engine, SplitEngine) else None
    fills = not backend_of(session.device).is_host and any(
        slot.memory_bytes for slot in (start.config.workers if start.config else ())
    )
    promise = Promise(model, session.batch_sizes, together, fits_passes=fills) if tests else None
    return Job(session, engine, epochs, progress, runner, agreement, checkpoints, promise)


def _agreement_of(session: Session, engine: StepEngine, runner: Runner) -> Agreement:
    def together(function: Callable[[], Any]) -> Any:
        def wait() -> Any:
            with runner.waiting():
                return function()

        return runner.run(wait)

    start, optimizers = session.place.start, session.optimizers
    is_launched = start.config is not None
    has_folder = start.checkpoint_folder is not None or start.handover_folder is not None
    is_saved = has_folder or runner.changes
    known = KnownParameters(
        session.model, optimizers, session.parameters, keeps_groups=engine.keeps_groups
    )
    others = OtherOptimizers(
        optimizers,
        known.names,
        matters=is_launched or is_saved,
        follow_steps=is_launched and engine.flushes,
        is_launched=is_launched,
    )
    comparison = WorkerComparison(
        known,
        optimizers,
        shared=engine.shared,
        place=lambda: session.place,
        watch=session.watch,
        together=together,
    )
    return Agreement(
        known,
        optimizers,
        others,
        comparison,
        session.watch,
        is_launched=is_launched,
        is_saved=is_saved,
        compares_between_steps=engine.flushes,
    )


# A job without lasting effects, in which a profiler trains a few steps; several may follow.
#
# It is the job that ``prepare`` makes, under a launch config of the profiler; the loop over it is
# the script's. Lasting effects are left out or undone: the process's exit is not hooked, nothing is
# saved, no workers are compared, and afterwards the model has its own tensors and the optimizer its
# own parameters again. The values stay trained.


@contextmanager
def rehearsed(
    model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], place: Place
) -> Iterator[Job]:
    """Make a job for the body of a ``with`` statement.

    Args:
        model: Gets its own parameters and buffers back. Under a pipeline, parameters of other
            workers' stages have their earlier values.
        optimizers: Get their own groups back.
        place: This worker among the others. Workers of one job enter and leave together, and
            close the process group themselves.

    Raises:
        TargetError: As ``prepare``.
    """
    config = place.start.config
    with streams_kept(), _tensors_kept(model, optimizers):
        job = assemble(
            model,
            optimizers,
            place,
            seed=config.seed if config is not None else 0,
            watch=CompareSchedule(every=0, watches_first=False),
            tests=False,
        )
        try:
            yield job
        finally:
            job.abandon()


@contextmanager
def _tensors_kept(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    parameters = list(named_parameters(model, optimizers).values())
    data = [(type(parameter), parameter.data) for parameter in parameters]
    buffers = [(m, name, value) for m in model.modules() for name, value in m._buffers.items()]
    own = [_OptimizerParts(optimizer) for optimizer in optimizers]
    forward = model.__dict__.get("forward")
    try:
        yield
    finally:
        for parameter, (kind, tensor) in zip(parameters, data, strict=True):
            parameter.__class__ = kind  # a pipeline makes stand-ins of other stages' parameters
            parameter.grad, parameter.data = None, tensor
        put_back(buffers)
        for parts in own:
            parts.put_back()
        model.__dict__.pop("forward", None)
        if forward is not None:
            model.forward = forward


class _OptimizerParts:
    """What a pipeline removes from an optimizer, which keeps one worker's parameters only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = [dict(group) for group in optimizer.param_groups]
        self._state = dict(optimizer.state)
        self._step = optimizer.__dict__.get("step")

    def put_back(self) -> None:
        optimizer = self._optimizer
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        for parameter, state in self._state.items():
            optimizer.state.setdefault(parameter, state)
        optimizer.__dict__.pop("step", None)
        if self._step is not None:
            optimizer.__dict__["step"] = self._step

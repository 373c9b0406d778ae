"""How a script becomes one worker of a launch."""

import torch
from torch import nn

from ..devices.backend import backend_of
from ..devices.torch_version import check_torch
from ..protocol.environment import read_environment
from ..protocol.lower import check_pipeline_level
from .allocator import keep_freed_memory
from .determinism import apply_level, check_level
from .group import Place, join
from .job import Job
from .optimizer_state import warning_of
from .optimizers import Given, optimizers_of
from .saving import say
from .setup import check_model, place_model
from .telling import speak


def prepare(
    model: nn.Module,
    optimizer: Given = None,
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
    overlap: bool = True,
) -> Job:
    """Join the launch this process belongs to, and get the model ready for it.

    Under plain ``python`` the job is one worker with one virtual node that holds the whole batch.
    The model (and the optimizer's state) is moved to ``job.device``; where several workers run,
    every parameter and buffer starts with the first worker's value. The model itself is not
    wrapped: call it, save it and evaluate it as before.

    Args:
        model: The model to train; not wrapped in DistributedDataParallel.
        optimizer: Its optimizer, or a list of all that train it; parameters that they hold beside
            the model's are trained as well.
        seed: Seed of the job's random streams; by default the launch's (0 under plain python).
        device: Where to run; by default what the plan says, else the model's device, or the
            first accelerator where the model still stands on the CPU.
        overlap: Whether the last backward of a step overlaps with gradient synchronisation.

    Raises:
        TargetError: A model or optimizer that hetflow cannot train correctly, or an environment
            that does not fit the plan.
        HetflowError: This torch is too old.

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
    check_torch(torch.__version__)
    check_model(model)
    optimizers = optimizers_of(optimizer)
    start = read_environment()
    warning = warning_of(optimizers, start.config.optimizer if start.config else None)
    place = join(start, place_model(model, start.config, device))
    if backend_of(place.device).is_host:
        keep_freed_memory()
    check_level(model, start.determinism, place)
    apply_level(start.determinism)
    seed = start.seed if seed is None else seed
    if start.config is not None and start.config.pipeline is not None:
        check_pipeline_level(start.determinism)
    job = job_of(model, optimizers, place, seed=seed, overlap=overlap)
    if warning is not None:
        say(job, warning)
    job._go_on()
    return job


def job_of(
    model: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    place: Place,
    *,
    seed: int,
    overlap: bool = True,
) -> Job:
    """The job of one worker: of a split, or of a pipeline where its config is one."""
    config = place.start.config
    if config is None or config.pipeline is None:
        return Job(model, optimizers, place, seed=seed, overlap=overlap)
    from .pipeline.job import PipelineJob

    return PipelineJob(model, optimizers, place, config.pipeline, seed=seed)

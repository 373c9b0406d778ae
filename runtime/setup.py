"""Prepare model and optimizers: refuse what cannot train, place it, name parameters, equalise."""

import ctypes
import hashlib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from ..devices.backend import backend_of
from ..devices.local import first_device, numbered
from ..schema.errors import TargetError
from ..schema.launch import Determinism, LaunchConfig
from ..schema.optimizer import OptimizerState
from ..schema.options import option
from . import peers
from .determinism import is_invariant
from .group import Place, gathered
from .initial_values import fill
from .log import log
from .sharding.precision import Precision
from .unplanned import on_trial


def check_model(model: nn.Module) -> None:
    """Refuse what would train wrongly under virtual nodes.

    Raises:
        TargetError: Not a module, a wrapped model, or one that synchronises workers by itself.
    """
    if not isinstance(model, nn.Module):
        raise TargetError(f"hf.prepare needs a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TargetError(
            f"the model is wrapped in {type(model).__name__}, and hetflow synchronises by itself",
            hint="pass the bare model",
        )
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            _refuse_shards(f"{name or 'the model'} is wrapped in FSDP")
        # make_graphed_callables replaces the module's own ``forward``.
        if "make_graphed_callables" in getattr(vars(module).get("forward"), "__qualname__", ""):
            raise TargetError(
                f"{name or 'the model'} is captured in graphs of kernels, which know neither "
                f"virtual nodes' buffers nor where gradients are added up",
                hint="pass it without make_graphed_callables",
            )
    # FSDP2 and tensor parallelism: such a tensor is known by its methods in every torch release.
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local") and hasattr(parameter, "placements"):
            _refuse_shards(f"{name} is a DTensor, as fully_shard (FSDP2) makes them")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise TargetError(
            "the model has lazy parameters without a shape", hint="run one forward pass first"
        )


def check_batch_norms(
    model: nn.Module, config: LaunchConfig | None, determinism: Determinism
) -> None:
    """Refuse SyncBatchNorm where its statistics cannot be those of the global batch.

    Raises:
        TargetError: Under a pipeline, and at the levels of determinism that hold over mappings.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm):
            continue
        if config is not None and config.pipeline is not None:
            raise TargetError(
                f"{name} is a SyncBatchNorm, and a stage never sees a whole batch",
                hint="use BatchNorm; its batch is the microbatch",
            )
        if is_invariant(determinism):
            raise TargetError(
                f"{name} is a SyncBatchNorm, whose sums follow the workers, so determinism "
                f"{determinism} cannot hold",
                hint="use BatchNorm; its batch is the virtual node's",
            )


def _refuse_shards(said: str) -> None:
    raise TargetError(
        f"{said}, but hetflow keeps whole parameters",
        hint="pass the bare model; under a pipeline plan each device holds its stages alone",
    )


def place_model(
    model: nn.Module, config: LaunchConfig | None, asked: torch.device | str | None, local_rank: int
) -> torch.device | None:
    """The device that a script chose: by argument, or under plain python by the model's device."""
    if asked is not None:
        try:
            found = torch.device(asked)
        except (RuntimeError, TypeError):
            raise TargetError(
                f"hf.prepare: torch knows no device {asked!r}",
                hint="give a torch.device, or leave it out",
            ) from None
        return numbered(found, None if config is None else local_rank)
    if config is not None:
        return None
    first = next(model.parameters(), None)
    if first is not None and not backend_of(first.device).is_host:
        return first.device
    return first_device()


def named_parameters(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, nn.Parameter]:
    """Every parameter to synchronise, once: the model's, then others that the optimizers hold."""
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for number, optimizer in enumerate(optimizers):
        holder = "optimizer" if len(optimizers) == 1 else f"optimizers[{number}]"
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    named[f"{holder}.param_groups[{group_index}][{index}]"] = parameter
    return named


def state_dict_names(model: nn.Module) -> dict[str, Any]:
    """How a model's ``state_dict`` differs in names from a checkpoint, which has a tensor once.

    Returns:
        ``tied``: a further name -> the first one of its parameter or buffer. ``unsaved``: names of
        the buffers that a state dict leaves out.
    """
    first = dict[int, str]()
    tied, unsaved = dict[str, str](), list[str]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            known = first.setdefault(id(value), name)
            if key in module._non_persistent_buffers_set:
                unsaved.append(name)
            elif known != name:
                tied[name] = known
    return {"tied": tied, "unsaved": unsaved}


def broadcast_state(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: dict[str, nn.Parameter],
    place: Place,
) -> None:
    """Move everything to the device, and start all workers from the first worker's values.

    Raises:
        TargetError: The workers built different models.
    """
    computes = place.rank == 0 or place.is_outside
    for parameter in parameters.values():
        fill(parameter, place.device, computes=computes)
    model.to(place.device)
    for parameter in parameters.values():
        parameter.data = parameter.data.to(place.device)
    for optimizer in optimizers:
        move_optimizer_state(optimizer, optimizer.state)
    # A joining worker gets the others' values when it joins: now they are between two steps, and
    # would not meet it in a collective.
    if not place.distributed or place.is_outside:
        return
    named = {**parameters, **dict(model.named_buffers())}
    check_same_shapes(named, place)
    for tensor in named.values():
        _broadcast(tensor.detach())


def broadcast_buffers(model: nn.Module, place: Place) -> None:
    """Move a model's buffers to the device, and start all workers from the first worker's."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved = buffer.to(place.device)
                if place.distributed and not place.is_outside:
                    _broadcast(moved.detach())


def _broadcast(tensor: Tensor) -> None:
    dense = tensor.contiguous()  # collectives take no other memory; values go back below
    peers.broadcast(dense, src=0)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def move_optimizer_state(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Move a restored optimizer's state of these parameters to the parameters' devices."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.device != parameter.device:
                state[key] = value.to(parameter.device)


def check_same_shapes(named: dict[str, Tensor], place: Place) -> None:
    """Check that all workers built the same tensors; call it on all of them."""
    text = "".join(f"{name}\0{t.dtype}\0{tuple(t.shape)}\n" for name, t in named.items())
    digest = hashlib.sha256(text.encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    # Not through the store: a script may check several models, and a key holds the one before.
    if not torch.equal(gathered(own, place=place)[0], own):
        raise TargetError(
            f"worker {place.rank} built another model than worker 0 (names, types or shapes)",
            hint="build the same model on every worker; hetflow equalises the values, not shapes",
        )


def final_tensors(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """All trained tensors of a run, by name; its digest is computed from them."""
    return dict(chain(parameters.items(), model.named_buffers()))


# Keep freed host memory in the process, so that the time of a pass does not depend on the past.
#
# glibc returns large blocks to the kernel as soon as they are free. What counts as large depends on
# the sizes it has seen. A pass on a CPU frees all its activations, so the next pass may fault every
# page in again: thousands of page faults a pass or none, depending on earlier allocations. When
# freed memory is kept, a ResNet-18 pass takes a fifth less time, and profiles and launches measure
# the same time. The price is fragmentation: where few large blocks are most of what a pass needs,
# as in a pipeline of wide linear layers, the peak grows over the first steps
# (docs/benchmarks/predictions.md).

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_NEVER = 2**31 - 1
_STATED = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)


def keep_freed_memory() -> bool:
    """Make malloc reuse freed memory instead of returning it to the kernel.

    Returns:
        Whether the options were set. False where the C library has no such options, and where
        the environment sets them itself (``MALLOC_..._``, ``GLIBC_TUNABLES``).
    """
    if any(name in os.environ for name in _STATED) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))


# One optimizer or several: the forms that ``prepare`` takes, and how their state is saved.


Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
_NEEDED = ("param_groups", "state", "state_dict", "load_state_dict")


def optimizers_of(given: Given) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that a script gave to ``prepare``, as a tuple in order.

    Raises:
        TargetError: An object is no optimizer, an optimizer is given twice, or it needs sparse
            gradients.
    """
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for entry in several:
        absent = [name for name in _NEEDED if not hasattr(entry, name)]
        if absent:
            raise TargetError(
                f"hf.prepare needs an optimizer, got {type(entry).__name__}, which has no "
                f"{absent[0]}",
                hint="give the torch.optim optimizer, or a list of all that train the model",
            )
        if isinstance(entry, torch.optim.SparseAdam):
            raise TargetError(
                "SparseAdam updates only rows with a gradient, and hetflow sums whole gradients, "
                "which do not say what rows those are",
                hint="use Adam; or SGD or Adagrad, which leave rows without a gradient as they are",
            )
    if len({id(entry) for entry in several}) < len(several):
        raise TargetError("hf.prepare was given the same optimizer twice")
    return tuple(several)


_AT_WORK: set[int] = set()  # ids of optimizers whose state the runtime itself asks for


def state_of(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """The optimizers' state for a checkpoint: None for none, a state for one, else a list."""
    _AT_WORK.update(map(id, optimizers))
    try:
        states = [optimizer.state_dict() for optimizer in optimizers]
    finally:
        _AT_WORK.difference_update(map(id, optimizers))
    return states if len(states) > 1 else states[0] if states else None


def refuse_saving(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    lacks: Callable[[nn.Module], bool],
    is_part: Callable[[torch.optim.Optimizer], bool],
    is_finished: Callable[[], bool],
) -> list[RemovableHandle]:
    """Let a script read no ``state_dict`` of a part: a file of it would lack what others have.

    A model is whole after ``job.sync_buffers()``. An optimizer never is; after the job a script is
    warned, as it may save its model in the same call. A copy of the model is its owner's.

    ``lacks`` says whether this worker now lacks numbers of a module, or of one within it, and
    ``is_part`` whether it has a part of an optimizer's state only. The hooks on modules are
    returned.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def of_module(module: nn.Module, *_: object) -> None:
        if id(module) in names and lacks(module):
            name = ".".join(filter(None, ("model", names[id(module)])))
            raise TargetError(
                f"{name}.state_dict() is read between steps, where this worker has only a part "
                "of its parameters or buffers",
                hint="call job.sync_buffers() on all workers before, or job.checkpoint()",
            )

    def of_optimizer(optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in _AT_WORK or not is_part(optimizer):
            return
        said = "optimizer.state_dict() has this worker's share of the states only"
        hint = f"{option('checkpoint')} and job.checkpoint() save it whole"
        if not is_finished():
            raise TargetError(said, hint=hint)
        log.warning(f"{said}; {hint}")

    for optimizer in optimizers:
        optimizer.register_state_dict_pre_hook(of_optimizer)
    return [
        module.register_state_dict_pre_hook(of_module)  # type: ignore[no-untyped-call]
        for module in model.modules()
    ]


def skip_overflow(optimizer: torch.optim.Optimizer) -> bool:
    """Take an optimizer's gradients away where one is not finite; waits for the device.

    Returns:
        Whether one was not: its step then changes nothing.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None and p.numel()]
    norms = torch._foreach_norm(gradients, math.inf) if gradients else ()
    if not norms or torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all():
        return False
    optimizer.zero_grad(set_to_none=True)
    return True


# Warn before the first step where an optimizer keeps more state than the plan counted.

# These treat each number by itself, so a step on a few numbers shows what they keep for all.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Optimizers that are known to treat each number by itself."""
_HOW = ("foreach", "fused", "capturable", "differentiable")
_NUMBERS = 8
_TOLERANCE = 0.01


def keeps_masters(model: nn.Module, precision: Precision, config: LaunchConfig | None) -> bool:
    """Whether weights are kept in more bits than those of the profile that a plan is made of."""
    if precision.running is None or config is None or config.shard is None:
        return precision.masters is not None
    kept, running = (
        sum(p.numel() * kind(p).itemsize for p in model.parameters())
        for kind in (precision.kept_type, precision.running_type)
    )
    # Of a profile in the kept type weights that are whole all the time count shares among them.
    counted = sum(slot.state_share_bytes or 0 for slot in config.workers)
    return kept > running and (config.shard != "all" or kept > counted * (1 + _TOLERANCE))


def beyond_masters(
    model: nn.Module, precision: Precision, config: LaunchConfig | None
) -> str | None:
    """The warning for what a plan that counts masters does not count of a policy; None: nothing."""
    if config is None or config.optimizer is None or not config.optimizer.masters:
        return None
    more = 0
    for p in model.parameters():
        running = precision.running_type(p).itemsize
        if not p.requires_grad:  # of each worker's share, at most
            more += p.numel() * (precision.kept_type(p).itemsize - running)
        elif config.shard == "optimizer":
            more += p.numel() * max(0, precision.summed_type(p).itemsize - running)
    if more <= 0:
        return None
    return (
        f"warning: by its mp_policy a device may take up to {more / 2**20:.4g} MiB that the plan's "
        "memory does not count: frozen weights that are kept in more bits than they run in, or "
        "whole gradients in reduce_dtype; freeze 16-bit weights, or solve with "
        f"{option('shard', 'gradients')}"
    )


def warning_of(
    optimizers: Sequence[optim.Optimizer], counted: OptimizerState | None, *, masters: bool = False
) -> str | None:
    """The warning for a user whose optimizers keep more state than the plan counted.

    ``counted`` is what the plan counts; for ``masters`` see ``keeps_masters``.

    Returns:
        The warning; None where the optimizers keep no more, or where that cannot be known before a
        step.
    """
    if not optimizers or counted is None:
        return None
    if masters and not counted.masters:
        return (
            "warning: the script keeps masters (weights of more bits than those that run), which "
            "the plan's memory does not count: a device may run out of memory; solve again with "
            f"{option('masters', True)}"
        )
    kept = state_ratio(optimizers)
    if kept is not None and masters:
        own = OptimizerState(state_bytes_per_weight_byte=kept)
        kept = own.with_masters().state_bytes_per_weight_byte
    if kept is None or kept <= counted.state_bytes_per_weight_byte + _TOLERANCE:
        return None
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    keep = "keep" if len(optimizers) > 1 else "keeps"
    return (
        f"warning: {names} {keep} {kept:.4g} bytes of state a byte of weights, the plan's memory "
        f"counts {counted}: a device may run out of memory; solve again with "
        f"{option('state_bytes_per_weight_byte', format(kept, '.4g'))}"
    )


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether it is known to treat each number by itself, so that a slice has a whole's update."""
    return type(optimizer) in ELEMENTWISE


def state_ratio(optimizers: Sequence[optim.Optimizer]) -> float | None:
    """Bytes of optimizer state per byte of weights, found by a step on a few numbers.

    Counters of a few bytes are left out.

    Returns:
        The ratio; None for optimizers that do not treat each number by itself, such as Adafactor,
        and for those that are not torch's own.
    """
    weights = kept = 0.0
    for optimizer in optimizers:
        if not is_elementwise(optimizer):
            return None
        for group in optimizer.param_groups:
            size = sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
            weights += size
            probe, trial = probe_of(type(optimizer), {**group, "lr": 0.0}, [_NUMBERS])
            with on_trial():
                probe.step()
            tensors = [value for value in probe.state[trial].values() if isinstance(value, Tensor)]
            kept += size * sum(t.nbytes for t in tensors if t.dim()) / trial.nbytes
    return kept / weights if weights else None


def probe_of(
    kind: type[optim.Optimizer], group: Mapping[str, Any], shape: Sequence[int]
) -> tuple[Any, nn.Parameter]:
    """An optimizer with a group's settings, of one parameter of zeros on the host; and that."""
    takes = inspect.signature(kind).parameters.keys() - {"params", *_HOW}
    trial = nn.Parameter(torch.zeros(tuple(shape)))
    trial.grad = torch.zeros_like(trial)
    return kind([trial], **{name: group[name] for name in group if name in takes}), trial

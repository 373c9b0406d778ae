"""Plain DistributedDataParallel under a plan, in scripts that torchrun starts as they are.

A DataLoader with a DistributedSampler has a batch size for each worker. All of them together are
the global batch, of which each worker takes the plan's share. Backward passes get the weight of the
share. accelerate and Trainer wrap their models by it too.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from ...devices.backend import backend_of
from ...schema.errors import TargetError
from ...schema.options import option
from ..buffers import NormCall, normalised
from ..group import gathered
from ..log import log
from ..sharding.precision import AS_IS, Precision, precision_of
from .losses import adapt as adapt_divisors
from .patching import around
from .training import ShareSampler, Training, begun, training

# Batch norm under a plan: the statistics of the whole global batch, as one process has them.
#
# All of PyTorch's layers, and those of libraries, end in ``torch.nn.functional.batch_norm``.


def _forward(original: Any, self: Any, x: Tensor) -> Tensor:
    """Run torch's SyncBatchNorm as any other layer; by itself it needs a GPU."""
    return original(self, x) if begun() is None else _BatchNorm.forward(self, x)


def _allow_on_any_device(original: Any, self: Any, module: nn.Module) -> None:
    if begun() is None:
        original(self, module)


def _normalise(original: Any, *args: Any, **kwargs: Any) -> Tensor:
    call, current = NormCall(*args, **kwargs), begun()
    x = call.input
    is_one_value = current is not None and current.has_one_sample and x.numel() == x.shape[1]
    # Of one value there is no variance: torch refuses it.
    if not call.training or current is None or not current.meets_others or is_one_value:
        if call.training and current is not None and current.is_cut(len(x)):
            raise TargetError(
                "a model that is not wrapped, or a part of one that is called by itself, has batch "
                "norm in training mode, which would see a worker's own share of the batch",
                hint="wrap it in DistributedDataParallel and call that; or call its eval()",
            )
        found: Tensor = original(*call)
        return found
    if current.has_parts:
        raise TargetError(
            "the model has batch norm, and the plan gives a device several virtual nodes, which "
            "run one after another: batch norm needs the whole batch at once",
            hint="solve for one virtual node a device, or replace batch norm by group norm",
        )
    current.losses.leave()  # it mixes samples, and its collectives would be run again
    made = normalised(
        x,
        call.running_mean,
        call.running_var,
        call.weight,
        call.bias,
        momentum=call.momentum,
        eps=call.eps,
        gather=partial(gathered, place=current.place),
        counts=current.has_samples,
    )
    if not current.is_going_back:
        current.losses.enter()
    return made


_CUT: WeakSet[Any] = WeakSet()
_DRAWN: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # a sampler -> samples of its last order
_SCALED: Any = WeakTensorKeyDictionary()


def adapt(torch_module: Any) -> None:
    """Change torch's classes in this process."""
    if torch_module.__name__ == "torch.distributed.fsdp":
        around(torch_module, "fully_shard", _shard)
        return
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import swa_utils
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    # hetflow's own call of init_process_group is bound in runtime/peers.py, which is imported.
    around(dist, "init_process_group", _join)
    around(DistributedDataParallel, "__init__", _wrap)
    around(DistributedDataParallel, "forward", _run)
    around(DistributedSampler, "__init__", _take_whole_order)
    around(DistributedSampler, "__iter__", _draw_whole_order)
    around(DataLoader, "__init__", _cut_batches)
    around(DataLoader, "__iter__", _deliver)
    around(torch.autograd, "backward", _backward)  # Tensor.backward calls it
    around(torch.autograd, "grad", _grad)
    around(swa_utils, "update_bn", _update_norms)
    around(torch.amp.GradScaler, "scale", _scale)
    around(torch.amp.GradScaler, "step", _step_scaled)
    around(torch.amp.GradScaler, "_unscale_grads_", _unscale)
    for name, at in _GATHERS.items():
        if hasattr(dist, name):
            around(dist, name, partial(_gather, at))
    around(torch.optim.Optimizer, "zero_grad", _clear)
    around(torch.optim.Optimizer, "state_dict", _state_of)
    around(torch.optim.Optimizer, "load_state_dict", _load)
    around(nn.Module, "zero_grad", _clear)
    for name in filter(partial(hasattr, dist), _EXCHANGES):  # newer releases have more
        around(dist, name, _exchange)
    around(nn.functional, "batch_norm", _normalise)
    around(nn.SyncBatchNorm, "forward", _forward)
    around(DistributedDataParallel, "_passing_sync_batchnorm_handle", _allow_on_any_device)
    adapt_divisors()


_EXCHANGES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip


def _exchange(original: Any, *values: Any, **options: Any) -> Any:
    """Answer what another worker asks of shared states, before an exchange of the script's."""
    current = begun()
    groups = [
        v for v in (*values, *options.values()) if isinstance(v, torch.distributed.ProcessGroup)
    ]
    if current is not None and all(group == torch.distributed.group.WORLD for group in groups):
        current.answer()
        if original.__name__ == "all_reduce":
            op = values[1] if len(values) > 1 else options.get("op", torch.distributed.ReduceOp.SUM)
            if op == torch.distributed.ReduceOp.SUM and not current.is_going_back:
                _look_at_sum(current, values[0] if values else options.get("tensor"))
    return original(*values, **options)


_LOOKS = [8]  # sums of the script's that are still looked at


def _look_at_sum(current: Training, own: Any) -> None:
    """Warn of a sum over workers that may be of means of their shares."""
    is_number = isinstance(own, Tensor) and own.numel() == 1 and own.is_floating_point()
    piece = current.piece
    if not (is_number and piece and _LOOKS[0] and current.place.distributed):
        return
    # A collective in each look, which all workers make: they call the script's sum together.
    _LOOKS[0] -= 1
    told = [row[0] for row in current.numbers_of_all([float(own)])]
    if len(set(current.shares(piece))) > 1 < len(set(told)) and any(n % 1 for n in told):
        _LOOKS[0] = 0
        if not current.place.rank:
            log.warning(
                "the script sums a number over workers that is not whole: where it is a mean over "
                "a worker's share, sum its numerator and its count, and divide then"
            )


def _clear(original: Any, self: Any, *values: Any, **options: Any) -> None:
    current = begun()
    if current is not None and current.sharing is not None:
        groups = getattr(self, "param_groups", None)
        given = self.parameters() if groups is None else (p for g in groups for p in g["params"])
        if current.sharing.clears(given):
            return
    original(self, *values, **options)


def _state_of(original: Any, self: Any, *values: Any, **options: Any) -> Any:
    state, current = original(self, *values, **options), begun()
    if current is None or current.sharing is None:
        return state
    return current.sharing.state_of(self, state)


def _load(original: Any, self: Any, *values: Any, **options: Any) -> None:
    original(self, *values, **options)
    current = begun()
    if current is not None and current.sharing is not None:
        current.sharing.load(self)


class _Script:
    """What the script has done by itself."""

    made_group = False


def _join(original: Any, *values: Any, **options: Any) -> None:
    original(*values, **options)
    # hetflow joins where DistributedDataParallel is used, and not before: a script may make a group
    # and then call ``hf.prepare``.
    _Script.made_group = True


def _training() -> Training | None:
    """This process's training; None where the script has made no process group."""
    return training() if _Script.made_group else begun()


def _wrap(original: Any, self: Any, module: nn.Module, *values: Any, **options: Any) -> None:
    current = _training()
    if current is None:
        original(self, module, *values, **options)
        return
    if options.get("process_group") not in (None, torch.distributed.group.WORLD):
        raise TargetError(
            "DistributedDataParallel has a process group of its own, and a plan's shares are of "
            "all workers",
            hint="leave process_group out",
        )
    if current.sharing is not None:
        _wrap_shared(self, module, *values, **options)
        current.sharing.of(module)
        current.train(module)
    else:
        original(self, module, *values, **options)
        current.train(module)
        current.hold_sums(self)
    # Lightning wraps on a stream of its own, and lets nobody wait for the parameters sent there.
    device = next(module.parameters()).device
    backend_of(device).synchronize(device)


class _NoReducer:
    """What takes the place of a reducer: shared states have their own."""

    def _rebuild_buckets(self) -> None:
        pass

    def prepare_for_backward(self, _: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise TargetError(
            f"DistributedDataParallel's reducer is asked for {name}, and workers share states",
            hint="leave communication hooks out, or solve without " + option("shard"),
        )


def _wrap_shared(
    self: Any, module: nn.Module, device_ids: Any = None, *_: Any, **options: Any
) -> None:
    nn.Module.__init__(self)
    self.module, self.device_ids = module, device_ids
    self.device = next(module.parameters()).device
    self.device_type, self._get_ddp_logging_data = self.device.type, dict
    self.reducer = self.logger = _NoReducer()  # a communication hook asks either
    self.process_group, self.broadcast_buffers = torch.distributed.group.WORLD, False
    self.require_backward_grad_sync = self.require_forward_param_sync = True
    self.find_unused_parameters = bool(options.get("find_unused_parameters"))
    self.static_graph, self.use_side_stream_for_tensor_copies = False, False


def _run(original: Any, self: Any, *values: Any, **options: Any) -> Any:
    current = begun()
    if current is None:
        return original(self, *values, **options)
    trains = self.module.training  # Lightning leaves the wrapper itself in evaluation mode
    if trains and torch.is_grad_enabled():
        current.begin_pass()
        if current.sharing is not None:
            current.sharing.of(self.module).begin(syncs=self.require_backward_grad_sync)
    with current.running(trains=trains):
        if current.sharing is None:
            found = _run_synchronised(original, self, *values, **options)
        else:
            found = _run_shared(self, *values, **options)
            current.sharing.of(self.module).has_run()
    if trains:
        current.losses.made(found)
    return found


def _run_synchronised(original: Any, self: Any, *values: Any, **options: Any) -> Any:
    try:
        return original(self, *values, **options)
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise TargetError(
            "a parameter of a wrapped model got no gradient in the last step: it was frozen since, "
            "or is not used in every step",
            hint="wrap the model again after freezing, or with find_unused_parameters=True",
        ) from error


class _FullyShard:
    """What scripts call of modules that fully_shard has wrapped; the plan does the rest."""

    syncs, precision = True, AS_IS

    def set_requires_gradient_sync(self, syncs: bool, **_: Any) -> None:
        self.syncs = syncs

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Leave it to the plan what is gathered when."""

    reshard = set_is_last_backward = set_requires_all_reduce = unshard = _ignore
    set_reshard_after_backward = set_reshard_after_forward = _ignore
    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch = _ignore


def _shard(original: Any, module: Any, *values: Any, **options: Any) -> Any:
    """Share the states of the outermost module by the plan, where the script uses FSDP2."""
    current = _training()
    if current is None:
        return original(module, *values, **options)
    if current.sharing is None:
        raise TargetError(
            "the script calls fully_shard, and the plan shares no states",
            hint="solve with " + option("shard", "all"),
        )
    current.sharing.lists = current.sharing.casts = _fully_sharded
    current.sharing.precision = _asked_precision
    for one in module if isinstance(module, list) else [module]:
        if not isinstance(one, _FullyShard):
            facts = {"precision": precision_of(options.get("mp_policy"))}
            one.__class__ = type(f"FSDP{type(one).__name__}", (_FullyShard, type(one)), facts)
            enter = partial(_enter_shard, current)
            one.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            one.register_forward_hook(partial(_leave_shard, current), always_call=True)
    return module


def _fully_sharded(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if isinstance(one, _FullyShard)]


def _asked_precision(model: nn.Module) -> Precision:
    asked: set[Precision] = {one.precision for one in _fully_sharded(model)}
    if len(asked) > 1:
        raise TargetError(
            "fully_shard is called with unlike policies (mp_policy) for parts of a model, which "
            "has one under a plan",
            hint="give all calls the same one",
        )
    return asked.pop()


_INSIDE: list[Any] = []  # the wrapped modules that run, the outermost first


def _enter_shard(current: Training, module: Any, args: Any, kwargs: Any) -> Any:
    _INSIDE.append(module)
    if len(_INSIDE) > 1:
        return None
    assert current.sharing is not None
    if module not in current.models:
        current.train(module)
    shared = current.sharing.of(module)
    if module.training and torch.is_grad_enabled():
        current.begin_pass()
        shared.begin(syncs=module.syncs)
    current.run(module.training)
    # In the pass that first shares the states the model's own hooks come too late.
    casts = shared.states is not None and module.precision.casts_model
    return module.precision.take(args, kwargs) if casts else None


def _leave_shard(current: Training, module: Any, _: Any, output: Any) -> Any:
    _INSIDE.pop()
    if _INSIDE:
        return None
    current.run(module.training, ends=True)
    assert current.sharing is not None
    shared = current.sharing.of(module)
    shared.has_run()
    if shared.states is not None:
        output = module.precision.give(output)
    if module.training:
        current.losses.made(output)
    return output


def _run_shared(self: Any, *values: Any, **options: Any) -> Any:
    if self.device_ids:  # as torch's own does
        (values,), (options,) = self.to_kwargs(values, options, self.device_ids[0])
    return self.module(*values, **options)


def _backward(
    original: Any, tensors: Any, grad_tensors: Any = None, *values: Any, **options: Any
) -> None:
    """Go back from this worker's share of the loss."""
    current = begun()
    if current is None or current.is_going_back:  # within one: recomputed activations
        original(tensors, grad_tensors, *values, **options)
        return
    if current.is_in_loop and current.piece is not None:
        current.begin_pass()  # its model may be in evaluation mode, or this be its second loss
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
    # A scaled loss is looked at as the one that it was made of: scales may differ between workers.
    told, scalers = zip(*(_SCALED.pop(root, (root, None)) for root in roots), strict=True)
    for root in told:
        current.check_tried(root)
    with current.weighing(told), current.going_back(scalers[0]):
        shares = current.shares_of(roots)
        gradients = [
            (torch.ones_like(root) if gradient is None else gradient) * share
            for root, share, gradient in zip(
                roots, shares, given or [None] * len(roots), strict=True
            )
        ]
        try:
            original(roots, gradients, *values, **options)
        except RuntimeError as error:
            # Between its layer's passes a parameter has no entries.
            if current.sharing is None or "returned an invalid gradient" not in str(error):
                raise
            raise TargetError(
                "the loss reads a parameter outside of its layer, where workers share it",
                hint="for a penalty on weights take the optimizer's weight_decay, or solve with "
                + option("shard", "optimizer"),
            ) from error
    current.end_pass()


def _grad(original: Any, outputs: Any, inputs: Any, *values: Any, **options: Any) -> Any:
    """Refuse gradients of parameters that no backward pass weighs by the share."""
    current = begun()
    if current is not None:
        current.took_gradients = True  # torch.func calls this too, on tensors of its own
    if current is not None and current.trains_by_itself(tree_flatten(inputs)[0]):
        raise TargetError(
            "torch.autograd.grad is asked for gradients of the model's parameters, which would be "
            "those of a worker's own share",
            hint="call backward on the loss; or train with hf.prepare",
        )
    return original(outputs, inputs, *values, **options)


def _update_norms(
    original: Any, loader: Any, model: nn.Module, *values: Any, **options: Any
) -> None:
    """Let all workers see the whole batches in an averaged model that is not wrapped."""
    current = begun()
    if current is None or loader not in _CUT:
        original(loader, model, *values, **options)
        return
    with current.running(trains=True):
        original(loader, model, *values, **options)


def _scale(original: Any, self: Any, outputs: Any) -> Any:
    """Remember which loss a GradScaler has scaled, and by which."""
    scaled = original(self, outputs)
    current = begun()
    if current is not None and isinstance(outputs, Tensor) and self.is_enabled():
        if current.sharing is not None:
            current.sharing.scale_by(self)
        _SCALED[scaled] = outputs, self
    return scaled


def _step_scaled(original: Any, self: Any, optimizer: Any, *values: Any, **options: Any) -> Any:
    """Unscale before the step: a fused optimizer would divide by the scale itself."""
    current = begun()
    if current is not None and current.scales_differ and self.is_enabled():
        if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
    return original(self, optimizer, *values, **options)


def _unscale(original: Any, self: Any, optimizer: Any, inverse: Tensor, *rest: Any) -> Any:
    """Look for an overflow alone where gradients have no scale since they were summed."""
    current = begun()
    if current is not None and current.scales_differ:
        inverse = torch.ones_like(inverse)
    return original(self, optimizer, inverse, *rest)


# A script's gathers -> the places of the tensor and of the group among their arguments. Hetflow's
# own, and those within torch, are bound to the functions before they were changed.
_GATHERS = {
    "all_gather": (("tensor", 1), ("group", 2)),
    "all_gather_into_tensor": (("input_tensor", 1), ("group", 2)),
    "all_gather_single": (("input", 1), ("group", 2)),
    "gather": (("tensor", 0), ("group", 3)),
}


def _gather(places: Any, original: Any, *values: Any, **options: Any) -> Any:
    """Refuse tensors of unlike sizes, by which gloo aborts and NCCL waits or mixes them up."""
    current = begun()
    tensor, group = (values[at] if len(values) > at else options.get(name) for name, at in places)
    if current is not None and isinstance(tensor, Tensor):
        number = torch.distributed.get_world_size(group)  # -1 outside of the group
        own = torch.full((), tensor.numel(), device=tensor.device)
        sizes = own.new_empty(max(number, 0))
        if number > 1:
            torch.distributed.distributed_c10d.all_gather([*sizes.unbind()], own, group=group)
        if number > 1 and len({*sizes.tolist()}) > 1:  # the host waits once, whatever the number
            raise TargetError(
                "the script gathers tensors of unlike sizes: a plan's workers have unlike shares "
                "of a batch",
                hint="torch.distributed.all_gather_object takes them; for a loss that sees the "
                "whole batch train with hf.prepare, whose over_batch= takes it",
            )
    return original(*values, **options)


def _take_whole_order(
    original: Any,
    self: Any,
    dataset: Any,
    num_replicas: int | None = None,
    rank: int | None = None,
    *values: Any,
    **options: Any,
) -> None:
    """Give every worker the order of all samples, without the copies that fill it up."""
    current = _training()
    if current is None:
        original(self, dataset, num_replicas, rank, *values, **options)
        return
    if num_replicas not in (None, current.world_size):
        raise TargetError(
            f"DistributedSampler has num_replicas={num_replicas}, and the plan has "
            f"{current.world_size} workers",
            hint="leave num_replicas and rank out",
        )
    original(self, dataset, 1, 0, *values, **options)


def _draw_whole_order(original: Any, self: Any) -> Iterator[int]:
    _DRAWN[self] = self.num_samples
    found: Iterator[int] = original(self)
    return found


class _OwnOrder:
    """The order of a script's own kind of DistributedSampler.

    It may go on in the middle of an epoch. But it counts a worker's samples there, where the order
    here is that of all workers.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        _DRAWN.pop(self._sampler, None)
        number = 0
        for index in self._sampler:
            number += 1
            yield index
        whole = _DRAWN.get(self._sampler, number)
        if number != whole:
            raise TargetError(
                f"{type(self._sampler).__name__} gives {number} of the {whole} samples of its "
                "order, and may leave out those of one worker where the order is that of all",
                hint="skip whole batches of the loader; or train with hf.prepare, which resumes",
            )


def _cut_batches(original: Any, self: Any, *values: Any, **options: Any) -> None:
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    original(self, *values, **options)
    current = begun()
    if current is None or not isinstance(self.sampler, DistributedSampler):
        return
    if self.batch_size is None:
        raise TargetError(
            "a DataLoader with a DistributedSampler and no batch_size gives single samples, which "
            "cannot be shared out",
            hint="give it a batch_size",
        )
    current.loader_batch_size = self.batch_size
    order: Any = self.sampler
    global_batch = self.batch_size * current.world_size
    if type(order).__iter__ is not DistributedSampler.__iter__:
        order = _OwnOrder(order)
    cut_loader(
        self,
        ShareSampler(
            current, BatchSampler(order, global_batch, self.drop_last), dataset=self.dataset
        ),
    )


def cut_loader(loader: Any, cuts: ShareSampler) -> None:
    """Let a DataLoader give this worker's parts, and note each as the script takes it."""
    # A DataLoader refuses other batches once it is made; only its iterators read them.
    object.__setattr__(loader, "batch_sampler", cuts)
    _CUT.add(loader)


def _deliver(original: Any, self: Any) -> Iterator[Any]:
    return _taken(original(self), self) if self in _CUT else original(self)


def _taken(batches: Iterator[Any], loader: Any) -> Iterator[Any]:
    """This worker's shares; one that counts nothing is needed where the others train."""
    for batch in training().asking(batches, loader.batch_sampler):
        piece = loader.batch_sampler.pieces.popleft()
        if piece.own_samples or loader.batch_sampler.gives_all or not training().is_evaluating:
            training().take(piece)
            yield batch

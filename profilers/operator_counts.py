"""Count the operations and bytes of a model's passes, on tensors with shapes but no values.

The workload runs whole (loss, backward, update) under torch's FakeTensorMode: nothing is computed
and next to no memory is taken. So a laptop can count a model that fits no device of its own. Where
making a batch needs values (a random augmentation, say), batches are made for real, and only their
shapes go on.
Floating-point operations are those of ``torch.utils.flop_counter``. Bytes are those of an
operator's distinct inputs and outputs: run eagerly, each moves through memory once.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from math import gcd
from typing import Any

from ..devices.host import TORCH_DEVICE
from ..runtime.nested_tensors import mapped, storage_key, tensors_in
from ..schema.errors import TargetError
from ..schema.layers import (
    CoreCounts,
    LayerCounts,
    LayerTable,
    ModelCounts,
    Operator,
    PassCounts,
    SumCounts,
    TensorRole,
)
from ..schema.optimizer import OptimizerState
from ..schema.options import Activations, Precision, option
from . import targets
from .bench import Bench
from .layer_memory import BLOCK_BYTES, StorageLedger
from .layer_passes import (
    FoundCores,
    LayerPiece,
    PassInputs,
    Row,
    find_cores,
    walked,
)
from .layers import call_of, find_layers

_ROLES: dict[str, TensorRole] = {
    "column": "column", "output": "column", "logits": "column", "row": "row",
    "vocabulary": "vocabulary",
}  # fmt: skip
"""What an estimate calls the runtime's ways to share a layer."""


# Which layers a tensor-parallel group shares, and how (Megatron-LM; thesis 4.2.3).
#
# A column-parallel product splits its outputs, a row-parallel one its inputs; between the two
# nothing is exchanged, so a block all-reduces twice a pass. Which product is which, the runtime
# knows (``runtime/tensor/roles.py``): what a launch cannot share is not estimated.


_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_head")


class NoTensorRolesError(Exception):
    """The model is not one whose layers a group can share; the message says why."""


def shared_layers(model: Any) -> dict[str, TensorRole]:
    """The layers that a tensor-parallel group shares, by module name.

    Raises:
        NoTensorRolesError: A launch could not share the model's layers.
    """
    from ..runtime.tensor.roles import sharing_of

    try:
        roles = sharing_of(model).roles
    except TargetError as error:
        raise NoTensorRolesError(error.message) from error
    return {name: _ROLES[role.style] for name, role in roles.items() if role.style in _ROLES}


def tensor_roles(
    ids: Sequence[str], edges: Sequence[tuple[str, str]], shared: Mapping[str, TensorRole]
) -> dict[str, TensorRole]:
    """The role of each layer.

    A layer that is not shared by itself is ``sharded`` where all that it reads is split, and
    ``replicated`` where nothing is.

    Args:
        ids: In topological order.
        edges: Who reads whose output.
        shared: The roles of ``shared_layers``.

    Raises:
        NoTensorRolesError: The shared layers do not pair.
    """
    before: Mapping[str, list[str]] = {name: [] for name in ids}
    for source, target in edges:
        before[target].append(source)
    roles: dict[str, TensorRole] = {}
    for name in ids:
        inputs = [roles[source] in ("column", "sharded") for source in before[name]]
        roles[name] = _role(name, shared.get(name.partition("#")[0]), inputs)
    if "row" not in roles.values():
        raise NoTensorRolesError("none of its layers is shared by a tensor-parallel group")
    return roles


def _role(name: str, role: TensorRole | None, is_split: Sequence[bool]) -> TensorRole:
    """Of one layer, whose inputs are split among the group or whole."""
    if role == "row" and not any(is_split):  # whole ones may be the residual added to its sum
        raise NoTensorRolesError(f"{name} reads what no column-parallel layer made")
    if role == "column" and is_split and all(is_split):
        raise NoTensorRolesError(f"{name} reads what a column-parallel layer made")
    if role is not None:
        return role
    if any(is_split):
        if not all(is_split):
            raise NoTensorRolesError(f"{name} reads what is split, and what is whole")
        return "sharded"
    return "replicated"


def heads_divisor(model: Any) -> int:
    """What degrees must divide: the greatest common divisor of all numbers of heads.

    Raises:
        NoTensorRolesError: The model has no heads that it tells of.
    """
    config = getattr(model, "config", None)
    found = [
        getattr(holder, name, None)
        for holder in (config, *model.modules())
        if holder is not None
        for name in _HEADS
    ]
    heads = [each for each in found if isinstance(each, int) and each > 0]
    if not heads:
        raise NoTensorRolesError("the model tells of no attention heads")
    return gcd(*heads)


# Names of operators that move nothing, although they are no views by their schema.
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "detach", "lift_fresh", "set_", "_local_scalar_dense", "resize_",
}  # fmt: skip
# A CPU's attention, whose operations are those of a GPU's.
_AS_ON_GPUS = {
    f"_scaled_dot_product_flash_attention_for_cpu{way}": f"_scaled_dot_product_flash_attention{way}"
    for way in ("", "_backward")
}
# These read nothing of what they write to.
_OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
# Of these only as much of the first input is read as comes out.
_PICKING = {"embedding", "gather", "index", "index_select", "nll_loss_forward"}
# Of these only as much of the first input is changed as the last one has.
_SCATTERING = {"scatter_add_", "index_put_", "index_add_"}


class Tally:
    """What has been called so far, and the memory that the calls' outputs hold.

    Bytes are beyond what was there when the tally began.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._most_bytes = 0
        self.calls: Counter[Operator] = Counter()
        self._held: set[int] = set()

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators called, equal calls merged, in the order of their first call."""
        return _merged(self.calls)

    def allocated(self, storage: Any, inputs: set[int]) -> None:
        """Count a storage that is not one of the inputs' until it is freed."""
        key = storage._cdata
        if key in self._held or key in inputs:
            return
        self._held.add(key)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._most_bytes = max(self._most_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, key, storage.nbytes())

    def since(self) -> tuple[int, int]:
        """The most bytes since it was called last, and now."""
        most, self._most_bytes = self._most_bytes, self.live_bytes
        return most, self.live_bytes

    def _freed(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live_bytes -= size


@contextmanager
def tallied() -> Iterator[Tally]:
    """Count what torch calls meanwhile."""
    tally = Tally()
    with _recorder()(tally):
        yield tally


@cache
def _recorder() -> Any:
    """The class that sees torch's calls; torch is imported when it is first needed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, tally: Tally) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._tally = tally

        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            named = named or {}
            answer = function(*arguments, **named)
            # Views and operators in place return an input's memory, which is no new one.
            held = {storage_key(tensor) for tensor in _tensors((arguments, named))}
            for tensor in _tensors(answer):
                self._tally.allocated(tensor.untyped_storage(), held)
            counted = counted_call(function, arguments, named, answer)
            if counted is not None:
                self._tally.calls[counted] += 1
            return answer

    return Recorder


def counted_call(
    function: Any, arguments: Sequence[Any], named: Mapping[str, Any], answer: Any
) -> Operator | None:
    """What a call is counted as; None if it moves nothing.

    Args:
        function: The operator, of ``torch.ops``.
        arguments: Its positional arguments; tensors may be without values.
        named: Its other arguments, without the tensors that it only writes to.
        answer: What it returned.
    """
    import torch
    from torch.utils.flop_counter import conv_flop_count, flop_registry

    inputs, outputs = _tensors((arguments, named)), _tensors(answer)
    name = function._overloadpacket.__name__
    if not outputs and function._schema.is_mutable:
        outputs = _written(function, arguments)  # torch._foreach_*_ answer with nothing
    if not outputs or name in _FREE or _is_view(function):
        return None
    if name in _PICKING:
        inputs = [*outputs, *inputs[1:]]
    elif name in _OVERWRITING:
        written = set(map(id, _written(function, arguments)))
        inputs = [tensor for tensor in inputs if id(tensor) not in written]
    elif name in _SCATTERING:
        inputs, outputs = [*inputs[1:], inputs[-1]], [inputs[-1]]
    counted_as = getattr(torch.ops.aten, _AS_ON_GPUS.get(name, name), function._overloadpacket)
    formula = flop_registry.get(counted_as)
    if name == "convolution_backward":
        # torch's formula counts a weight's gradient as if all channels were of one group.
        gradient, images, weight, *_, is_transposed, _, _, wanted = arguments
        shapes = images.shape, weight.shape, gradient.shape
        flops = float(sum(wanted[:2]) * conv_flop_count(*shapes, transposed=is_transposed))
    else:
        flops = 0.0 if formula is None else float(formula(*arguments, **named, out_val=answer))
    moved = {id(tensor): tensor for tensor in inputs}.values()
    size = sum(map(_bytes, moved)) + sum(map(_bytes, outputs))
    floats = [tensor.dtype for tensor in (*inputs, *outputs) if tensor.is_floating_point()]
    dtype = str(floats[0] if floats else outputs[0].dtype).removeprefix("torch.")
    return Operator(
        name=name,
        dtype=dtype,
        flops=flops,
        num_bytes=size,
        channels_last="conv" in name and any(map(_is_channels_last, inputs)),
    )


def _is_channels_last(tensor: Any) -> bool:
    """Whether channels lie beside each other in memory, and not the columns of a picture."""
    import torch

    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return (
        tensor.dim() in formats
        and not tensor.is_contiguous()
        and bool(tensor.is_contiguous(memory_format=formats[tensor.dim()]))
    )


def _written(function: Any, arguments: Any) -> list[Any]:
    """The inputs that an operator writes to, by its schema."""
    return _tensors(
        [
            value
            for value, declared in zip(arguments, function._schema.arguments, strict=False)
            if declared.alias_info is not None and declared.alias_info.is_write
        ]
    )


def _tensors(value: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [
        leaf
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


def _bytes(tensor: Any) -> int:
    # An expanded tensor shows its storage's values several times; they lie in memory once.
    size: int = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
    return size


@cache
def _is_view(function: Any) -> bool:
    """Whether the operator returns views of its inputs, and writes nothing."""
    marks = [returned.alias_info for returned in function._schema.returns]
    return bool(marks) and all(mark is not None and not mark.is_write for mark in marks)


def count_model(
    target: targets.Target,
    sizes: Sequence[int],
    layers_at: Sequence[int],
    optimizer: str,
    *,
    is_default: bool = False,
    precision: Precision | None = None,
    is_enough: Callable[[int, Sequence[PassCounts]], bool] = lambda standing, passes: False,
    activations: Sequence[Activations] = (),
) -> ModelCounts:
    """Count a target's training at several batch sizes.

    Args:
        target: What to count; its factory runs here, on tensors without values.
        sizes: Batch sizes, ascending.
        layers_at: Microbatch sizes to count the layers at.
        optimizer: One of ``schema.optimizer.NAMES``, where the target brings none.
        is_default: Whether that optimizer is only the default.
        precision: One of 16 bits: count training under torch.autocast with it.
        is_enough: Asked after each size, with the bytes that stand between steps and the passes
            so far, whether larger sizes may be left out.
        activations: Further ways to treat those of repeated layers.

    Raises:
        TargetError: The workload is at fault, or what it does depends on values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode, is_fake

    with (
        _without_onednn(),
        _autocast_on_the_host(),
        _as_on_gpus()(),
        _again_as_before(),
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
    ):
        workload = _loaded(target, fake)
        first = min([*sizes, *layers_at])
        make = _batches(target, workload.make_batch, first)

        def faked(size: int) -> Any:
            return mapped(lambda t: t if is_fake(t) else fake.from_tensor(t), make(size))

        workload = replace(workload, make_batch=faked)
        bench = Bench(workload, TORCH_DEVICE, optimizer, target.blocks)
        with _values_are_missing(target), _mixed_precision(precision):
            counts = _counted(bench, sizes, layers_at, is_enough, activations)
    if workload.make_optimizer is None:
        named = replace(counts.optimizer, name=optimizer, is_default=is_default)
        counts = replace(counts, optimizer=named)
    return counts


@contextmanager
def _mixed_precision(precision: Precision | None) -> Iterator[None]:
    """Under torch.autocast with a type of 16 bits; as it is with others."""
    import torch

    if precision not in ("float16", "bfloat16"):
        yield
        return
    # Kept casts of weights would be counted once for all passes.
    with torch.autocast(TORCH_DEVICE, getattr(torch, precision), cache_enabled=False):
        yield


# What CUDA's autocast computes in 32 bits and a CPU's does not.
_IN_32_BITS = {
    "cosine_similarity", "cross_entropy", "cumsum", "exp", "expm1", "group_norm", "l1_loss",
    "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "norm", "pow", "__pow__",
    "reciprocal", "rsqrt", "softmax", "softplus", "sum",
}  # fmt: skip


@cache
def _as_on_gpus() -> Any:
    """The class of a mode in which torch's functions are called as a GPU would run them."""
    import torch
    from torch.overrides import TorchFunctionMode

    attention = torch.nn.functional.scaled_dot_product_attention

    class AsOnGpus(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            named, name = named or {}, getattr(function, "__name__", "")
            is_grouped = name in ("grouped_mm", "_grouped_mm")
            if is_grouped and [factor.dim() for factor in arguments[:2]] == [2, 3]:
                return _evenly(*arguments[:2])
            if function is attention:  # only a CPU has no fused kernel with dropout
                arguments = (*arguments[:4], *([0.0] if len(arguments) > 4 else []), *arguments[5:])
                named = {key: 0.0 if key == "dropout_p" else named[key] for key in named}
            elif name in _IN_32_BITS and torch.is_autocast_enabled(TORCH_DEVICE):
                arguments, named = mapped(_in_32_bits, (list(arguments), named))
            return function(*arguments, **named)

    return AsOnGpus


def _evenly(rows: Any, weights: Any) -> Any:
    """The product of groups of rows, one for each expert, as of groups of one size."""
    # How many rows a router sends to each expert depends on values. Evenly spread, a mixture's
    # product is one batched product, padded up to whole groups.
    from torch.nn import functional

    experts = len(weights)
    each = -(-len(rows) // experts)
    padded = functional.pad(rows, (0, 0, 0, each * experts - len(rows)))
    return (padded.view(experts, each, -1) @ weights).flatten(0, 1)[: len(rows)]


@contextmanager
def _autocast_on_the_host() -> Iterator[None]:
    """Let an autocast of a GPU act on tensors without values, which are on the CPU."""
    # Else an autocast in a step would be left out of the counts in silence. A CPU's autocast acts,
    # and is given the types of a GPU's: products in 16 bits, the rest of the list in 32.
    import torch

    begin = torch.autocast.__init__

    def on_the_host(
        self: Any, device_type: str, dtype: Any = None, *rest: Any, **named: Any
    ) -> None:
        if device_type != TORCH_DEVICE:
            dtype = dtype or torch.get_autocast_dtype(device_type)
        begin(self, TORCH_DEVICE, dtype, *rest, **named)

    torch.autocast.__init__ = on_the_host  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = begin  # type: ignore[method-assign]


@contextmanager
def _again_as_before() -> Iterator[None]:
    """Let recomputed layers run under the modes of torch's functions that they ran under before."""
    # Backward passes are such functions themselves, so torch turns modes off within them.
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils import checkpoint

    before: Any = checkpoint._CheckpointFrame

    def frame(recompute: Callable[..., None], *rest: Any) -> Any:
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

        def again(*arguments: Any) -> None:
            with ExitStack() as active:
                for mode in modes:
                    active.enter_context(mode)
                recompute(*arguments)

        return before(again, *rest)

    checkpoint._CheckpointFrame = frame  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        checkpoint._CheckpointFrame = before  # type: ignore[misc]


def _in_32_bits(tensor: Any) -> Any:
    import torch

    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@contextmanager
def _without_onednn() -> Iterator[None]:
    """A CPU's fused operators, such as a whole LSTM, have no counterpart elsewhere."""
    import torch

    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _loaded(target: targets.Target, fake: Any) -> targets.Workload:
    """The workload, built without values where its factory allows that."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily

    try:
        with _convertible(fake):
            return targets.load(target)
    except (TargetError, DataDependentOutputException):  # such as of torch's trunc_normal_
        with unset_fake_temporarily():
            workload = targets.load(target)  # its own fault, if it is one, ends here
        _fake_weights(workload.model, fake)
        return workload


@contextmanager
def _convertible(fake: Any) -> Iterator[None]:
    """Let a factory convert its model, as ``model.to(torch.bfloat16)`` does."""
    import torch

    swap: Any = torch.utils.swap_tensors

    def forgotten(one: Any, other: Any) -> None:
        # torch swaps no tensor with weak references, and the mode's memo of conversions holds some.
        fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    torch.utils.swap_tensors = forgotten
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def _fake_weights(model: Any, fake: Any) -> None:
    """Replace a model's parameters and buffers; those that are shared stay so."""
    import torch

    known: dict[int, Any] = {}

    def without_values(tensor: Any) -> Any:
        if id(tensor) not in known:
            if tensor.is_meta:  # from ``hf.deferred()``
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=TORCH_DEVICE)
            else:
                made = fake.from_tensor(tensor.detach())
            is_weight = isinstance(tensor, torch.nn.Parameter)
            known[id(tensor)] = (
                torch.nn.Parameter(made, requires_grad=tensor.requires_grad) if is_weight else made
            )
        return known[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = without_values(tensor)


def _batches(target: targets.Target, make: Callable[[int], Any], size: int) -> Callable[[int], Any]:
    """What makes batches: without values where that goes, else for real."""
    # Random draws of ``make_batch`` need no more than to run for real; where its samples' values
    # matter too, they are of a workload that was built for real. What then fails is its own fault,
    # and is raised where the batch is asked for.
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def for_real(made: Callable[[int], Any], size: int) -> Any:
        with unset_fake_temporarily():
            return made(size)

    @cache
    def built_for_real() -> Callable[[int], Any]:
        with unset_fake_temporarily():
            return targets.load(target).make_batch

    def as_built(size: int) -> Any:
        return for_real(built_for_real(), size)

    for way in (make, partial(for_real, make), as_built):
        with suppress(Exception):
            way(size)
            return way
    return make


@contextmanager
def _values_are_missing(target: targets.Target) -> Iterator[None]:
    """Raise a readable error where a pass needs a tensor's value, which does not exist here."""
    try:
        yield
    except TargetError as error:
        if "DataDependent" not in error.message and "fake" not in error.message.lower():
            raise
        raise TargetError(
            f"{target.text}: cannot be counted without running it: {error.message}",
            hint="what the model does depends on the values of tensors; profile it on a device, "
            f"and carry that profile with {option('from_profile')}",
        ) from error


def _counted(
    bench: Bench,
    sizes: Sequence[int],
    layers_at: Sequence[int],
    is_enough: Callable[[int, Sequence[PassCounts]], bool],
    activations: Sequence[Activations],
) -> ModelCounts:
    import torch

    from ..runtime.activations import treated

    def passes_of() -> tuple[PassCounts, ...]:
        passes: list[PassCounts] = []
        for size in sizes:
            passes.append(_pass(bench, size))
            if is_enough(standing, passes):
                break
        return tuple(passes)

    first = min([*sizes, *layers_at])
    bench.run_step(bench.make_batch(first))  # gradients and state exist from here on
    for group in bench.optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = True  # torch's default on GPUs
    with tallied() as update:
        bench.optimizer.step()
    # Single numbers, such as Adam's step, do not count.
    state = sum(_bytes(t) for t in _tensors(list(bench.optimizer.state.values())) if t.dim())
    grads = [p.grad for p in bench.model.parameters() if p.grad is not None]
    standing = sum(map(_bytes, [*bench.model.parameters(), *bench.model.buffers(), *grads])) + state
    passes, others = passes_of(), dict[Activations, tuple[PassCounts, ...]]()
    for how in activations:
        with treated(bench.model, how, bench.blocks):
            others[how] = passes_of()
    tables, divisor, reason = _with_roles(bench, [_table(bench, size) for size in layers_at])
    return ModelCounts(
        weight_bytes=bench.weight_bytes,
        frozen_weight_bytes=bench.frozen_weight_bytes,
        num_parameters=bench.num_parameters,
        blocks=bench.blocks or None,
        standing_bytes=standing,
        optimizer=OptimizerState(
            name=type(bench.optimizer).__name__,
            state_bytes_per_weight_byte=state / bench.weight_bytes,
            workspace_bytes_per_weight_byte=update.peak_bytes / bench.weight_bytes,
        ),
        update=update.operators,
        update_workspace_bytes=update.peak_bytes,
        passes=passes,
        others=others,
        tables=tables,
        torch=torch.__version__,
        tensor_divisor=divisor,
        no_tensor_reason=reason,
    )


def _with_roles(
    bench: Bench, tables: Sequence[LayerTable]
) -> tuple[tuple[LayerTable, ...], int | None, str | None]:
    """The tables with each layer's tensor-parallel role, what degrees must divide, or why not."""
    try:
        divisor = heads_divisor(bench.model)
        shared = shared_layers(bench.model)
        roles = [tensor_roles([row.id for row in t.layers], t.edges, shared) for t in tables]
    except NoTensorRolesError as error:
        return tuple(tables), None, str(error)
    return (
        tuple(
            replace(table, layers=tuple(_in_role(row, found[row.id]) for row in table.layers))
            for table, found in zip(tables, roles, strict=True)
        ),
        divisor,
        None,
    )


def _in_role(row: LayerCounts, role: TensorRole) -> LayerCounts:
    """A layer whose weights are split but for those that its role leaves whole."""
    whole = {"column": 0, "vocabulary": 0, "row": row.whole_weight_bytes}
    return replace(row, role=role, whole_weight_bytes=whole.get(role, row.weight_bytes))


def _pass(bench: Bench, size: int) -> PassCounts:
    from ..devices.backend import AcceleratorBackend
    from ..runtime.gradients import FlatBuffers
    from .pass_moments import PassWatch

    batch = bench.make_batch(size)
    parameters = list(bench.model.parameters())
    usual = AcceleratorBackend.bucket_bytes
    least = max(usual, bench.weight_bytes // _MOST_SUMS)
    buffers = FlatBuffers(parameters, bucket_bytes=least, alignment=1, num_sums=0)
    with (
        _offloads_counted() as lane,
        tallied() as tally,
        _arrivals(parameters, buffers, tally) as arrived,
    ):
        watch = PassWatch(bench.model, tally.since, bench.blocks)
        with watch.watching():
            loss = bench.loss_of(batch)
            forward, kept = tally.operators, tally.live_bytes
            before = tally.calls.copy()
            bench.backward(loss)
    return PassCounts(
        batch_size=size,
        forward=forward,
        backward=_merged(tally.calls - before),
        kept_bytes=max(0, kept),
        peak_bytes=tally.peak_bytes,
        batch_bytes=sum(map(_bytes, _tensors(batch))),
        offloaded_bytes=lane.num_bytes,
        pinned_bytes=lane.pinned_bytes or None,
        moments=watch.moments(),
        sums=tuple(
            SumCounts(
                num_bytes=size, num_sums=-(-size // usual), after=_merged(tally.calls - calls)
            )
            for size, calls in arrived
        ),
    )


_Arrival = tuple[int, Counter[Operator]]
"""Bytes of gradients, and all calls until they had come."""
_MOST_SUMS = 16
"""A large model has a thousand buckets. So many groups of them begin 1/16 of all later at most."""


@contextmanager
def _arrivals(parameters: Sequence[Any], buffers: Any, tally: Tally) -> Iterator[list[_Arrival]]:
    """Note when the gradients of each bucket have come."""
    found: list[_Arrival] = []

    def came(index: int) -> None:
        if index in buffers.bucket_of:
            buffers.bucket_of[index].num_ready += 1
        # Never out of order, as in a launch.
        while len(found) < len(buffers.buckets) and buffers.buckets[len(found)].is_ready:
            found.append((buffers.buckets[len(found)].flat.nbytes, tally.calls.copy()))

    hooks = [
        parameters[index].register_post_accumulate_grad_hook(lambda _, index=index: came(index))
        for index in buffers.views
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    # What no gradient came for is summed when the pass has ended.
    found += [(one.flat.nbytes, tally.calls) for one in buffers.buckets[len(found) :]]


class _CountedLane:
    """Takes activations to no host (``runtime.offload``), and counts their bytes."""

    def __init__(self) -> None:
        self.num_bytes = self.pinned_bytes = 0

    def put(self, values: list[Any]) -> tuple[list[Any], None]:
        from ..runtime.offload import pinned_bytes

        self.num_bytes += sum(map(_bytes, values))
        self.pinned_bytes += pinned_bytes(values)
        return [(len(one), one.dtype) for one in values], None

    def get(self, held: list[Any]) -> tuple[list[Any], None]:
        import torch

        return [torch.empty(length, dtype=dtype) for length, dtype in held], None


@contextmanager
def _offloads_counted() -> Iterator[_CountedLane]:
    import torch

    from ..runtime.offload import LANES

    LANES[torch.device(TORCH_DEVICE)] = lane = _CountedLane()
    try:
        yield lane
    finally:
        del LANES[torch.device(TORCH_DEVICE)]


def _merged(calls: Counter[Operator]) -> tuple[Operator, ...]:
    """Equal calls as one, in the order of their first call."""
    return tuple(replace(operator, count=count) for operator, count in calls.items())


def _table(bench: Bench, size: int) -> LayerTable:
    """The layers that a launch can cut by, each run alone from what really reaches it."""
    found = find_layers(bench, size)
    if found.layered is None:
        raise TargetError(
            f"the layers cannot be found without running the model: {found.trace.reason}",
            hint=f"leave out {option('layers')}, or profile the model on a device",
        )
    from ..runtime.pipeline.cut import cut

    whole = _pass(bench, size)
    batch = bench.make_batch(size)
    values = dict(call_of(bench, batch).arguments)
    standing = [*bench.model.parameters(), *bench.model.buffers()]
    ledger = StorageLedger(standing, tensors_in(values))
    parts = cut(found.layered, [[layer.id] for layer in found.layered.layers])
    cores = find_cores(found.layered, parts, values)
    rows = walked(found.layered, parts, values, BLOCK_BYTES, partial(_layer, ledger))
    for row, part in zip(rows, parts, strict=True):
        # A bias is added to a row-parallel product's whole sum, so every device holds it.
        biases = sum(_bytes(p) for p in part.module.parameters() if p.dim() == 1)
        row["whole_weight_bytes"] = min(biases, row["weight_bytes"])
    stashed = ledger.stashed_bytes
    of_loss = max(0, whole.kept_bytes - sum(stashed.values()))
    # The loss is computed where the model ends, and what it keeps is in no layer.
    kept = {row["id"]: stashed.get(row["id"], 0) for row in rows}
    kept[rows[-1]["id"]] += of_loss
    return LayerTable(
        whole=whole,
        layers=tuple(
            LayerCounts(
                **{**row, "shared_with": tuple(row.get("shared_with", ()))},
                stashed_bytes=kept[row["id"]],
                saved_later=ledger.saved_later(row["id"]) or None,
                core=_core(cores, row["id"], kept[row["id"]]),
            )
            for row in rows
        ),
        edges=tuple((source, target) for source, target in found.layered.edges),
        trace=found.trace,
    )


def _core(cores: FoundCores, layer: str, kept_bytes: int) -> CoreCounts | None:
    """What recomputed cores change in a layer that keeps so much without."""
    if not cores.changes(layer):
        return None
    begun = cores.of_layer(layer)
    with tallied() as again:
        for core in begun:
            core.run_again()
    return CoreCounts(
        forward=again.operators,
        made_bytes=max((core.made_bytes for core in begun), default=0),
        stashed_bytes=max(0, kept_bytes - cores.freed_bytes.get(layer, 0)),
    )


def _layer(ledger: StorageLedger, piece: LayerPiece, trained: list[Any]) -> tuple[Row, Any]:
    """A layer's operators and memory, and its answer."""
    import torch

    inputs = PassInputs(piece.values)
    with tallied() as forward:
        answer = ledger.record(
            piece.id, lambda: piece.call(*inputs.copies), piece.made, inputs.pairs
        )
    results = piece.results(answer)
    ones = [torch.ones_like(result) for result in results]
    with tallied() as backward:
        if results:
            torch.autograd.backward(results, ones)
    gradients = sum(_bytes(leaf.grad) for leaf in inputs.leaves if leaf.grad is not None)
    workspace = max(0, forward.peak_bytes - forward.live_bytes, backward.peak_bytes - gradients)
    return {
        "forward": forward.operators,
        "backward": backward.operators,
        **_halves(piece, trained, ones),
        "activation_bytes": piece.made_bytes(answer),
        "workspace_bytes": workspace,
    }, answer


def _halves(piece: LayerPiece, trained: list[Any], ones: list[Any]) -> Row:
    """Both halves of a backward pass; nothing if its graph cannot be walked twice."""
    import torch

    from ..runtime.pipeline.stage import backward_input

    inputs = PassInputs(piece.values)
    results = piece.results(piece.call(*inputs.copies))
    leaves = [leaf for leaf in inputs.leaves if leaf.requires_grad]
    first, second = Tally(), Tally()
    try:
        with _recorder()(first):
            _, half = backward_input(results, ones, leaves, trained) if results else ((), None)
        with _recorder()(second):
            if half is not None:
                half.run()
            elif results and trained:
                torch.autograd.backward(results, ones, inputs=trained)
    except RuntimeError:
        return {}
    waiting = half.num_bytes if half is not None else sum(map(_bytes, ones)) if trained else 0
    return {"backward_halves": (first.operators, second.operators), "halved_bytes": waiting}

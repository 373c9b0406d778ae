"""Build a model without memory for its parameters; each worker later fills in its own only.

Inside ``deferred()`` torch's factories make tensors on the meta device, which have shapes and no
values. The operations on them are recorded on a tape. The value of any one tensor is computed
later, on the host, by running those recorded operations that it depends on, and no others.

Values are the bits of a model built the usual way. For that the random streams must advance as
they would: each random operation is also run at once, in memory that is freed at once, and the tape
notes the state of its stream before. So the script's random numbers after the block are the usual
ones as well, and the host needs memory for one parameter at a time. What reads a value inside the
block (a list of dropout rates, say) gets the true one.

Tensors are known by their storage, so views and ``.data`` need not be recorded. A storage is held
weakly: its address is not used again while the tape lives.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ..devices.host import TORCH_DEVICE
from ..schema.errors import TargetError

_META, _HOST = torch.device("meta"), torch.device(TORCH_DEVICE)
_COPIED_BYTES = 1 << 20
"""Real tensors up to this size are copied onto the tape; larger ones must not change afterwards."""
# ``torch.tensor`` and its like are left out: their values are given, and small.
_FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        *("empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "eye", "arange"),
        *("linspace", "logspace", "rand", "randn", "randint", "randperm", "normal"),
        *("tril_indices", "triu_indices", "hann_window", "hamming_window", "blackman_window"),
        *("bartlett_window", "kaiser_window"),
    )
)
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
# Random operations that overwrite a tensor, whatever is in it.
_FILLS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_")
_DEEPEST = 8
"""Levels of nested values in which tensors are looked for."""
_STATE = "the optimizer's state"
_INSIDE = "do it inside the block, or build the model without hf.deferred()"


_weak: Callable[[Any], Any] = StorageWeakRef


class _Ref(NamedTuple):
    """A tensor of the tape: a storage, and the part of it that the tensor shows."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, whole: Tensor) -> Tensor:
        """The tensor, in a real storage; ``whole`` is any tensor of that storage."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(whole.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Given:
    """A real tensor that an operation read, as it was then."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise TargetError(
                f"a tensor of shape {list(self.tensor.shape)} that initial values were taken from "
                "inside hf.deferred() was written later",
                hint="copy it before it is written",
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation of the tape."""

    function: Callable[..., Any]
    # Its arguments and named arguments, with refs for the tape's tensors.
    arguments: tuple[Sequence[Any], Mapping[str, Any]]
    reads: frozenset[int]  # storages that it reads
    writes: frozenset[int]  # storages that it makes or writes
    made: tuple[_Ref, ...]  # the refs of its results, in order
    # The random stream that it draws from; None for the host's own.
    generator: torch.Generator | None
    state: Tensor | None  # state of that stream before; None if it draws nothing


class Tape:
    """The operations of one block, in order."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._storages: dict[int, Any] = {}

    def ref(self, tensor: Tensor) -> _Ref:
        """The name of a tensor on the meta device."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = _weak(storage)
        shape, stride = tuple(tensor.shape), tensor.stride()
        return _Ref(storage._cdata, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def find(self, tensor: Tensor) -> _Ref | None:
        """The name of a tensor that the tape has made; None for another."""
        if not tensor.is_meta or tensor.untyped_storage()._cdata not in self._writers:
            return None
        return self.ref(tensor)

    @property
    def is_spent(self) -> bool:
        """Whether nothing refers to its tensors any longer."""
        return all(storage.expired() for storage in self._storages.values())

    def add(self, operation: _Operation) -> None:
        """Record an operation."""
        for storage in operation.writes:
            self._writers.setdefault(storage, []).append(len(self._operations))
        self._operations.append(operation)

    def value(self, wanted: _Ref) -> Tensor:
        """Compute a tensor on the host. It shares no memory with other answers.

        Raises:
            TargetError: A tensor that the values were taken from was written since.
        """
        needed = self._needed(wanted.storage)
        last_use = {storage: n for n in needed for storage in self._touched(n)}
        real: dict[int, Tensor] = {}  # by storage, any tensor of it

        def resolved(ref: _Ref) -> Tensor:
            return ref.within(real[ref.storage])

        for number in needed:
            operation = self._operations[number]
            made = _run(operation, resolved)
            for ref, tensor in zip(operation.made, made, strict=True):
                if ref.storage not in real:
                    if tensor.stride() != ref.stride or tensor.storage_offset() != ref.offset:
                        # Laid out as the ref says, so that views of it mean the same.
                        like = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
                        tensor = like.copy_(tensor)
                    real[ref.storage] = tensor
            # Freed after its last use: a model that ties or copies layers would hold all at once.
            for storage in self._touched(number):
                if last_use[storage] == number and storage != wanted.storage:
                    real.pop(storage, None)
        return wanted.within(real[wanted.storage])

    def _touched(self, number: int) -> frozenset[int]:
        operation = self._operations[number]
        return operation.reads | operation.writes

    def _needed(self, storage: int) -> list[int]:
        """The operations on which a storage depends, in order."""
        # Backwards from the storage: who wrote it, and what those read. All writers count, as a
        # write in place may leave a part of the storage as it was. Each storage is asked once.
        found: set[int] = set()
        waiting, known = [storage], {storage}
        while waiting:
            for number in self._writers.get(waiting.pop(), ()):
                found.add(number)
                new = self._operations[number].reads - known
                known |= new
                waiting += new
        return sorted(found)


def _run(operation: _Operation, resolved: Callable[[_Ref], Tensor]) -> list[Tensor]:
    """Run an operation on the host; its tensors, in order of ``made``."""
    args, kwargs = _on_host(operation.arguments, resolved)
    # With the stream's state of then, and the present one put back: values have the bits of a model
    # built the usual way, and computing them late disturbs no draw of the script.
    stream = operation.generator or torch.default_generator
    before = None if operation.state is None else stream.get_state()
    try:
        if operation.state is not None:
            stream.set_state(operation.state)
        with torch.no_grad():
            return _tensors_in(operation.function(*args, **kwargs))
    finally:
        if before is not None:
            stream.set_state(before)


def _on_host(arguments: Any, resolved: Callable[[_Ref], Tensor]) -> Any:
    def real(value: Any) -> Any:
        if isinstance(value, _Ref):
            return resolved(value)
        if isinstance(value, _Given):
            return value.value()
        return _HOST if value == _META else value

    return _mapped(arguments, (_Ref, _Given, torch.device), real)


def _mapped(values: Any, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """Nested values with each object of some kinds replaced."""
    if isinstance(values, kinds):
        return change(values)
    if isinstance(values, dict):
        return {key: _mapped(value, kinds, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        found = [_mapped(value, kinds, change) for value in values]
        return type(values)(*found) if hasattr(values, "_fields") else type(values)(found)
    return values


def _tensors_in(values: Any, depth: int = 0) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if depth > _DEEPEST:
        return []
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors_in(value, depth + 1)]
    return []


class _OnMeta(TorchFunctionMode):
    """Makes torch's factories use the meta device, unless they are told a device.

    Tensors deny that they are on it: functions such as ``nn.init.orthogonal_`` would do nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:  # a new object at each access
            return False
        if func in _FACTORIES and kwargs.get("device") is None and "out" not in kwargs:
            # Of two tensors ``torch.normal`` is no factory: it takes the device of its arguments.
            if not any(isinstance(value, Tensor) for value in args):
                kwargs = {**kwargs, "device": _META}
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts the operations on meta tensors onto a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator: on meta tensors for the shapes, on real ones where values are asked."""
        kwargs, tape = kwargs or {}, self._tape
        given = _tensors_in((args, kwargs))
        makes_meta = kwargs.get("device") == _META
        if not makes_meta and not any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        recorded = _mapped((tuple(args), kwargs), Tensor, self._noted)
        written = _written(func, args, kwargs)
        # Operators whose answer, or its shape, depends on values (``item``, ``nonzero``), and those
        # that leave the meta device: the script is to see real values, so these are computed now.
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        is_real = kwargs.get("device") not in (None, _META)
        if is_real or tags & set(func.tags) or any(not tensor.is_meta for tensor in written):
            real_args, real_kwargs = _on_host(recorded, tape.value)
            return func(*real_args, **real_kwargs)
        generator, state = kwargs.get("generator"), None
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Twice the work of a draw: now, for the stream to advance, and when the value is asked.
            state = (generator or torch.default_generator).get_state()
            self._draw(func, recorded)
        on_meta = _mapped((tuple(args), kwargs), Tensor, _shape_of)
        answer = func(*on_meta[0], **on_meta[1])
        made = tuple(tape.ref(tensor) for tensor in _tensors_in(answer))
        sources = frozenset(tape.ref(tensor).storage for tensor in given if tensor.is_meta)
        targets = frozenset(tape.ref(tensor).storage for tensor in written)
        new = frozenset(ref.storage for ref in made) - sources
        if new or targets:  # else it only makes views
            tape.add(_Operation(func, recorded, sources, new | targets, made, generator, state))
        return answer

    def _noted(self, tensor: Tensor) -> _Ref | _Given:
        if tensor.is_meta:
            found = self._tape.find(tensor)
            if found is None:
                raise TargetError(
                    "a tensor on the meta device that was made before hf.deferred() is used inside",
                    hint="make it inside the block",
                )
            return found
        is_small = tensor.numel() * tensor.element_size() <= _COPIED_BYTES
        own = tensor.clone() if is_small else tensor
        return _Given(own, own._version)

    def _draw(self, func: Any, recorded: Any) -> None:
        """Run a random operation once, so that its stream advances as usual."""
        is_fill = func._schema.name.removeprefix("aten::") in _FILLS

        args, kwargs = recorded
        if is_fill:
            ref = args[0]
            scratch = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype)
            args = (scratch, *args[1:])
        args, kwargs = _on_host((args, kwargs), self._tape.value)
        with torch.no_grad():
            func(*args, **kwargs)


def _shape_of(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += _tensors_in(value)
    return found


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The tape and name of a value that was not computed yet."""

    tape: Tape
    ref: _Ref


@dataclass(slots=True)
class _Blocks:
    """The blocks of this process. Tensors are held weakly, and told apart by identity."""

    tapes: list[Tape] = field(default_factory=list)
    # Of each parameter made in a block, the number of writes to it in the block.
    versions: MutableMapping[Tensor, int] = field(default_factory=WeakIdKeyDictionary)
    # The parameters that ``settle`` has taken, and that were not filled in yet.
    waiting: MutableMapping[Tensor, _Waiting] = field(default_factory=WeakIdKeyDictionary)


_BLOCKS = _Blocks()


@contextmanager
def deferred() -> Iterator[None]:
    """Build a model inside without memory for its parameters; ``prepare`` fills them in.

    Each worker of a pipeline keeps the values of its own stages only, so the whole model need fit
    neither a device nor the host. The values, and all random numbers after the block, are the bits
    that a model built the usual way has. Write to parameters inside the block, not between it and
    ``prepare``.

    Example:
        >>> import torch
        >>> from hetflow import runtime as hf
        >>> with hf.deferred():
        ...     model = torch.nn.Linear(2, 1)
        >>> model.weight.is_meta
        True
        >>> job = hf.prepare(model)
        >>> model.weight.is_meta
        False

    Where operators are counted on tensors without values (``hetflow profile --device spec:NAME``)
    the block does nothing: such tensors take no memory.

    Raises:
        TargetError: The block uses a meta tensor that was made outside of it.
    """
    if detect_fake_mode() is not None:
        yield
        return
    tape = Tape()
    made: list[nn.Parameter] = []

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            made.append(parameter)

    hook = nn.modules.module.register_module_parameter_registration_hook(note)
    try:
        with _OnMeta(), _Recorder(tape), warnings.catch_warnings():
            # Of ``load_state_dict``: the values are not lost here.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            yield
    finally:
        hook.remove()
        _BLOCKS.tapes.append(tape)
        for parameter in made:
            _BLOCKS.versions[parameter] = parameter._version


def settle(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Take a model from ``deferred()``; afterwards nothing of it is on the meta device.

    Buffers and other tensors of its modules get their values. Parameters get stand-ins on the host
    that take no memory; each is filled in by ``fill``, or never.

    Raises:
        TargetError: A tensor is on the meta device without a record of its value, or was written
            after the block; names it.
    """
    filled: dict[int, Tensor] = {}

    def value(tensor: Tensor, name: str) -> Tensor:
        if _is_empty(tensor) and id(tensor) not in filled:
            waiting = _waiting_of(tensor, name)
            filled[id(tensor)] = waiting.tape.value(waiting.ref)
        return filled.get(id(tensor), tensor)

    for path, module in model.named_modules():
        for held in (module._buffers, vars(module)):
            for key, entry in list(held.items()):
                if any(_is_empty(tensor) for tensor in _tensors_in(entry)):
                    name = f"{path}.{key}" if path else key
                    held[key] = _mapped(entry, Tensor, partial(value, name=name))
    named = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                named.setdefault(id(parameter), (f"optimizers[{number}]", parameter))
        for parameter, state in getattr(optimizer, "state", {}).items():
            name = f"{_STATE} of {named.get(id(parameter), ('a parameter',))[0]}"
            for key, entry in state.items():
                if isinstance(entry, Tensor):
                    state[key] = value(entry, name)
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # torch refuses to swap a tensor with weak references
    for name, parameter in named.values():
        if parameter.is_meta:
            _stand_in(parameter, _waiting_of(parameter, name))
    for module in recurrent:
        module._init_flat_weights()
    _BLOCKS.tapes = [tape for tape in _BLOCKS.tapes if not tape.is_spent]


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, nn.Parameter)


def _waiting_of(tensor: Tensor, name: str) -> _Waiting:
    for tape in _BLOCKS.tapes:
        ref = tape.find(tensor)
        if ref is not None:
            before = _BLOCKS.versions.get(tensor)
            if before is not None and before != tensor._version:
                raise TargetError(
                    f"{name} was written after the block of hf.deferred()", hint=_INSIDE
                )
            return _Waiting(tape, ref)
    what = "optimizer" if name.startswith(_STATE) else "model"
    raise TargetError(
        f"{name} is on the meta device, so it has no value",
        hint=f"build the {what} inside `with hf.deferred():`, which records the values",
    )


def _stand_in(parameter: nn.Parameter, waiting: _Waiting) -> None:
    """Turn a parameter on the meta device into one on the host; it stays the same object."""
    ref = waiting.ref
    # Torch refuses to swap a tensor that has weak references.
    _BLOCKS.versions.pop(parameter, None)
    # One number, expanded: the parameter's shape without its memory.
    zero = torch.zeros((), dtype=ref.dtype).expand(ref.size)
    other = nn.Parameter(zero, requires_grad=parameter.requires_grad)
    other.__class__ = type(parameter)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    _BLOCKS.waiting[parameter] = waiting


def initial_value(parameter: Tensor) -> Tensor:
    """A parameter's value on its device, or its initial one on the host if it has none yet."""
    waiting = _BLOCKS.waiting.get(parameter)
    return parameter.detach() if waiting is None else waiting.tape.value(waiting.ref)


def forget(parameter: nn.Parameter) -> None:
    """Leave a parameter without its initial value: another worker has it."""
    _BLOCKS.waiting.pop(parameter, None)


def fill(parameter: nn.Parameter, device: torch.device, *, computes: bool) -> None:
    """Give a parameter that waits for its value memory on a device; others stay as they are."""
    waiting = _BLOCKS.waiting.pop(parameter, None)
    if waiting is None:
        return
    if computes:
        parameter.data = waiting.tape.value(waiting.ref).to(device)
    else:
        parameter.data = torch.empty(waiting.ref.size, dtype=waiting.ref.dtype, device=device)


def fill_model(model: nn.Module, device: torch.device) -> None:
    """Give a whole model from ``deferred()`` its values; of any other nothing changes.

    Raises:
        TargetError: As ``settle``.
    """
    settle(model, ())
    for parameter in model.parameters():
        fill(parameter, device, computes=True)

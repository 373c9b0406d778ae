"""Evaluate a model on the stages where they are: no worker ever holds the whole model.

Inside ``job.evaluation()`` any worker may call the model: all with the same inputs, each with its
own, or only some of them. The workers meet in rounds. In a round each worker either makes one call
or has left the script's block; equal calls count as one. Each call then passes from stage to stage,
and its answer goes to the workers that made it. A worker that has left the block runs its stages
for the others until all have left. So any mixture of calls ends.

Values travel as plain bytes, as in checkpoints: nothing is unpickled.
"""

import copy
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ...devices.collectives import wire_device
from ...schema.errors import TargetError
from .. import peers
from ..checkpoints.checkpoint import DTYPES
from ..group import Place
from ..tensor.operators import TensorGroup, gather_tokens_from, scatter_tokens_to
from ..wire import Message, carried
from .channels import Holding, Holdings
from .cut import CALL, StageModule, by_placeholder
from .transport import Transport

_ALONE = TensorGroup()
_DIGEST_WORDS = 4  # 8 bytes each
_HINT = "job.evaluation(whole=True) brings the whole model to every worker"


def message_of(value: Any, what: str) -> Message:
    """Make a message of values, with the tensors where they are.

    Raises:
        TargetError: They hold an object that is no plain data, or a tensor of a strange dtype.
    """
    strange = f"{what} with a {{}} tensor"
    try:
        return Message.of(value, what, strange=strange, copy=Tensor.detach)
    except TargetError as error:
        raise TargetError(f"a pipeline cannot send {error.message}", hint=_HINT) from None


class StageEvaluation:
    """The calls of a model in evaluation mode, as one worker of a pipeline takes part in them.

    Args:
        parts: [stages] the stages, cut in evaluation mode.
        replicas: [stages] the tensor-parallel groups that hold each stage, as ranks.
        check_call: Refuses arguments for which the stages are not valid.
        holdings: [stages] what each worker of a group holds of a stage's outputs; by default all.
        passing: Makes a context for every pass.

    Attributes:
        num_runs: How many calls have passed through the stages; equal calls count once.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[StageModule],
        replicas: Sequence[Sequence[Sequence[int]]],
        place: Place,
        transport: Transport | None,
        signature: inspect.Signature,
        check_call: Callable[[Mapping[str, Any]], None],
        *,
        group: TensorGroup = _ALONE,
        holdings: Sequence[Holdings] = (),
        passing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._model, self._parts, self._replicas = model, parts, replicas
        self._holdings, self._group, self._passing = holdings or [()] * len(parts), group, passing
        self._place, self._transport, self._check_call = place, transport, check_call
        self._signature = signature
        self.num_runs = 0

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Call the model; see ``job.evaluation``. The answer is on this worker's device.

        Raises:
            TargetError: The script has put the model back into training mode, or the call cannot
                be run by parts.
        """
        if self._model.training:
            raise TargetError(
                "the model is in training mode inside job.evaluation()",
                hint=f"leave it in evaluation mode; {_HINT}",
            )
        self._check_call(by_placeholder(self._signature, arguments, named))
        kind = self._place.device.type
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        autocast = [torch.is_autocast_enabled(kind), dtype]
        own = message_of([list(arguments), named, autocast], "the call")
        return self._round(own)[1]

    def serve(self) -> None:
        """Run this worker's stages for the other workers' calls, until all have left."""
        while self._round(None)[0]:
            pass

    def _round(self, own: Message | None) -> tuple[bool, Any]:
        """Make one round of calls: whether any worker made one, and the answer to the own one."""
        # A worker that has left gives None, and serves the others until none has a call.
        answer, calls = None, self._meet(own)
        for number, callers in enumerate(calls):
            is_own = self._place.rank in callers
            found = self._run(number, own if is_own else None, callers)
            answer = found if is_own else answer
        return bool(calls), answer

    def _meet(self, own: Message | None) -> list[list[int]]:
        """The calls of a round: of each, the ranks that make it. Call it on all workers."""
        if self._transport is None:
            return [] if own is None else [[self._place.rank]]
        # [whether there is a call, digest of its arguments]: equal calls run once for all callers,
        # as in an evaluation that every worker makes of the same batches.
        row = torch.zeros(1 + _DIGEST_WORDS, dtype=torch.int64)
        if own is not None:
            row[0] = 1
            row[1:].view(torch.uint8).copy_(
                torch.frombuffer(bytearray(own.digest), dtype=torch.uint8)
            )
        rows = row.new_empty(self._place.world_size * len(row))
        peers.all_gather(rows, row, group=self._transport.up)
        calls: dict[tuple[int, ...], list[int]] = {}
        for rank, (is_call, *digest) in enumerate(rows.view(-1, len(row)).tolist()):
            if is_call:
                calls.setdefault(tuple(digest), []).append(rank)
        return list(calls.values())

    def _run(self, number: int, own: Message | None, callers: Sequence[int]) -> Any:
        """Pass a call through all stages; on the callers, its answer."""
        self.num_runs += 1
        # The calls of a round take the replicas in turn.
        rank, groups = self._place.rank, [held[number % len(held)] for held in self._replicas]
        needed = sorted({rank for group in groups for rank in group} - set(callers))
        # From here on all workers go through the same list of messages in the same order, so none
        # waits for one that waits for it.
        for other in needed:
            own = self._carry(own, callers[0], other)
        if rank not in callers and rank not in needed:
            return None
        assert own is not None
        arguments, named, autocast = own.value(self._place.device)
        call = tuple(arguments), named
        given = {**by_placeholder(self._signature, *call), CALL: call}
        values: Any = ()
        for stage, (part, group) in enumerate(zip(self._parts, groups, strict=True)):
            if stage:
                values = self._pass_on(values, self._holdings[stage - 1], groups[stage - 1], group)
            if rank in group:
                part.refresh_buffers()
                kind, (enabled, dtype) = self._place.device.type, autocast
                with torch.autocast(kind, DTYPES[dtype], enabled=enabled), self._passing():
                    values = part.module(*(given[name] for name in part.arguments), *values)
        last = groups[-1]
        for caller in callers:
            if caller not in last and rank in (caller, last[0]):
                sent = message_of(portable(values), "the answer") if rank == last[0] else None
                sent = self._carry(sent, last[0], caller)
                if rank == caller and sent is not None:
                    values = made_again(sent.value(self._place.device))
        return self._parts[-1].answer(values) if rank in callers else None

    def _pass_on(
        self, made: Any, holdings: Holdings, senders: Sequence[int], receivers: Sequence[int]
    ) -> Any:
        """Send a stage's values to the workers of the next; return those for this worker."""
        rank = self._place.rank
        # A part of the tokens fits no worker of a group of another degree: tokens are joined before
        # and spread again behind.
        is_unlike = Holding.TOKENS in holdings and len(senders) != len(receivers)
        if is_unlike and rank in senders:
            made = self._of_tokens(gather_tokens_from, made, holdings)
        found = made
        message = message_of(list(made), "a value between stages") if rank in senders else None
        for receiver in receivers:
            # Of equal degrees lane to lane; else receivers are spread evenly over senders.
            sender = senders[receivers.index(receiver) * len(senders) // len(receivers)]
            if sender != receiver and rank in (sender, receiver):
                passed = self._carry(message, sender, receiver)
                if rank == receiver and passed is not None:
                    found = passed.value(self._place.device)
        if is_unlike and rank in receivers:
            found = self._of_tokens(scatter_tokens_to, found, holdings)
        return found

    def _of_tokens(
        self,
        change: Callable[[Tensor, TensorGroup], Tensor],
        values: Sequence[Any],
        holdings: Holdings,
    ) -> list[Any]:
        pairs = zip(values, holdings, strict=True)
        return [change(v, self._group) if held is Holding.TOKENS else v for v, held in pairs]

    def _carry(self, message: Message | None, source: int, target: int) -> Message | None:
        """Send a message from one worker to another; return what this worker then has."""
        # Called on all workers, so that the list of messages reads alike everywhere.
        rank = self._place.rank
        if rank not in (source, target):
            return message
        wire = wire_device(self._place.device)

        def carry(tensor: Tensor) -> Tensor:
            tensor = tensor.to(wire)
            if rank == source:
                peers.send(tensor, dst=target)
            else:
                peers.receive(tensor, src=source)
            return tensor

        return carried(message if rank == source else None, carry)


@contextmanager
def refusing_calls(module: nn.Module, name: str) -> Iterator[None]:
    """Within the context, refuse calls of a module whose parameters are on other workers."""

    def refuse(module: nn.Module, arguments: object) -> None:
        raise TargetError(
            f"{name or 'the model'} is called by itself, but its parameters are on another worker",
            hint=f"call the whole model; {_HINT}",
        )

    handle = module.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


# Split a model's answer into a list of tensors and its form, so that the tensors can be sent.
#
# torch.export returns containers that pytree knows. Models also return dataclasses, mappings of
# their own, and objects that no training step reads (transformers' cache of keys and values). Such
# objects are left out, and a script that uses one gets an error that says so.
#
# An answer that goes to another worker is sent as plain values; a class goes by its name.

_TRACED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
Rebuild = Callable[[Iterator[Any]], Any]


class LeftOut:
    """Replaces, in an answer, an object that stages cannot send."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        """Refuse any use of the object."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise TargetError(
            f"the model's answer holds a {self._kind}, which a pipeline leaves out",
            hint="let the model answer with tensors (transformers: use_cache=False)",
        )


def taken_apart(answer: Any) -> tuple[list[Any], Rebuild]:
    """Split an answer into its tensors and a function that rebuilds its form.

    Returns:
        The tensors (while a model is traced, also its symbolic numbers), and a function. It takes
        an iterator of as many tensors and returns an answer of the same form.
    """
    leaves, spec = _pytree.tree_flatten(answer)
    tensors: list[Any] = []
    makers: list[Rebuild] = []
    for leaf in leaves:
        inside, make = _leaf(leaf)
        tensors += inside
        makers.append(make)
    return tensors, lambda given: _pytree.tree_unflatten([make(given) for make in makers], spec)


def _leaf(value: Any) -> tuple[list[Any], Rebuild]:
    if isinstance(value, _TRACED):
        return [value], next
    if value is None or isinstance(value, _PLAIN):
        return [], lambda given: value
    if isinstance(value, Mapping):
        return _entries(dict(value), copy.copy(value), operator.setitem)
    if is_dataclass(value):
        found = {field.name: getattr(value, field.name, None) for field in fields(value)}
        # Bypasses a frozen dataclass, which is safe: nothing else refers to the copy yet.
        return _entries(found, copy.copy(value), object.__setattr__)
    left_out = LeftOut(type(value).__name__)
    return [], lambda given: left_out


def _entries(
    found: dict[Any, Any], empty: Any, put: Callable[[Any, Any, Any], None]
) -> tuple[list[Any], Rebuild]:
    tensors: list[Any] = []
    makers: dict[Any, Rebuild] = {}
    for key, value in found.items():
        inside, makers[key] = taken_apart(value)
        tensors += inside
        put(empty, key, None)  # it must not keep traced values alive

    def make(given: Iterator[Any]) -> Any:
        made = copy.copy(empty)
        for key, maker in makers.items():
            put(made, key, maker(given))
        return made

    return tensors, make


def portable(answer: Any) -> Any:
    """An answer as nested plain values and tensors, each with its kind; see ``made_again``."""
    if answer is None or isinstance(answer, Tensor | bool | int | float | complex | str):
        return ["value", answer]
    kind = type(answer)
    name = [kind.__module__, kind.__qualname__]
    if isinstance(answer, tuple) and hasattr(answer, "_fields"):
        return ["named", name, [portable(entry) for entry in answer]]
    if isinstance(answer, list | tuple):
        plain = "list" if isinstance(answer, list) else "tuple"
        return [plain, [portable(entry) for entry in answer]]
    if isinstance(answer, Mapping):
        pairs = [[key, portable(entry)] for key, entry in answer.items()]
        return ["dict", pairs] if kind is dict else ["mapping", name, pairs]
    if is_dataclass(answer):
        found = [(field.name, getattr(answer, field.name, None)) for field in fields(answer)]
        return ["fields", name, [[key, portable(entry)] for key, entry in found]]
    return ["left out", kind.__name__]


def made_again(form: Any) -> Any:
    """The answer of which ``portable`` made these values; what it left out refuses any use."""
    kind, *rest = form
    if kind == "value":
        return rest[0]
    if kind in ("list", "tuple"):
        entries = [made_again(entry) for entry in rest[0]]
        return entries if kind == "list" else tuple(entries)
    if kind == "dict":
        return {key: made_again(entry) for key, entry in rest[0]}
    if kind == "left out":
        return LeftOut(rest[0])
    module, name = rest[0]  # of a class that this process has loaded too: it runs the same script
    made_by: Any = operator.attrgetter(name)(sys.modules[module])
    if kind == "named":
        return made_by(*(made_again(entry) for entry in rest[1]))
    made = made_by.__new__(made_by)
    for key, entry in rest[1]:
        if kind == "mapping":
            made[key] = made_again(entry)
        else:
            object.__setattr__(made, key, made_again(entry))
    return made

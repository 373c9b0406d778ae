"""Scripts as they are under plans that share states: each worker keeps a share of the model.

A model that DistributedDataParallel or fully_shard wraps is whole until its first pass of training.
Then ``runtime/sharding`` takes the place of DistributedDataParallel's reducer: between steps a
parameter, its gradient and its optimizer's state are this worker's slice.

A worker alone may need what only all have: the weights, to evaluate, a ``state_dict``, or one
tensor that the script reads (``sliced.py``). It asks, and the others answer where workers next
meet: as a step begins, at an exchange, at the end. Until all have said that they ask nothing, none
goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from ...schema.options import Shard, option
from .. import peers
from ..agreement.agreement import CompareSchedule
from ..checkpoints.checkpoint import copy_to_host
from ..group import Place
from ..log import log
from ..repeated_layers import agreed_blocks, listed_blocks
from ..session import Session
from ..setup import beyond_masters, is_elementwise, keeps_masters, warning_of
from ..sharding.precision import AS_IS, Precision
from ..sharding.sliced import plain, plainly
from ..sharding.states import SharedStates
from .losses import Losses

_MOST = 1 << 24  # parameters of a model


class SharingTraining(Protocol):
    """What is needed of a worker's training."""

    place: Place
    losses: Losses
    optimizers: list[torch.optim.Optimizer]


class SharedModel:
    """One wrapped model whose states the workers share.

    Attributes:
        states: This worker's share; None before the first pass of training.
        is_whole: Whether all weights are here, until the next step begins.
        is_open: Whether a step has begun whose gradients are not all summed.
        runs: Whether a pass has begun that has not gone back.
    """

    def __init__(
        self, training: SharingTraining, module: nn.Module, sharing: "SharedModels"
    ) -> None:
        self._training, self.module, self._sharing = training, module, sharing
        self.states: SharedStates | None = None
        self.is_whole, self.is_open, self.runs, self._syncs = True, False, False, True
        self._asker: nn.Module | None = None  # whose state dict is made
        self._copies: dict[int, Tensor] = {}
        # Behind what begins a pass of a module that fully_shard has wrapped.
        module.register_forward_pre_hook(lambda *_: self._before_forward())
        for part in module.modules():
            before, after = part.register_state_dict_pre_hook, part.register_state_dict_post_hook
            before(lambda part, *_: self._before_state(part))  # type: ignore[no-untyped-call]
            after(lambda *told: self._after_state(*told))  # type: ignore[no-untyped-call]
        sharing.answer()
        for tensor in (*module.parameters(), *module.buffers()):
            peers.broadcast(tensor.detach(), src=0)

    @plainly
    def begin(self, *, syncs: bool) -> None:
        """Begin a pass of training; the first one of a step begins the step.

        Args:
            syncs: Whether the step ends with this pass's backward.
        """
        self._syncs, losses = syncs, self._training.losses
        self.show(slices=False)
        if self.runs:
            return
        losses.leave()
        self._sharing.answer()
        if self.states is None:
            self._share()
        states = self.states
        assert states is not None
        if not self.is_open:
            # Gradients of earlier steps are sums already: they wait aside, and ``end`` adds them.
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    states.set_aside[parameter], parameter.grad = parameter.grad, None
            states.begin()
            self.is_open, self.is_whole = True, False
        if losses.is_recording:  # a trial runs its operators again, which read the weights
            states.make_whole(runs=True)
        states.enter(0)
        self.runs = True
        losses.enter()

    def _share(self) -> None:
        training, sharing = self._training, self._sharing
        place = training.place
        watch = CompareSchedule(0, watches_first=False)
        session = Session(self.module, (), place, seed=place.start.seed, watch=watch)
        listed = listed_blocks(self.module, sharing.lists(self.module))
        # A script may train several models, of which the plan knows one.
        blocks = agreed_blocks(
            self.module, listed, sharing.planned_blocks, speaks=place.rank == 0, is_only=False
        )
        precision, config = sharing.precision(self.module), place.start.config
        warning = beyond_masters(self.module, precision, config)
        if config is not None and keeps_masters(self.module, precision, config):
            warning = warning_of(training.optimizers, config.optimizer, masters=True) or warning
        if warning is not None and not place.rank:
            log.info(warning)
        self.states = SharedStates(
            session,
            sharing.shard,
            sharing.shares,
            blocks=blocks,
            precision=precision,
            casts=sharing.casts(self.module),
        )
        self.states.treat(place.activations)
        for optimizer in sharing.loaded:
            self.states.cut(optimizer)
        self.states.bring = partial(sharing.bring, self)

    def show(self, *, slices: bool) -> None:
        """See ``SharedStates``; before the first pass of training parameters are whole."""
        if self.states is not None and slices:
            self.states.show_slices(gradients=False)
        elif self.states is not None:
            self.states.hide_slices()

    @plainly
    def make_slices(self) -> None:
        """Let weights that were whole for an evaluation go before an update."""
        assert self.states is not None
        self.states.keep_own()
        self.is_whole = False
        self.show(slices=True)

    def has_run(self) -> None:
        """Note that the script goes on behind a forward pass, where not all need be whole."""
        if self.runs:
            self.show(slices=True)

    @plainly
    def end(self) -> None:
        """End the pass that has gone back, and the step where it syncs."""
        states = self.states
        if states is None or not self.runs:
            return
        self.runs = False
        states.leave()
        if not self._syncs:
            return
        states.launch_rest()
        states.wait()
        # What no pass of any worker has used keeps no gradient, so that optimizers leave it alone,
        # as in one process.
        used = torch.ones(states.num_parameters)
        used[states.unused()] = 0
        used = used.to(self._training.place.device)
        peers.all_reduce(used, op=torch.distributed.ReduceOp.MAX)
        states.drop([number for number, is_used in enumerate(used.tolist()) if not is_used])
        for parameter, gradient in states.set_aside.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        states.set_aside.clear()
        self.is_open = False
        states.show_slices(gradients=True)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set gradients of earlier steps to nothing, between a forward pass and its backward."""
        if self.states is not None:
            for parameter in parameters:
                self.states.set_aside.pop(parameter, None)

    def _before_forward(self) -> None:
        if self.states is not None and not self.runs:
            self._sharing.whole()

    # State dicts: whole

    def _before_state(self, part: nn.Module) -> None:
        if self.states is not None and self._asker is None:
            self._asker, self._copies = part, self._sharing.weights()

    def _after_state(self, part: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if self._asker is not part:
            return
        for name, parameter in part.named_parameters(prefix[:-1], remove_duplicate=False):
            whole = self._copies.get(id(parameter))
            if whole is not None and name in state:
                state[name] = whole
        self._asker, self._copies = None, {}


class SharedModels:
    """All models whose states the workers share, and what workers ask of each other.

    Args:
        training: This worker's training.
        shard: What is shared.
        shares: [workers] of the states, in any unit.
        planned_blocks: See ``agreed_blocks``.

    Attributes:
        loaded: Optimizers that have loaded a state before it was shared.
        lists: What the script lists as blocks of a model.
        precision: The types that it asks for of a model.
        casts: See ``SharedStates``.
    """

    def __init__(
        self,
        training: SharingTraining,
        shard: Shard,
        shares: Sequence[int],
        planned_blocks: Sequence[str] = (),
    ) -> None:
        self._training, self.shard, self.shares = training, shard, shares
        self.planned_blocks = planned_blocks
        self.lists: Callable[[nn.Module], Any] = lambda model: ()
        self.precision: Callable[[nn.Module], Precision] = lambda model: AS_IS
        self.casts: Callable[[nn.Module], Sequence[nn.Module]] = lambda model: ()
        self._models: list[SharedModel] = []
        self._plain: list[Any] = []  # open contexts of updates
        self._reads: dict[int, Tensor] = {}  # by what is asked for, this worker's slice
        self.loaded: WeakSet[torch.optim.Optimizer] = WeakSet()

    @property
    def in_rounds(self) -> bool:
        """Whether all workers meet in every pass."""
        return self.shard != "optimizer"

    @property
    def runs(self) -> bool:
        """Whether a pass of training has begun that has not gone back."""
        return any(model.runs for model in self._models)

    @property
    def is_open(self) -> bool:
        """Whether a step has begun whose gradients are not all summed."""
        return any(model.is_open for model in self._models)

    def of(self, module: nn.Module) -> SharedModel:
        """The shared model of a script's."""
        for known in self._models:
            if known.module is module:
                return known
        self._models.append(SharedModel(self._training, module, self))
        return self._models[-1]

    def before_backward(self) -> None:
        """Make room for the gradients that a backward pass will make.

        Raises:
            TargetError: No model has run since the last one.
        """
        running = [model for model in self._models if model.runs]
        if not running:
            raise TargetError(
                "the script goes back where no model ran in training mode since it last did, and "
                "workers share the states",
                hint="add the losses up and go back once; or train without " + option("shard"),
            )
        for model in running:
            assert model.states is not None
            model.show(slices=False)
            model.states.await_gradients()

    def end_pass(self, reached: Iterable[nn.Module]) -> None:
        """End the passes that have gone back.

        Args:
            reached: Models that the backward pass went through; others may go back later.
        """
        met = [model for model in self._models if model.runs and model.module in reached]
        # No part of a loss; and a replay would begin with memory that layers have let go.
        with self._training.losses.paused():
            for model in met or self._models:
                model.end()

    def clears(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Note that the script clears gradients; whether that is done: a step of theirs is open."""
        opened = [model for model in self._models if model.is_open]
        given = list(parameters)
        for model in opened:
            model.forget(given)
        held = {id(p) for model in opened for p in model.module.parameters()}
        return bool(held) and {id(p) for p in given} <= held

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this worker's slices of a state that the optimizer's constructor made (Adagrad).

        Raises:
            TargetError: The optimizer does not update each number by itself.
        """
        if not is_elementwise(optimizer):
            raise TargetError(
                f"{type(optimizer).__name__} is none of torch's optimizers that update each "
                "number by itself, and workers hold slices of parameters",
                hint="use Adam, AdamW or SGD; or solve without " + option("shard"),
            )
        self.load(optimizer)

    def begin_update(self) -> None:
        """Let an optimizer find slices, and see them as what they are until ``end_update``."""
        for model, _ in self._shared():
            if model.is_whole and not model.is_open:
                model.make_slices()
        self._plain.append(plain())
        self._plain[-1].__enter__()

    def end_update(self) -> None:
        """End an optimizer's update."""
        if self._plain:
            self._plain.pop().__exit__(None, None, None)

    def scale_by(self, scaler: "torch.amp.GradScaler") -> None:
        """Let a scaler skip a step where any worker's share has an overflow."""
        for _, states in self._shared()[:1]:
            states.share_overflows(scaler)

    # What workers ask of each other

    @plainly
    def _meet(
        self, *, whole: bool = False, weights: bool = False, moments: bool = False, key: int = 0
    ) -> tuple[bool, dict[Any, Tensor]]:
        """Meet all workers, and give each what it asks for: whether any did, and copies by ids."""
        # [whether to bring all weights, to copy them, to copy the optimizers' states; what slice to
        # bring together, as ``bring`` numbers them]. By the maximum all do what any has asked for.
        own = torch.tensor([whole, weights, moments, key], dtype=torch.float64)
        own = own.to(self._training.place.device)
        peers.all_reduce(own, op=torch.distributed.ReduceOp.MAX)
        asked, copies = [int(entry) for entry in own.tolist()], dict[Any, Tensor]()
        if asked[3]:
            copies[asked[3]] = self._brought(asked[3])
        for model, states in self._shared() if asked[0] else ():
            states.make_whole()
            model.is_whole = True
        for model, states in self._shared() if asked[1] else ():
            parameters = dict(model.module.named_parameters())
            for name, value in states.in_turn():
                if weights:
                    copies[id(parameters[name])] = copy_to_host(value)
        for optimizer in self._training.optimizers if asked[2] else ():
            for parameter, name, value in self._moments(optimizer):
                if moments:
                    copies[id(parameter), name] = copy_to_host(value)
        return any(asked), copies

    def _shared(self) -> list[tuple[SharedModel, SharedStates]]:
        return [(model, model.states) for model in self._models if model.states is not None]

    def _moments(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """(parameter, name, whole tensor) of an optimizer's state; call it on all workers."""
        for _, states in self._shared():
            places = states.places()
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if id(parameter) in places:
                    flat, number = places[id(parameter)]
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, Tensor) and value.dim():
                            yield parameter, key, flat.whole_of(number, value)

    def bring(self, model: SharedModel, index: int, own: Tensor, is_gradient: bool) -> Tensor:
        """The whole of this worker's slice of a parameter, or of its gradient.

        Raises:
            TargetError: A step has begun; or another worker has no such gradient any more.
        """
        self._check_between()
        key = (self._models.index(model) * _MOST + index) * 2 + is_gradient + 1
        self._reads[key] = own
        with self._training.losses.paused():
            found: dict[Any, Tensor] = {}
            while key not in found:  # another worker may have asked for another one
                found = self._meet(key=key)[1]
        del self._reads[key]
        return found[key]

    def _brought(self, key: int) -> Tensor:
        number, is_gradient = divmod(key - 1, 2)
        states, index = self._models[number // _MOST].states, number % _MOST
        assert states is not None
        own = self._reads.get(key)
        if own is None:
            own = states.own_of(index, is_gradient=bool(is_gradient))
        if is_gradient:
            lacks = torch.tensor(float(own is None), device=self._training.place.device)
            peers.all_reduce(lacks, op=torch.distributed.ReduceOp.MAX)
            if lacks:
                raise TargetError(
                    "the script reads a gradient on some workers that others have cleared by then, "
                    "and workers share it",
                    hint="read gradients on all workers, before zero_grad(); log by one of them",
                )
        assert own is not None
        return states.whole_of(index, own)

    def answer(self) -> None:
        """Give other workers what they ask for, until none does; nothing within a step."""
        if self._shared() and not self.is_open:
            while self._meet()[0]:
                pass

    def whole(self) -> None:
        """Bring all weights to every worker, until the next step begins."""
        if self._shared() and not all(model.is_whole for model in self._models):
            self._check_between()
            self._meet(whole=True)

    def weights(self) -> dict[int, Tensor]:
        """Id of a parameter -> a copy of its whole value on the host."""
        self._check_between()
        found: dict[int, Tensor] = self._meet(weights=True)[1]
        return found

    def state_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict with whole tensors."""
        known = any(each is optimizer for each in self._training.optimizers)
        if not known or not self._shared():
            return state
        self._check_between()
        copies = self._meet(moments=True)[1]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        whole = {
            number: {key: copies.get((id(parameters[number]), key), v) for key, v in own.items()}
            for number, own in state["state"].items()
        }
        return {**state, "state": whole}

    def load(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this worker's slices of what an optimizer has loaded."""
        self.loaded.add(optimizer)
        for _, states in self._shared():
            states.cut(optimizer)

    def _check_between(self) -> None:
        if self.is_open:
            raise TargetError(
                "the script reads the whole model within a step, between a forward pass and the "
                "update, and workers share its states",
                hint="read it after optimizer.step(); for a penalty on weights take the "
                "optimizer's weight_decay, or solve "
                + ("with " + option("shard", "optimizer") if self.in_rounds else "without it"),
            )

    @plainly
    def finish(self) -> None:
        """Bring the whole model to every worker for good."""
        self.answer()
        for model, states in self._shared():
            states.make_whole()
            states.close()
            model.states = None

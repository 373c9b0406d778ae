"""The optimizer under a pipeline: one worker's share of it, and the settings of late updates.

Parameters are numbered through the groups of the script's whole optimizer. State is saved under
these numbers, so the shares of all workers together are the state of the whole.

With sharded state, workers that hold the same parameters update a share each, equal or by memory.
This is stage 1 of ZeRO (Rajbhandari et al., 2020, 5.1). Of the workers that hold a parameter, one
keeps its optimizer state, makes its update and sends the new value to the others. Parameters are
never cut for that, so every update has the bits that it has without sharding, also by an optimizer
that looks at a whole parameter. Gradients stay whole on every worker, for norms and clipping.

Only ``step`` sees the share. At all other times the optimizer's groups hold all parameters of the
worker, so ``zero_grad``, a GradScaler and a learning-rate schedule find what they always find.
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import TargetError
from ...schema.launch import LaunchConfig, PipelineWork
from ...schema.options import option, told
from .. import peers
from ..checkpoints import checkpoint, parts
from ..checkpoints.checkpoint import copy_to_host
from ..checkpoints.restoring import load_optimizers, load_parameters
from ..log import log
from ..session import Session
from ..setup import state_of
from ..tensor.operators import TensorGroup, parts_of_all
from .ownership import Holders, Ownership, in_buckets
from .shares import StageShares
from .stage import StageBuffers
from .synchronise import Synchroniser

BUCKET_BYTES = 25 << 20
"""Bytes of parameters that one collective sends; a larger parameter is sent alone."""
_LEAVE_OUT = "or plan without {shard_optimizer}"


def shares_of(config: LaunchConfig) -> dict[int, float]:
    """Rank -> its part of its stage's state, of the stages whose replicas have unlike shares."""
    found: dict[int, float] = {}
    for stage in config.pipeline.stages if config.pipeline is not None else ():
        held = {ranks: config.workers[ranks[0]].state_share_bytes for ranks in stage.replicas}
        whole = sum(share or 0 for share in held.values())
        found.update(
            {r: share / whole for ranks, share in held.items() for r in ranks if share is not None}
        )
    return found


def keepers_of(
    ownership: Ownership, names: Sequence[str], shares: Mapping[int, float]
) -> dict[str, Holders]:
    """The ranks that keep the optimizer's state of each parameter: one rank for every part of it.

    The largest parameter comes first, and each goes to the replica whose fullest worker has the
    least so far. Say that a stage's parameters have s bytes together, and the largest m. Then with
    d replicas no worker keeps more than (s + (d - 1) m) / d bytes (Graham, 1969); the planner
    counts this. Where replicas have shares (``shares_of``), a parameter goes to who is furthest
    below its own, f s. That one keeps at most f s + (d - 1) m / d; a share of 0 gets nothing.
    Deterministic, and equal on all workers.
    """
    held: dict[int, float] = defaultdict(int)
    found: dict[str, Holders] = {}
    sizes = {name: ownership.held_bytes(name) for name in names}
    for rank, share in shares.items():
        held[rank] = -share * sum(each.get(rank, 0) for each in sizes.values())
    for name in sorted(sizes, key=lambda name: -max(sizes[name].values())):
        kept: list[int] = []
        for replicas in _replicas(ownership, name):
            keeping = [ranks for ranks in replicas if shares.get(ranks[0], 1)] or replicas
            chosen = min(keeping, key=lambda ranks: max(held[rank] for rank in ranks))
            for rank in chosen:
                held[rank] += sizes[name][rank]
            kept += chosen
        found[name] = tuple(sorted(kept))
    return found


def _replicas(ownership: Ownership, name: str) -> list[list[Holders]]:
    """The replicas of a parameter that are cut alike, by the number of parts."""
    # The parts of one replica stay together: a checkpoint joins them within their group.
    lanes = ownership.lanes
    by_parts: dict[int, list[Holders]] = {}
    for rank in ownership.holders[name]:
        ranks = lanes.group(rank) if lanes.is_cut(name, rank) else (rank,)
        replicas = by_parts.setdefault(len(ranks), [])
        if ranks not in replicas:
            replicas.append(ranks)
    return [by_parts[number] for number in sorted(by_parts)]


def check_shardable(optimizer: Any, *, is_main: bool) -> None:
    """Refuse an optimizer whose updates cannot be shared out among workers.

    Raises:
        TargetError: It is no optimizer of torch's kind, so its groups cannot be exchanged.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TargetError(
            f"the state of {name} cannot be sharded: it is no torch.optim.Optimizer",
            hint=told(f"give prepare a torch.optim.Optimizer, {_LEAVE_OUT}"),
        )
    if is_main and not type(optimizer).__module__.startswith("torch.optim."):
        log.warning(
            f"{name} is not one of torch's optimizers: with sharded state it gives the same "
            "parameters only if it updates each parameter by itself"
        )


class ShardedUpdates:
    """Makes an optimizer's ``step`` update this worker's share and exchange the results."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ownership: Ownership,
        keepers: dict[str, Holders],
        rank: int,
        group_of: Callable[[Holders], dist.ProcessGroup],
    ) -> None:
        self._optimizer, self._ownership, self._rank = optimizer, ownership, rank
        self._group_of = group_of
        self._elsewhere = {
            id(ownership.parameters[name])
            for name, ranks in keepers.items()
            if name in ownership.own and rank not in ranks
        }
        # In an order that all members of a set of workers share.
        self._sent: dict[tuple[Holders, int, str], list[str]] = {}
        for name in ownership.parameters:
            alike = ownership.alike_with(name, rank) if name in keepers else ()
            if len(alike) > 1:
                (keeper,) = set(alike) & set(keepers[name])
                dtype = str(ownership.parameters[name].dtype)
                self._sent.setdefault((alike, keeper, dtype), []).append(name)
        self._step = optimizer.step
        optimizer.step = self._stepping()  # type: ignore[method-assign]

    def _stepping(self) -> Callable[..., Any]:
        optimizer = self._optimizer

        def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            """Update this worker's share of the parameters, and get the others' shares."""
            optimizer._opt_called = True  # type: ignore[attr-defined]
            answer = None
            if closure is not None:  # it computes gradients of all parameters
                with torch.enable_grad():
                    answer = closure()
            with self._own_share():
                self._step(**options)
            self._exchange()
            return answer

        # Else a learning-rate scheduler would wrap it as a method, to note that a step was made.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    @contextmanager
    def _own_share(self) -> Iterator[None]:
        """Within the context the optimizer's groups hold this worker's share only."""
        optimizer = self._optimizer
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if getattr(optimizer, hooks, None):
                raise TargetError(
                    f"{type(optimizer).__name__} has hooks on its steps, which would see only this "
                    "worker's share of the parameters",
                    hint=told(f"do it before or after optimizer.step(), {_LEAVE_OUT}"),
                )
        whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in self._elsewhere]
        try:
            yield
        finally:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters

    def _exchange(self) -> None:
        """Send what this worker has updated, and receive what others have."""
        parameters = self._ownership.parameters
        # Sorted: a worker may be in several sets, and all come to all broadcasts in one order.
        for (ranks, keeper, _), names in sorted(self._sent.items()):
            for bucket in in_buckets(names, lambda n: parameters[n].nbytes, BUCKET_BYTES):
                values = [parameters[name].detach() for name in bucket]
                self._send(values, keeper, self._group_of(ranks))

    def _send(self, parameters: list[Tensor], keeper: int, group: dist.ProcessGroup) -> None:
        first = parameters[0]
        if len(parameters) == 1 and first.is_contiguous():
            peers.broadcast(first, src=keeper, group=group)
            return
        is_own = keeper == self._rank
        sizes = [parameter.numel() for parameter in parameters]
        flat = first.new_empty(sum(sizes))
        if is_own:
            torch.cat([parameter.reshape(-1) for parameter in parameters], out=flat)
        peers.broadcast(flat, src=keeper, group=group)
        if not is_own:
            for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
                parameter.copy_(part.view(parameter.shape))


_MIX_A_PARAMETER = ("Adafactor", "Muon")


class OwnShare:
    """Reduces an optimizer to this worker's parameters.

    Args:
        optimizer: The script's optimizer; changed in place.
        ownership: The model's parameters, and which belong to this worker. Make this object before
            they are cut.
        is_sharded: Whether only one of the workers that hold a parameter keeps its state.
        shares: Of a sharded optimizer, as ``shares_of`` gives them.

    Attributes:
        order: Names of all parameters of the whole optimizer.
        keepers: Of a sharded optimizer, the ranks that keep each parameter's state, by name.
        kept: Names of the parameters whose state this worker keeps.

    Raises:
        TargetError: The optimizer holds parameters that are not the model's, or it combines the
            elements of all parameters, or of one that is cut.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ownership: Ownership,
        *,
        rank: int = 0,
        is_sharded: bool = False,
        shares: Mapping[int, float] | None = None,
    ) -> None:
        parameters, own = ownership.parameters, ownership.own
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TargetError(
                "LBFGS needs all gradients at once, and a pipeline has them on several workers",
                hint="use an optimizer that treats each parameter by itself, such as Adam",
            )
        if ownership.cut and type(optimizer).__name__ in _MIX_A_PARAMETER:
            raise TargetError(
                f"{type(optimizer).__name__} needs whole parameters, and a tensor-parallel group "
                f"cuts {min(ownership.cut)}",
                hint="use an optimizer that treats each element by itself, such as AdamW",
            )
        names = {id(parameter): name for name, parameter in parameters.items()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in names for parameter in held):
            raise TargetError("under a pipeline the optimizer may hold the model's parameters only")
        self._optimizer, self._ownership, self._rank = optimizer, ownership, rank
        self.order = [names[id(parameter)] for parameter in held]
        self.keepers: dict[str, Holders] = {}
        if is_sharded:
            self.keepers = keepers_of(ownership, self.order, shares or {})
        self.kept = {name for name in own if rank in self.keepers.get(name, (rank,))}
        self._own = [index for index, name in enumerate(self.order) if name in own]
        self._groups: list[list[int]] = []
        first = 0
        for group in optimizer.param_groups:
            number = len(group["params"])
            self._groups.append(list(range(first, first + number)))
            first += number
            for parameter in group["params"]:
                if names[id(parameter)] not in self.kept:
                    optimizer.state.pop(parameter, None)
            group["params"] = [p for p in group["params"] if names[id(p)] in own]
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    values = optimizer.state[parameter]
                    optimizer.state[parameter] = self._cut(names[id(parameter)], values)

    def state_dict(
        self, join: Callable[[str, Any], Any], keeps: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Any]:
        """The state in the whole optimizer's form, with what this worker keeps only.

        Args:
            join: Makes a value of a parameter's state whole, by the parameter's name. Of the
                workers that share a parameter, only the first has its state in the result.
            keeps: Whether the result has a parameter's state, by its name.
        """
        state, found = state_of([self._optimizer]), {}
        # In one order on all workers of a group, as to join a value is a collective. So values are
        # joined also where the result does not get them.
        for local, values in sorted(state["state"].items()):
            index = self._own[local]
            name = self.order[index]
            joined = {key: join(name, value) for key, value in values.items()}
            is_told = name not in self._ownership.cut or self._ownership.lanes.lane(self._rank) == 0
            if is_told and keeps(name):
                found[index] = joined
        return {
            "state": found,
            "param_groups": [
                {**group, "params": indices}
                for group, indices in zip(state["param_groups"], self._groups, strict=True)
            ],
        }

    def load_state_dict(
        self, whole: dict[str, Any], own: Callable[[str, Any], Any] | None = None
    ) -> None:
        """Load what this worker keeps of the whole optimizer's state.

        ``own`` takes this worker's part of a parameter's value, by its name; None: of a cut one.

        Raises:
            TargetError: The state has other groups.
        """
        if [group["params"] for group in whole["param_groups"]] != self._groups:
            raise TargetError(
                "the checkpoint's optimizer has other groups of parameters",
                hint=f"build the same optimizer, or start with an empty {option('checkpoint')} "
                "folder",
            )
        local = {index: number for number, index in enumerate(self._own)}
        self._optimizer.load_state_dict(
            {
                "state": {
                    local[i]: self._cut(self.order[i], values, own)
                    for i, values in whole["state"].items()
                    if i in local and self.order[i] in self.kept
                },
                "param_groups": [
                    {**group, "params": [local[i] for i in group["params"] if i in local]}
                    for group in whole["param_groups"]
                ],
            }
        )

    def _cut(self, name: str, values: Any, own: Callable[[str, Any], Any] | None = None) -> Any:
        """The part of a parameter's state that belongs to this worker's part of the parameter."""
        if not isinstance(values, dict):
            return values
        take = own or self._ownership.own_part
        return {key: take(name, value) for key, value in values.items()}


class ScheduledSteps:
    """Steps that the schedule makes, without flushes: the script's own calls do nothing.

    When an update is made, the script may already be a batch further, and its learning-rate
    schedule too. So the update uses the settings that the groups had when its own batch was fed;
    every stage does the same.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, most_behind: int) -> None:
        """``most_behind``: by how many batches an update may come after its own batch."""
        self._optimizer, self._most_behind = optimizer, most_behind
        self._step = optimizer.step
        self._settings: dict[int, list[dict[str, Any]]] = {}

        def step(closure: object = None) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign, assignment]

    def feed(self, batch: int) -> None:
        """Note the groups' settings for a batch of the schedule's run."""
        self._settings[batch] = self._now()
        self._settings.pop(batch - self._most_behind - 1, None)

    def make(self, batch: int) -> None:
        """Make one step, with the settings noted for a batch."""
        now = self._now()
        self._set(self._settings[batch])
        self._step()
        self._set(now)

    def _now(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def _set(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(values)


# One pipeline worker's own part of the state (thesis 2.4.4).
#
# Each worker writes its part at the same step. None waits for another, because by construction the
# position is the same on all. The parts name parameters and not stages, so a plan with another
# partition of the same model can resume from them.
#
# A schedule without flushes drains before a checkpoint. Then one version of the weights is live and
# no message is outstanding, so the state is as small as with any other schedule. It drains at the
# same steps whether or not the run is ever restarted, so a restarted run ends with the same bits.


class StageState:
    """Captures, writes and restores a pipeline worker's state; see ``StateParts``."""

    is_in_parts = True

    def __init__(
        self,
        session: Session,
        work: PipelineWork,
        buffers: StageBuffers,
        ownership: Ownership,
        share: OwnShare | None,
        synchroniser: Synchroniser,
        group: TensorGroup,
        shares: StageShares | None,
    ) -> None:
        self._shares = shares
        self._session, self._buffers, self._ownership = session, buffers, ownership
        self._share, self._synchroniser, self._group = share, synchroniser, group
        self._stages = [[list(stage.layers), list(stage.ranks)] for stage in work.stages]
        self._registered_sha256 = ""

    @cached_property
    def _run(self) -> str:
        """An identifier that is equal in all parts of one run. Call it on every worker."""
        store, token = self._session.place.store, secrets.token_hex(8)
        if store is None:
            return token
        if self._session.is_main:
            store.set("checkpoint run", token)
        return store.get("checkpoint run")

    def describe(self) -> dict[str, Any]:
        """See ``StateParts``."""
        session = self._session
        return {
            "virtual_nodes": list(session.batch_sizes),
            "seed": session.seed,
            "parameters": self._ownership.described,
            "part": session.rank,
            "num_parts": session.place.world_size,
            "run": self._run,
            "stages": self._stages,
            "optimizer_order": self._share.order if self._share else [],
            "registered_sha256": self._registered_sha256,
        }

    def capture(
        self, registered: Sequence[Any], share: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Any]:
        """See ``StateParts``; workers wait only for those that they share layers with."""
        tensors: list[Tensor] = []
        states = [thing.state_dict() for thing in registered]
        self._registered_sha256 = parts.digest_of(checkpoint.encode(states, tensors), tensors)
        return {
            "parameters": self._parameters(),
            "optimizer": self._share.state_dict(self._joined_state, self._keeps)
            if self._share
            else None,
            "buffers": self._buffers.capture_own(),
            "registered": states,
            "last_weight": None,
            "late_loss": self._synchroniser.late_loss,
        }

    def _joined_state(self, name: str, value: Any) -> Any:
        """Join an optimizer's state of a parameter, which one replica keeps."""
        shares = self._shares
        if shares is None or name not in shares.names:
            return self._joined(name, value)
        whole = shares.whole_of(name, value)  # one at a time is whole on the device
        if not self._keeps(name):
            return value
        return self._joined(name, copy_to_host(whole) if isinstance(whole, Tensor) else whole)

    def _keeps(self, name: str) -> bool:
        """Whether this worker's part of a checkpoint has the state of a parameter."""
        return self._shares is None or self._shares.is_first(name)

    def _parameters(self) -> dict[str, Tensor]:
        """The parameters that this worker is the first to hold; cut ones are joined."""
        ownership, found = self._ownership, dict[str, Tensor]()
        for name, value in self._shares.in_turn() if self._shares is not None else ():
            if ownership.holders[name][0] in self._group.ranks:
                joined = self._joined(name, copy_to_host(value))
                if name in ownership.first:
                    found[name] = joined
        for name, parameter in self._session.parameters.items():
            if self._shares is not None and name in self._shares.all_names:
                continue
            # The whole group of the first holder takes part: each of its workers has a part.
            if ownership.holders[name][0] in self._group.ranks:
                value = self._joined(name, parameter)
                if name in ownership.first:
                    found[name] = value
        return found

    def _joined(self, name: str, value: Any) -> Any:
        """Join a parameter, or an optimizer's state of it. Call it on all workers of a group."""
        # Parts are joined on the host, so no device needs memory for the whole tensor.
        ownership = self._ownership
        lanes, shape = ownership.lanes, ownership.shapes[name]
        if name not in ownership.cut or not isinstance(value, Tensor):
            return value
        if value.shape != lanes.part_shape(name, shape, self._session.rank):
            return value
        shapes = [lanes.part_shape(name, shape, rank) for rank in self._group.ranks]
        return lanes.whole(name, parts_of_all(value, self._group, shapes))

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """See ``StateParts``."""
        session, share, ownership = self._session, self._share, self._ownership
        own = {name: session.parameters[name] for name in ownership.own}
        saved = {name: self._own(name, state["parameters"][name]) for name in own}
        load_parameters(own, saved)
        if share is not None:
            loads = [partial(share.load_state_dict, own=self._own)]
            load_optimizers(path, session.optimizers, loads, state["optimizer"])
        self._synchroniser.late_loss = state.get("late_loss")
        self._buffers.restore(state["buffers"])

    def _own(self, name: str, value: Any) -> Any:
        """What this worker keeps of a whole parameter, or of a state of its shape."""
        value = self._ownership.own_part(name, value)
        return value if self._shares is None else self._shares.own_part(name, value)

    @property
    def wanted(self) -> parts.Wanted:
        """See ``StateParts``."""
        own, buffers = self._ownership.own, self._buffers.names
        kept = self._share.kept if self._share else None
        return parts.Wanted(own, buffers, self._stages, self._session.rank, kept)

"""Save shared states whole, as a split's, and move shares to the workers of another generation.

A checkpoint loads under any sharding. When workers change only what changes owners travels: the
workers of both generations meet in one group, where each says which numbers of each vector it
holds. Where a worker is lost, another may hold its numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from ...schema.launch import LaunchConfig
from ..buffers import VirtualNodeBuffers
from ..checkpoints.checkpoint import copy_to_host, shapes_of
from ..checkpoints.restoring import load_optimizers
from ..group import Place, gathered
from ..session import Session
from ..setup import state_of
from ..totals import StepTotals
from .flats import Flat, Part, Passage, cuts_of, parts_of
from .sliced import plainly
from .states import SharedStates


class SharedState:
    """The state of a job whose workers share it; the first worker gathers and writes it."""

    is_in_parts, wanted = False, None

    def __init__(
        self,
        session: Session,
        buffers: VirtualNodeBuffers,
        totals: StepTotals,
        states: SharedStates,
    ) -> None:
        self._session, self._buffers, self._totals = session, buffers, totals
        self._states = states

    def describe(self) -> dict[str, Any]:
        """See ``StateParts``."""
        return {
            "virtual_nodes": list(self._session.batch_sizes),
            "seed": self._session.seed,
            "parameters": shapes_of(self._states.shapes),
        }

    def capture(
        self, registered: Sequence[Any], share: Callable[[Callable[[], Any]], Any]
    ) -> dict[str, Any] | None:
        """See ``StateParts``."""
        session = self._session
        buffers = share(lambda: self._buffers.capture(session.holders, session.place.distributed))
        parameters = share(self._parameters)
        optimizer = share(self._optimizers)
        self._totals.look()
        if not session.is_main:
            return None
        parameters = {name: parameters[name] for name in session.parameters}
        return self._state(parameters, optimizer, buffers, registered)

    def with_buffers(self, buffers: dict[str, Any], registered: Sequence[Any]) -> dict[str, Any]:
        """The state but for shares, of which optimizers show the kinds; see ``move``.

        ``buffers`` are all virtual nodes', from their ``capture``.
        """
        self._totals.look()
        states = state_of(self._session.optimizers)
        for state in states if isinstance(states, list) else [states] if states else []:
            state["state"] = {
                number: own | {key: value[:0] for key, value in shared_in(own).items()}
                for number, own in state["state"].items()
            }
        return self._state({}, states, buffers, registered)

    def gradients(self) -> dict[str, Tensor]:
        """None: they move with the shares."""
        return {}

    def _state(
        self, parameters: Any, optimizer: Any, buffers: Any, registered: Sequence[Any]
    ) -> dict[str, Any]:
        return {
            "parameters": parameters,
            "optimizer": optimizer,
            "buffers": buffers,
            "registered": [thing.state_dict() for thing in registered],
            "last_weight": self._totals.last_weight,
        }

    @plainly
    def _parameters(self) -> dict[str, Tensor]:
        is_main = self._session.is_main
        found = {}
        # Iterated on all workers, as each unit is gathered; only the first one copies.
        for name, whole in self._states.in_turn():
            if is_main:
                found[name] = copy_to_host(whole)
        return found

    @plainly
    def _optimizers(self) -> Any:
        """The optimizers' state with whole tensors, on the first worker."""
        states, places = state_of(self._session.optimizers), self._states.places()
        several = states if isinstance(states, list) else [states] if states else []
        for optimizer, state in zip(self._session.optimizers, several, strict=True):
            state["state"] = {
                number: {key: self._whole(places, parameter, value) for key, value in own.items()}
                for number, own, parameter in _entries(optimizer, state)
            }
        return states

    def _whole(self, places: dict[int, Any], parameter: nn.Parameter, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        flat, number = places[id(parameter)]
        whole = flat.whole_of(number, value)
        return copy_to_host(whole) if self._session.is_main else None

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """See ``StateParts``; what shares a state of ``with_buffers`` leaves out stay."""
        self.restore_trained(path, state)
        self._buffers.restore(state["buffers"])
        self._totals.last_weight = state["last_weight"]

    @plainly
    def restore_trained(self, path: Path, state: dict[str, Any]) -> None:
        """Restore shares of parameters, and optimizers; a prediction may have left all whole."""
        self._states.free()
        session, places, is_whole = self._session, self._states.places(), bool(state["parameters"])

        def own(parameter: nn.Parameter, whole: Tensor) -> Tensor:
            flat, number = places[id(parameter)]
            if whole.shape != flat.shapes[number]:
                raise TargetError(f"{path}: a moment of another shape: {tuple(whole.shape)}")
            return whole.reshape(-1)[flat.slice_of(number)]

        with torch.no_grad():
            for name, whole in state["parameters"].items():
                parameter = session.parameters[name]
                parameter.copy_(own(parameter, whole))

        def loads(optimizer: torch.optim.Optimizer) -> Callable[[Any], object]:
            def load(saved: dict[str, Any]) -> None:
                sliced = {}
                for number, entry, parameter in _entries(optimizer, saved):
                    held = optimizer.state.get(parameter, {})
                    sliced[number] = entry | {
                        key: own(parameter, value)
                        if is_whole
                        else held.get(key, torch.zeros_like(parameter, dtype=value.dtype))
                        for key, value in shared_in(entry).items()
                    }
                optimizer.load_state_dict({**saved, "state": sliced})

            return load

        load_optimizers(
            path, session.optimizers, [loads(o) for o in session.optimizers], state["optimizer"]
        )


def shared_in(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """The values of a parameter's state that workers share: one number for each of the weights."""
    return {k: value for k, value in entry.items() if isinstance(value, Tensor) and value.dim()}


def _entries(
    optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> list[tuple[int, dict[str, Any], nn.Parameter]]:
    """Number, state and parameter of each parameter with a state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [(n, state["state"][n], p) for n, p in enumerate(parameters) if n in state["state"]]


@plainly
def move(
    states: SharedStates,
    optimizers: Sequence[torch.optim.Optimizer],
    place: Place,
    config: LaunchConfig,
) -> None:
    """Move weights, gradients and the optimizers' states; ``SharedStates.take`` follows.

    Args:
        states: This worker's share; a joining worker's optimizers have the others' kinds of state.
        optimizers: The script's.
        place: This worker among those of both generations: those of the next come first.
        config: That of the next.

    Raises:
        PeerLostError: All who held a share are lost.
    """
    shares, kept = shares_of(config), kept_of(config)
    flats, holds = states.put_away(), not states.is_joining
    told = [number for flat in flats for number in (flat.part if holds else (0, 0))]
    told += [int(p.grad is not None) for flat in flats for _, p in flat.members]
    numbers = torch.tensor(told, dtype=torch.int64, device=place.device)
    rows: list[list[int]] = gathered(numbers, place=place).tolist()
    flags = iter(zip(*(row[2 * len(flats) :] for row in rows), strict=True))
    leaving: list[Part] = [(0, 0)] * (place.world_size - len(shares))
    before = 0
    for number, flat in enumerate(flats):
        held = [(row[2 * number], row[2 * number + 1]) for row in rows]
        lengths = [end - start for start, end in flat.bounds]
        cuts, before = cuts_of(before, lengths, shares), before + sum(lengths)
        passage = Passage(place, held, [*parts_of(cuts, kept), *leaving])
        with_gradient = [n for n in range(len(lengths)) if any(next(flags))]
        _move(flat, [optimizer.state for optimizer in optimizers], passage, cuts, with_gradient)
        flat.kept = kept


def shares_of(config: LaunchConfig) -> list[int]:
    """[workers] of the states, in one unit."""
    return [slot.state_share_bytes or 0 for slot in config.workers]


def kept_of(config: LaunchConfig) -> list[range]:
    """[workers] the ranks whose shares each keeps."""
    return [config.kept(rank) for rank in range(config.world_size)]


def _move(
    flat: Flat,
    states: Sequence[Any],
    passage: Passage,
    cuts: Sequence[int],
    with_gradient: Sequence[int],
) -> None:
    """Move a vector of weights, its optimizers' states and its gradients to new cuts."""
    parameters = [parameter for _, parameter in flat.members]
    # Who has a gradient is agreed by all: a worker without one sends zeros, in its place.
    gradients = {
        parameters[n]: {"": torch.zeros_like(parameters[n]) if grad is None else grad}
        for n, grad in ((n, parameters[n].grad) for n in with_gradient)
    }
    columns = [
        (
            state,
            key,
            {n: state[p][key] for n, p in enumerate(parameters) if key in state.get(p, ())},
        )
        for state in (*states, gradients)
        for key in dict.fromkeys(key for p in parameters for key in shared_in(state.get(p, {})))
    ]
    carried = [passage.carry(flat.laid_out(slices)) for _, _, slices in columns]
    flat.move(passage.carry(flat.own), cuts, passage.wanted)
    for (state, key, slices), vector in zip(columns, carried, strict=True):
        for number in slices:
            state[parameters[number]][key] = flat.own_of(vector, number)
    for parameter, found in gradients.items():
        parameter.grad = found[""]

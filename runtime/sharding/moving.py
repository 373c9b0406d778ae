"""Move shares to the workers of another generation: only what changes owners travels.

The workers of both generations meet in one group, where each says which numbers of each vector it
holds. Where a worker is lost, another may hold its numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...schema.launch import LaunchConfig
from ..group import Place, gathered
from .flats import Flat, Part, Passage, cuts_of, parts_of
from .saving import shared_in
from .states import SharedStates


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

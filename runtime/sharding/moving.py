"""Move shares to the workers of another generation: only what changes owners travels.

The workers of both generations meet in one group, where each says which numbers of each vector it
holds. A worker keeps what it is to hold, and gets the rest from the others::

    before    |--- 0 ---|------- 1 -------|          0 keeps its numbers and gets some of 1,
    next      |------- 0 -------|--- 2 ---|          which leaves; 2 joins and gets the rest
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...devices.collectives import wire_device
from .. import peers
from ..group import Place, gathered
from .flats import Flat, cuts_of
from .saving import shared_in
from .states import SharedStates

Part = tuple[int, int]
"""Where a worker's numbers of a vector begin and end."""


def sources(held: Sequence[Part], wanted: Part, rank: int) -> list[tuple[int, int, int]]:
    """Who gives a worker which numbers: itself first, else the first that holds them.

    Args:
        held: [workers] what each holds.
        wanted: What the worker is to hold.
        rank: The worker.

    Returns:
        (worker, begin, end) in order of workers, but for itself.
    """
    missing, found = [wanted], []
    for worker in (rank, *range(len(held))):
        low, high = held[worker]
        rest = []
        for begin, end in missing:
            first, last = max(begin, low), min(end, high)
            if first < last:
                found.append((worker, first, last))
                rest += [(begin, first), (last, end)]
            else:
                rest.append((begin, end))
        missing = [(begin, end) for begin, end in rest if begin < end]
    return found


class Passage:
    """The way of a vector from what each worker holds of it to what each is to hold.

    Args:
        place: This worker among those of both generations.
        held: [workers] what each holds.
        wanted: [workers] what each is to hold.
    """

    def __init__(self, place: Place, held: Sequence[Part], wanted: Sequence[Part]) -> None:
        self._place = place
        self._held, self.wanted = held[place.rank], wanted[place.rank]
        self._given = [sources(held, part, rank) for rank, part in enumerate(wanted)]
        self._travels = any(
            worker != rank for rank, given in enumerate(self._given) for worker, _, _ in given
        )

    def carry(self, own: Tensor) -> Tensor:
        """Exchange a vector; call it on all workers.

        Args:
            own: [numbers held]

        Returns:
            [numbers wanted]
        """
        rank, (low, _), (first, last) = self._place.rank, self._held, self.wanted
        made = own.new_empty(last - first)
        for worker, begin, end in self._given[rank]:
            if worker == rank:
                made[begin - first : end - first] = own[begin - low : end - low]
        if not self._travels:
            return made
        parts: list[Tensor] = []
        leave, come = [0] * len(self._given), [0] * len(self._given)
        for taker, given in enumerate(self._given):
            for worker, begin, end in given:
                if worker == rank != taker:
                    parts.append(own[begin - low : end - low])
                    leave[taker] += end - begin
                if taker == rank != worker:
                    come[worker] += end - begin
        sent = torch.cat([own[:0], *parts]).to(wire_device(own.device))
        received = sent.new_empty(sum(come))
        peers.all_to_all_single(received, sent, output_split_sizes=come, input_split_sizes=leave)
        at = 0
        for worker, begin, end in self._given[rank]:
            if worker != rank:
                made[begin - first : end - first] = received[at : at + end - begin]
                at += end - begin
        return made


def move(
    states: SharedStates,
    optimizers: Sequence[torch.optim.Optimizer],
    place: Place,
    shares: Sequence[int],
) -> None:
    """Move weights, gradients and the optimizers' states; ``SharedStates.take`` follows.

    Args:
        states: This worker's share; a joining worker's optimizers have the others' kinds of state.
        optimizers: The script's.
        place: This worker among those of both generations: those of the next come first.
        shares: [workers of the next] of the states, in any unit.
    """
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
        passage = Passage(place, held, [*pairwise(cuts), *leaving])
        with_gradient = [n for n in range(len(lengths)) if any(next(flags))]
        _move(flat, [optimizer.state for optimizer in optimizers], passage, cuts, with_gradient)


def _move(
    flat: Flat,
    states: Sequence[Any],
    passage: Passage,
    cuts: Sequence[int],
    with_gradient: Sequence[int],
) -> None:
    """Move a vector of weights, and what belongs to it.

    Args:
        flat: The vector.
        states: [optimizers] state by parameter.
        passage: Its way.
        cuts: Where it is cut from now on.
        with_gradient: Its members that have a gradient.
    """
    parameters = [parameter for _, parameter in flat.members]
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

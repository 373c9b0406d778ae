"""The way of a vector between workers that hold other parts of it before and after.

A worker keeps what it is to hold, and gets the rest from the others::

    before    |--- 0 ---|------- 1 -------|          0 keeps its numbers and gets some of 1,
    next      |------- 0 -------|--- 2 ---|          which leaves; 2 joins and gets the rest
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...devices.collectives import wire_device
from ...schema.errors import PeerLostError
from .. import peers
from ..group import Place

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

    Raises:
        PeerLostError: Nobody holds some of it.
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
    if missing:
        raise PeerLostError("lost all workers that kept a share of the states")
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

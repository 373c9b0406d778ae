"""Sums of a few numbers over all workers at the end of a step, by messages posted ahead.

The workers of a pipeline end a step one after another. Each sends its numbers to all others when
it is done, so the last finds them there, and the others wait for a single message: an all-reduce
would begin only then, and take several. From many workers on that is too many messages.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import Line, Transport

_MOST_WORKERS = 16
_TAG = 3


@dataclass(slots=True)
class _Peer:
    line: Line
    receiving: tuple[dist.Work, Tensor] | None = None


class Exchange:
    """Adds up vectors of float64, of one length on all workers."""

    def __init__(self, transport: Transport | None, world_size: int, length: int) -> None:
        self._transport, self._length = transport, length
        self._peers: dict[int, _Peer] = {}
        if transport is not None and world_size <= _MOST_WORKERS:
            ranks = [rank for rank in range(world_size) if rank != transport.rank]
            self._peers = {rank: _Peer(Line(transport.host, rank, _TAG)) for rank in ranks}

    def expect(self) -> None:
        """Post the receives of the next sum."""
        for peer in self._peers.values():
            if peer.receiving is None:
                numbers = torch.empty(self._length, dtype=torch.float64)
                peer.receiving = (peer.line.receive(numbers), numbers)

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all workers, added in order of ranks: the same bits everywhere."""
        if self._transport is None:
            return own
        if not self._peers:
            dist.all_reduce(own, group=self._transport.host)
            return own
        self.expect()
        sending = [peer.line.send(own) for peer in self._peers.values()]
        vectors = {self._transport.rank: own}
        for rank, peer in self._peers.items():
            assert peer.receiving is not None
            work, vectors[rank] = peer.receiving
            work.wait()
            peer.receiving = None
        for work in sending:
            work.wait()
        return torch.stack([vectors[rank] for rank in sorted(vectors)]).sum(0)

"""Sum a few numbers over all workers at the end of a step, by messages posted ahead.

The workers of a pipeline end a step one after another. Each sends its numbers to all others when it
is done. So the last worker has all numbers at once, and the others wait for a single message. An
all-reduce would start only then and take several messages. For many workers, n * (n - 1) messages
are too many, and an all-reduce is used.
"""

import torch
from torch import Tensor

from .. import peers
from .transport import AnyLine, Transfer, Transport

_MOST_WORKERS = 16
_TAG = 5


class Exchange:
    """Sums float64 vectors of equal length over all workers.

    Attributes:
        own: [length] this worker's vector, to be written before each sum.
    """

    def __init__(self, transport: Transport | None, world_size: int, length: int) -> None:
        self._transport = transport
        self._peers: list[tuple[AnyLine, AnyLine, Tensor]] = []
        self._receiving: list[Transfer] = []
        self._sending: list[Transfer] | None = None
        by_messages = transport is not None and world_size <= _MOST_WORKERS
        self._all = torch.zeros((world_size if by_messages else 1, length), dtype=torch.float64)
        self.own = self._all[0]
        if transport is not None and by_messages:
            self.own = self._all[transport.rank]
            own = transport.rank
            self._peers = [
                (transport.line(own, rank, _TAG), transport.line(rank, own, _TAG), self._all[rank])
                for rank in range(world_size)
                if rank != own
            ]

    def expect(self) -> None:
        """Post the receives of the next sum."""
        if not self._receiving:
            self._receiving = [line.receive(vector) for _, line, vector in self._peers]

    def start(self) -> None:
        """Start the sum; ``own`` must stay as it is until ``sum``."""
        if self._peers:
            self.expect()
            self._sending = [line.send(self.own) for line, _, _ in self._peers]
        elif self._transport is not None:
            work = peers.all_reduce(self.own, group=self._transport.up, async_op=True)
            self._sending = [work] if work is not None else []
        else:
            self._sending = []

    def sum(self) -> Tensor:
        """[length] the sum over all workers in order of ranks, so all get the same bits."""
        if self._sending is None:
            self.start()
        for work in self._receiving + (self._sending or []):
            work.wait()
        self._receiving, self._sending = [], None
        return self._all.sum(0) if self._peers else self.own.clone()

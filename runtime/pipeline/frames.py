"""The size of a channel's receive buffers, which sender and receiver compute independently.

Messages come in blocks. A buffer is as large as the payload of the last message two blocks earlier,
so the receives of two blocks can be posted ahead. Small messages come in long blocks: their
receives are posted in bursts and not between passes, since each posted receive wakes a thread of
the sender, which is busy computing.
"""

from collections import deque

_MOST_MESSAGES, _MOST_BYTES = 8, 1 << 18  # of a block


class Rooms:
    """The frames of a channel that may be under way.

    Attributes:
        ahead: Room for payload, in bytes, of the next message's frame and those behind it.
    """

    def __init__(self) -> None:
        self.ahead = deque([0, 0])
        self._lengths = deque([1, 1])

    def passed(self, num_bytes: int) -> None:
        """A message has passed, and frames like it should have room for so many bytes."""
        self.ahead.popleft()
        self._lengths[0] -= 1
        if not self._lengths[0]:
            self._lengths.popleft()
            length = max(1, min(_MOST_MESSAGES, _MOST_BYTES // max(num_bytes, 1)))
            self._lengths.append(length)
            self.ahead.extend([num_bytes] * length)

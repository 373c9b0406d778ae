"""The size of a channel's receive buffers, which sender and receiver compute independently.

Messages are counted in blocks. A buffer is as large as the payload of the last message two blocks
earlier, so the receives of two blocks can be posted ahead. Small messages have long blocks. Their
receives are then posted many at a time and not between passes: each posted receive wakes a thread
of the sender, which is busy computing.
"""

from collections import deque

_MOST_MESSAGES, _MOST_BYTES = 8, 1 << 18  # in one block


class Rooms:
    """The buffer sizes of a channel's frames that may be outstanding.

    Attributes:
        ahead: Bytes for the payload of the next message's frame and of those behind it.
    """

    def __init__(self) -> None:
        self.ahead = deque([0, 0])
        self._lengths = deque([1, 1])

    def passed(self, num_bytes: int) -> None:
        """Note a message's payload; buffers of frames like it should have so many bytes."""
        self.ahead.popleft()
        self._lengths[0] -= 1
        if not self._lengths[0]:
            self._lengths.popleft()
            length = max(1, min(_MOST_MESSAGES, _MOST_BYTES // max(num_bytes, 1)))
            self._lengths.append(length)
            self.ahead.extend([num_bytes] * length)

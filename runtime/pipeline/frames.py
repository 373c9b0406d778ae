"""How large the frames of a channel are: both ends count it alike, from what has passed.

Messages come in blocks. The frames of a block have room for the payload of the last message two
blocks before, so the receives of two blocks can be posted ahead. Where messages are small a block
is long: receives are then posted in bursts, and not between passes, each of which would wake a
thread of the sender that is busy computing.
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

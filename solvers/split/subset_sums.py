"""Sets of whole numbers as the bits of one big integer: exact subset sums, fast.

Bit ``k`` set means that ``k`` is a member. Shifting a set adds a constant to its members, so a
sum of two sets takes one or two shifts per run of members, whatever the runs' lengths.
"""

import numpy as np

_RUNS_BETWEEN_LOOKS = 64


def multiples(step: int, count: int) -> int:
    """The set {0, step, 2 step, ..., count step}."""
    return repeated(1, step, count)


def repeated(bits: int, step: int, count: int) -> int:
    """A set and its copies moved up by step, 2 step, ..., count step."""
    copies = 1
    while 2 * copies <= count + 1:
        bits |= bits << (copies * step)
        copies *= 2
    return bits | bits << ((count + 1 - copies) * step)


def members(bits: int) -> list[int]:
    """The members of a set, ascending."""
    size = (bits.bit_length() + 7) // 8
    packed = np.frombuffer(bits.to_bytes(size, "little"), dtype=np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    return found


def sumset(left: int, right: int, mask: int, stride: int = 1) -> int:
    """The set {a + stride b} over members a of ``left``, b of ``right``, cut by ``mask``."""
    if stride == 1 and _num_runs(left) < _num_runs(right):
        left, right = right, left
    smears = [left]  # smears[p] = left + stride {0, 1, ..., 2^p - 1}
    total = 0
    for index, (start, length) in enumerate(_runs(right)):
        if index % _RUNS_BETWEEN_LOOKS == _RUNS_BETWEEN_LOOKS - 1 and total & mask == mask:
            break  # nothing is missing any more
        power = length.bit_length() - 1
        while len(smears) <= power:
            last = smears[-1]
            smears.append((last | last << (stride << (len(smears) - 1))) & mask)
        total |= smears[power] << (stride * start)
        if length & (length - 1):
            total |= smears[power] << (stride * (start + length - (1 << power)))
    return total & mask


def _num_runs(bits: int) -> int:
    return (bits & ~(bits << 1)).bit_count()


def _runs(bits: int) -> list[tuple[int, int]]:
    starts = members(bits & ~(bits << 1))
    ends = members(bits & ~(bits >> 1))
    return [(start, end - start + 1) for start, end in zip(starts, ends, strict=True)]


class Folds:
    """Sums of exactly k members of one base set, for any k; of at most k if 0 is a member.

    Args:
        base: The set.
        mask: Bits to keep.
    """

    def __init__(self, base: int, mask: int) -> None:
        self.mask = mask
        self._folds = {0: 1, 1: base & mask}
        self._grows = bool(base & 1)
        self._closed_at: int | None = None

    def __getitem__(self, count: int) -> int:
        if self._closed_at is not None and count > self._closed_at:
            return self._folds[self._closed_at]
        if count not in self._folds:
            self._folds[count] = self._sum(count)
        return self._folds[count]

    def _sum(self, count: int) -> int:
        low, high = self[count // 2], self[count - count // 2]
        total = sumset(low, high, self.mask)
        if self._grows and total == low and self._closed_at is None:
            self._closed_at = count // 2  # one more member adds nothing, nor will any
            self._folds[count // 2] = low
        return total

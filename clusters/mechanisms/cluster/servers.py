"""The servers that the jobs of a round are placed on (thesis 5.3.1, 5.5: placement).

Jobs are placed in decreasing order of the devices they ask for; of equals those that hold a lease
first, then the earlier job. A job keeps the devices it had if they are still free and no placement
on fewer servers exists; otherwise it takes the server where fewest devices are reserved by leases
of others, and of these the fullest that fits. Larger than any server, it takes the emptiest ones
one after another. It is consolidated where it uses as few servers as its type allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Held = tuple[int, dict[int, int]]  # device type, server -> devices


@dataclass(slots=True)
class Servers:
    """Servers by device type, and the placement of the last round.

    ``sizes`` holds the devices of a type on each server that has it [types][servers].
    """

    sizes: list[list[int]]
    held: dict[str, Held] = field(default_factory=dict)

    def fewest(self, kind: int, number: int) -> int:
        """The least number of servers on which so many devices of a type can be."""
        left, used = number, 0
        for size in sorted(self.sizes[kind], reverse=True):
            if left <= 0:
                break
            left, used = left - size, used + 1
        return used

    def place(
        self,
        ids: Sequence[tuple[str, ...]],
        kinds: list[int],
        needs: list[int],
        standing: Sequence[Sequence[int]],
        apart: Sequence[bool] = (),
    ) -> tuple[list[bool], list[bool]]:
        """Place the jobs of a round.

        Args:
            ids: The jobs that share each placement: one, or the two of a pair.
            kinds: Device type of each.
            needs: Devices that each holds.
            standing: Devices of each type that work on each server [types][servers].
            apart: Whether each may be spread; these are placed after the others. None may by
                default.

        Returns:
            Whether each is consolidated, and whether it kept the devices of the last round.
        """
        free = [list(row) for row in standing]
        reserved = [[0] * len(sizes) for sizes in self.sizes]
        leases: dict[int, dict[int, int]] = {}
        claimed: set[int] = set()  # what a pair had that now parts goes to the first of them
        for i, (names, kind) in enumerate(zip(ids, kinds, strict=True)):
            before = next((self.held[name] for name in names if name in self.held), None)
            if before is not None and before[0] == kind and id(before) not in claimed:
                claimed.add(id(before))
                leases[i] = before[1]
                for server, number in before[1].items():
                    reserved[kind][server] += number
        later = list(apart) or [False] * len(ids)
        order = sorted(range(len(ids)), key=lambda i: (later[i], -needs[i], i not in leases, i))
        close, kept = [False] * len(ids), [False] * len(ids)
        now: dict[str, Held] = {}
        for i in order:
            kind, lease = kinds[i], leases.get(i)
            for server, number in (lease or {}).items():
                reserved[kind][server] -= number
            fewest = self.fewest(kind, needs[i])
            fits = lease is not None and sum(lease.values()) == needs[i]
            if lease is not None and fits and _is_free(lease, free[kind]):
                better = None if len(lease) <= fewest else _seats(needs[i], free[kind])
                seats = better if better is not None and len(better) < len(lease) else lease
            else:
                seats = _seats(needs[i], free[kind], reserved[kind])
            for server, number in seats.items():
                free[kind][server] -= number
            close[i], kept[i] = len(seats) <= fewest, seats == lease
            now.update(dict.fromkeys(ids[i], (kind, seats)))
        self.held = now
        return close, kept


def _is_free(seats: dict[int, int], free: list[int]) -> bool:
    return all(free[server] >= number for server, number in seats.items())


def _seats(need: int, free: list[int], reserved: list[int] | None = None) -> dict[int, int]:
    held = reserved or [0] * len(free)
    fits = [s for s, number in enumerate(free) if number >= need]
    if fits:
        taken = [max(0, need - (free[s] - held[s])) for s in range(len(free))]
        return {min(fits, key=lambda s: (taken[s], free[s], s)): need}
    seats: dict[int, int] = {}
    for server in np.argsort(-np.array(free), kind="stable").tolist():
        if need <= 0 or free[server] <= 0:
            break
        seats[server] = min(need, free[server])
        need -= seats[server]
    return seats

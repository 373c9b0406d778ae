"""The layout of devices on servers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Ints

Sizes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices on servers: ``sizes`` [types][servers], devices of a type on each server with any.

    ``servers`` [types][servers] numbers the server of each entry, so that one that holds several
    types fails as a whole.
    """

    sizes: tuple[tuple[int, ...], ...]
    servers: tuple[tuple[int, ...], ...]

    @classmethod
    def apart(cls, sizes: Sizes) -> "Layout":
        """A layout in which no two types share a server."""
        first = np.cumsum([0, *map(len, sizes)]).tolist()
        pairs = zip(first[:-1], first[1:], strict=True)
        return cls(tuple(tuple(row) for row in sizes), tuple(tuple(range(*ends)) for ends in pairs))

    @classmethod
    def flat(cls, capacity: Ints) -> "Layout":
        """A layout in which each type stands on one server."""
        return cls.apart([[number] for number in capacity.tolist()])

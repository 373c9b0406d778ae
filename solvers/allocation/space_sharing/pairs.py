"""The pairs that may share devices, and what each pair would earn at given prices.

Members (rows of equal jobs, or groups of rows) of one kind have the same rates beside any other
kind; they differ in what their time and throughput are worth. So the best pair of two kinds is
made of the best member of each, and all pairs are judged in O(members x kinds x columns).
"""

from dataclasses import dataclass

import numpy as np

from ..program import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """The rows that may share, and what sharing earns.

    ``kind`` [rows]; ``rate`` [kinds, kinds, columns] of the first kind beside the second;
    ``worth`` [rows, columns] of a step to the objective; ``charge`` [columns] is what holding
    one unit of a column costs it.
    """

    kind: Ints
    rate: Floats
    worth: Floats
    charge: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """Total time of pairs of rows on columns: row ``a``, row ``b``, ``column``, ``time``."""

    a: Ints
    b: Ints
    column: Ints
    time: Floats


class Partners:
    """Members by kind, and for each kind its partners, in tables of equal width.

    ``rate`` [kinds, partners, columns] is a kind's beside its partner; ``of`` [members] numbers
    the kinds that have members; ``alone`` [members] may not pair with themselves.
    """

    def __init__(self, rate: Floats, kind: Ints, runs: Bools, usage: Floats, alone: Bools) -> None:
        """Build the tables.

        Args:
            rate: Of the first kind beside the second [kinds, kinds, columns].
            kind: Of each member [members].
            runs: Whether a member runs on a column [members, columns].
            usage: What a member holds of a column [members, columns].
            alone: Whether a member is a single job [members].
        """
        names, first, of = np.unique(kind, return_index=True, return_inverse=True)
        self.of: Ints = of.reshape(-1)
        self.alone, self.usage = alone, usage
        self.order = np.argsort(self.of, kind="stable")
        self.starts = np.searchsorted(self.of[self.order], np.arange(len(names)))
        both = rate[names[:, None], names]
        fits = ((both > 0) | (both.transpose(1, 0, 2) > 0)).any(axis=2)
        fits &= (usage[first][:, None] == usage[first][None]).all(axis=2)
        most = max(int(fits.sum(axis=1).max(initial=0)), 1)
        self.partner = np.argsort(~fits, axis=1, kind="stable")[:, :most]
        rows = np.arange(len(names))[:, None]
        there = fits[rows, self.partner]
        self.rate = both[rows, self.partner]
        back = both[self.partner, rows]
        place = np.cumsum(fits, axis=1) - 1
        self.back = np.where(there, place[self.partner, rows], 0)
        self.own = np.where(np.diagonal(fits), np.diagonal(place), -1)
        self.shut = ~(((self.rate > 0) | (back > 0)) & there[:, :, None])
        self.barred = self.shut[self.of] | ~runs[:, None, :]
        self.single = len(names) == len(kind)
        self.ordered = self.single and bool((self.of == np.arange(len(kind))).all())
        self.place = self.partner * most + self.back

    def lines(self, slope: Floats, price: Floats) -> Floats:
        """What members earn beside each partner [members, partners, columns].

        Args:
            slope: Of a step [members, columns].
            price: Of time [members].
        """
        return self.masked(slope[:, None, :] * self.rate[self.of] - price[:, None, None])

    def masked(self, value: Floats) -> Floats:
        """The values, minus infinity where the two may not share."""
        value[self.barred] = -np.inf
        return value

    def best(self, value: Floats) -> Floats:
        """The most that a member of a kind earns [kinds, partners, columns]."""
        if self.single:
            return value if self.ordered else value[self.order]
        most: Floats = np.maximum.reduceat(value[self.order], self.starts, axis=0)
        return most

    def beside(self, value: Floats) -> Floats:
        """What each member's best companion earns [members, partners, columns].

        A job is no company to itself.
        """
        best = self.best(value)
        earned = best.reshape(-1, best.shape[2])[self.place].reshape(best.shape)
        earned[self.shut] = -np.inf
        earned = earned if self.ordered else earned[self.of]
        owned = np.flatnonzero(self.own[self.of] >= 0)
        if len(owned):
            earned[owned, self.own[self.of[owned]]] = self._own(value)[0][owned]
        return earned

    def _own(self, value: Floats) -> tuple[Floats, Ints]:
        """The best companion of a member's own kind: its worth and who [members, columns]."""
        members = np.arange(len(value))
        own = self.own[self.of]
        mine = np.where((own >= 0)[:, None], value[members, np.maximum(own, 0)], -np.inf)
        top, who = self._first(mine)
        itself = self.alone[:, None] & (who == members[:, None])
        second, after = self._first(np.where(itself, -np.inf, mine))
        return np.where(itself, second, top), np.where(itself, after, who)

    def _first(self, value: Floats) -> tuple[Floats, Ints]:
        """For each member the best of its kind, the first of equals [members, columns]."""
        best = np.maximum.reduceat(value[self.order], self.starts, axis=0)[self.of]
        ties = np.where(value == best, np.arange(len(value))[:, None], len(value) - 1)
        who: Ints = np.minimum.reduceat(ties[self.order], self.starts, axis=0)
        return best, who[self.of]

    def _companion(self, value: Floats, member: Ints, partner: Ints, column: Ints) -> Ints:
        """The companions that earn most beside members, at these partners and columns [some]."""
        kind = self.of[member]
        other, back = self.partner[kind, partner], self.back[kind, partner]
        if self.single:
            who = self.order[other]
        else:
            size = np.diff(np.append(self.starts, len(value)))
            width = np.arange(int(size.max()))
            some = self.order[np.minimum(self.starts[other, None] + width, len(value) - 1)]
            earned = value[some, back[:, None], column[:, None]]
            earned = np.where(width < size[other, None], earned, -np.inf)
            who = some[np.arange(len(member)), earned.argmax(axis=1)]
        itself = partner == self.own[kind]
        if itself.any():
            who = np.where(itself, self._own(value)[1][member, column], who)
        return who

    def surplus(self, value: Floats, rent: Floats) -> float:
        """The most that any pair earns above its rent [columns]; no member twice if alone."""
        return float(self._earned(value, rent).max(initial=-np.inf))

    def _earned(self, value: Floats, rent: Floats) -> Floats:
        earned = self.beside(value)
        earned += value
        earned -= (self.usage * rent)[:, None, :]
        return earned

    def paying(self, value: Floats, rent: Floats, tolerance: float) -> set[tuple[int, int, int]]:
        """For every member the pair (a, b, column) that earns most, where it earns anything."""
        flat = self._earned(value, rent).reshape(len(value), -1)
        top = flat.argmax(axis=1)
        unit = np.abs(value).max(axis=(1, 2), where=np.isfinite(value), initial=1e-300)
        unit = np.maximum.reduceat(unit[self.order], self.starts)[self.of]
        member = np.flatnonzero(flat[np.arange(len(value)), top] > tolerance * unit)
        partner, column = np.divmod(top[member], value.shape[2])
        other = self._companion(value, member, partner, column)
        low, high = np.minimum(member, other), np.maximum(member, other)
        return {*zip(low.tolist(), high.tolist(), column.tolist(), strict=True)}

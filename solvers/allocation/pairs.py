"""Who may share devices with whom, and what a pair would earn at given prices.

Members (rows of equal jobs, or groups of rows) of one kind have the same rates beside any other
kind; they differ in what their time and throughput are worth. So the best pair of two kinds is
made of the best member of each, and all pairs are judged in O(members x kinds x columns).
"""

from dataclasses import dataclass

import numpy as np

from .program import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Who may share, and what it earns.

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


class Company:
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

    def lines(self, slope: Floats, price: Floats) -> Floats:
        """What members earn beside each partner [members, partners, columns].

        Args:
            slope: Of a step [members, columns].
            price: Of time [members].
        """
        return self.masked(slope[:, None, :] * self.rate[self.of] - price[:, None, None])

    def masked(self, value: Floats) -> Floats:
        """The same values, minus infinity where the two may not share."""
        value[self.barred] = -np.inf
        return value

    def best(self, value: Floats) -> Floats:
        """The most that a member of a kind earns [kinds, partners, columns]."""
        most: Floats = np.maximum.reduceat(value[self.order], self.starts, axis=0)
        return most

    def beside(self, value: Floats) -> tuple[Floats, Ints]:
        """What each member's best companion earns, and who it is [members, partners, columns].

        A job is no company to itself.
        """
        best, who = self._first(value)
        earned = best[self.partner, self.back]
        earned[self.shut] = -np.inf
        partner = who[self.partner, self.back]
        at = np.flatnonzero(self.own >= 0)
        mine = np.full(value.shape[::2], -np.inf)
        owned = self.own[self.of] >= 0
        mine[owned] = value[owned, self.own[self.of[owned]]]
        top, top_who = np.full(best.shape[::2], -np.inf), np.zeros(best.shape[::2], np.int64)
        top[at], top_who[at] = best[at, self.own[at]], who[at, self.own[at]]
        itself = self.alone[:, None] & (top_who[self.of] == np.arange(len(value))[:, None])
        if self.single:
            second, second_who = np.full_like(top, -np.inf), np.zeros_like(top_who)
        else:
            without = np.where(itself, -np.inf, mine)[:, None, :]
            most, holder = self._first(without)
            second, second_who = most[:, 0], holder[:, 0]
        earned, partner = earned[self.of], partner[self.of]
        k = self.of[owned]
        place = self.own[k]
        earned[owned, place] = np.where(itself, second[self.of], top[self.of])[owned]
        partner[owned, place] = np.where(itself, second_who[self.of], top_who[self.of])[owned]
        return earned, partner

    def _first(self, value: Floats) -> tuple[Floats, Ints]:
        """The best member of each kind, the first of equals, and what it earns."""
        best = self.best(value)
        if self.single:
            return best, np.broadcast_to(self.order[:, None, None], best.shape)
        number = np.arange(len(value))[:, None, None]
        ties = np.where(value == best[self.of], number, len(value))
        who: Ints = np.minimum.reduceat(ties[self.order], self.starts, axis=0)
        return best, who

    def surplus(self, value: Floats, rent: Floats) -> float:
        """The most that any pair earns above its rent [columns]; no member twice if alone."""
        earned, _ = self.beside(value)
        earned += value
        earned -= (self.usage * rent)[:, None, :]
        return float(earned.max(initial=-np.inf))

    def paying(self, value: Floats, rent: Floats, tolerance: float) -> set[tuple[int, int, int]]:
        """For every member the pair (a, b, column) that earns most, where it earns anything."""
        earned, partner = self.beside(value)
        earned += value
        earned -= (self.usage * rent)[:, None, :]
        flat = earned.reshape(len(value), -1)
        top = flat.argmax(axis=1)
        members = np.arange(len(value))
        unit = np.abs(value).max(axis=(1, 2), where=np.isfinite(value), initial=1e-300)
        unit = np.maximum.reduceat(unit[self.order], self.starts)[self.of]
        kept = np.flatnonzero(flat[members, top] > tolerance * unit)
        other = partner.reshape(len(value), -1)[kept, top[kept]]
        column = top[kept] % value.shape[2]
        low, high = np.minimum(kept, other), np.maximum(kept, other)
        return {*zip(low.tolist(), high.tolist(), column.tolist(), strict=True)}

"""EasyScale's schedulers that users have no reason to choose, by which its figures are compared.

With ``take`` proposals may also name a device that another job holds: it changes hands where
the product of both rates grows (the taker's speed-up is more than the giver's slow-down). A job
that holds nothing has the first claim, the longest waiting one before others. A giver keeps its
least number of devices. The product of all rates grows with each exchange, so this ends.
Homogeneous jobs keep to one type of devices while they run.
"""

from ...clusters.mechanisms.easyscale import (
    VARIANTS,
    Bidder,
    Counts,
    TentativeHoldings,
    Variant,
    plus,
)

_FACTOR = 1.0 + 1e-9  # of a product of rates: growth that is not rounding


def take(exchange: TentativeHoldings) -> None:
    """Let devices change hands while that makes jobs faster on the whole."""
    trade = _Trade(exchange)
    while trade.take_one():
        pass
    if trade.has_leftovers:
        exchange.accept()


class _Trade:
    def __init__(self, exchange: TentativeHoldings) -> None:
        self.exchange = exchange
        self.has_leftovers = False  # whether a giver had to give more than what was taken

    def take_one(self) -> bool:
        """Let the device change hands that gains most; False where none gains."""
        if self.exchange.waiting and self._begin(self.exchange.waiting[0]):
            return True
        best: tuple[float, Bidder, int, Bidder, Counts] | None = None
        for stock in range(len(self.exchange.stocks)):
            givers = self._givers(stock)
            for taker in self.exchange.running:
                found = next((one for one in givers if one[1] is not taker), None)
                if found is None:
                    continue
                kept, giver, left = found
                gain = self._factor(taker, stock) * kept
                if gain > _FACTOR and (best is None or gain > best[0]):
                    best = gain, taker, stock, giver, left
        if best is None:
            return False
        _, taker, stock, giver, left = best
        self._give(giver, stock, left)
        self.exchange.move(taker, plus(self.exchange.held[taker.id], stock, 1))
        return True

    def _givers(self, stock: int) -> list[tuple[float, Bidder, Counts]]:
        """Jobs that can give a device of a stock, those that lose least first.

        Returns:
            The part of its rate that each keeps, the job, and what it then holds.
        """
        found = []
        for place, one in enumerate(self.exchange.running):
            if not self.exchange.held[one.id][stock]:
                continue
            left = self.exchange.fewer(one, stock)
            if any(left):
                found.append(
                    (one.rate(left) / one.rate(self.exchange.held[one.id]), place, one, left)
                )
        found.sort(key=lambda row: (-row[0], -row[1]))
        return [(kept, one, left) for kept, _, one, left in found]

    def _give(self, giver: Bidder, stock: int, left: Counts) -> None:
        self.has_leftovers |= self.exchange.held[giver.id][stock] - left[stock] > 1
        self.exchange.move(giver, left)

    def _factor(self, one: Bidder, stock: int) -> float:
        """The factor by which one more device speeds a running job up."""
        held = self.exchange.held[one.id]
        counts = plus(held, stock, 1)
        if sum(held) >= one.most or not self.exchange.may_add(one, stock):
            return 0.0
        if (one.id, counts) in self.exchange.refused:
            return 0.0
        return one.rate(counts) / one.rate(held)

    def _begin(self, one: Bidder) -> bool:
        """Let a job begin on devices of one stock, as few as it can run on; whether it could."""
        for stock in range(len(self.exchange.stocks)):
            numbers = range(one.least, one.most + 1)
            counts = (plus(self.exchange.none, stock, number) for number in numbers)
            wanted = next((n for n in counts if one.can_run(n)), None)
            if wanted is None or (one.id, wanted) in self.exchange.refused:
                continue
            before = dict(self.exchange.held), list(self.exchange.free), self.has_leftovers
            while self.exchange.free[stock] < wanted[stock] and (givers := self._givers(stock)):
                _, giver, left = givers[0]
                self._give(giver, stock, left)
            if self.exchange.free[stock] >= wanted[stock]:
                self.exchange.move(one, wanted)
                self.exchange.begin(one)
                return True
            self.exchange.held, self.exchange.free, self.has_leftovers = before
        return False


VARIANTS.add("easyscale-taking", Variant(trade=take), __name__)
VARIANTS.add("easyscale-homogeneous", Variant(mixes=False), __name__)

"""What EasyScale is compared with in virtual time: YARN's capacity scheduler, and its own variants.

Users have no reason to choose them; EasyScale's figures are compared by them. YARN is first in,
first out: a whole gang of one type at once. Homogeneous jobs keep to one type of devices while they
run.
"""

from collections.abc import Callable, Iterable

from ...clusters.mechanisms.cluster.pool import ClusterPool
from ...clusters.mechanisms.easyscale import (
    VARIANTS,
    Bidder,
    TentativeHoldings,
    Variant,
    admit_gangs,
    plus,
)
from ...clusters.simulator.cases import SCHEDULERS, SimulatedScheduler, by_proposals
from ...clusters.simulator.events import Counts, Entry, EventCluster, EventOptions, est_rate
from ...clusters.simulator.metrics import Simulation
from ...schema.jobs import Job

_FACTOR = 1.0 + 1e-9  # of a product of rates: growth that is not rounding


def take(exchange: TentativeHoldings) -> None:
    """Let devices change hands while that makes jobs faster on the whole.

    A proposal may also name a device that another job holds: it changes hands where the product of
    both rates grows (the taker's speed-up is more than the giver's slow-down). A job that holds
    nothing has the first claim, the longest waiting one before others. A giver keeps its least
    number of devices. The product of all rates grows with each exchange, so this ends.
    """
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


def simulate_yarn(
    jobs: Iterable[Job],
    pool: ClusterPool,
    options: EventOptions | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Simulation:
    """Run jobs to their end; a gang that loses a device starts again from where it was."""
    return _Yarn(jobs, pool, options or EventOptions(), gangs=True).run(on_progress)


class _Yarn(EventCluster):
    def rate_of(self, entry: Entry, counts: Counts) -> float:
        return est_rate(self.pool.rate_per_device(entry.job), counts, entry.job.scale_factor)

    def schedule(self) -> None:
        """The head of the queue waits for all its devices of one type."""
        for counts in admit_gangs(self.free(), (self._gang(entry.job) for entry in self.waiting)):
            entry = self.waiting.pop(0)
            self.running.append(entry)
            self.resize(entry, counts)

    def _gang(self, job: Job) -> list[Counts]:
        rate = self.pool.rate(job).tolist()
        kinds = [kind for kind in range(len(self.none)) if rate[kind] > 0]
        kinds.sort(key=lambda kind: (-rate[kind], kind))
        return [
            tuple(job.scale_factor if k == kind else 0 for k in range(len(self.none)))
            for kind in kinds
        ]


SCHEDULERS.add(
    "yarn", SimulatedScheduler(run=by_proposals(simulate=simulate_yarn), resizes=False), __name__
)
for _name in ("easyscale-taking", "easyscale-homogeneous"):
    SCHEDULERS.add(_name, SimulatedScheduler(run=by_proposals(VARIANTS.get(_name))), __name__)

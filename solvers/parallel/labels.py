"""Plans of one region, built from the last stage to the first; equal ones are kept once.

A label is what stages placed so far leave to be decided: the layers before them, the link of the
stage placed last, and the devices in use by type. Which stage took which devices, and in what order
alike stages stand, does not matter any more; so labels that leave the same are compared, and only
the better ones are kept. Bounds and prices are those of ``bound.py``.

    behind the cut after layer 1, with one A in use: labels (sum 3 s, slowest 3), (4, 2), (4, 3)
    the third is no better than the first in anything, and is dropped; the first two both stay:
    with few microbatches the least sum decides, with many the slowest stage

A level of labels costs O(labels x arcs); how many there are has no bound but the effort's.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ...planning.costs.parallel_stage import gather_ratio
from ...planning.schedules.closed_forms import LastStages, one_f_one_b_from
from .bound import CappedRegion, Relaxation, price_rows
from .counts import UndecidedError, deal_to_places
from .space import unlike_shares

_WORK_OF_A_LABEL = 2.0  # of ``Effort.tree_work``, for each stage that may come next
_SLACK = 1 + 1e-12  # of sums of prices that meet a budget exactly
Stages = tuple[tuple[int, int, tuple[int, ...], int], ...]
"""From the first to the last: start, end, options by number, and the replicas of the first option
where these share the optimizer's state unlike. Else 0: they are dealt last."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Mixes that differ by recomputation alone; ``variants`` are their numbers."""

    groups: tuple[tuple[int, int], ...]
    variants: tuple[int, ...]
    row: int


@dataclass(frozen=True, slots=True)
class _Arcs:
    """Stages that may come next before one place: [arcs]."""

    kind: np.ndarray
    start: np.ndarray
    mix: np.ndarray
    """Its number, and for each replica that is fixed of its first type the number of mixes more."""
    price: np.ndarray
    compute: np.ndarray
    update: np.ndarray
    reduce: np.ndarray
    extra: np.ndarray
    """Seconds that the region's bound rises by at least."""


_VALUES = ("step", "total", "slowest", "pending", "update", "reduce")


class Labels:
    """The search of a region.

    ``mixes`` are options by number that a stage may take; only plans under ``aim_seconds`` are
    looked for.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        region: CappedRegion,
        mixes: list[tuple[int, ...]],
        aim_seconds: float,
    ) -> None:
        self._relaxation, self.region, self._mixes = relaxation, region, mixes
        self.aim_seconds = aim_seconds
        problem, space, d = relaxation.problem, relaxation.space, relaxation.num_replicas
        self._m, self._sailor = relaxation.num_microbatches, problem.cost_rule == "sailor"
        self._options = space.options
        groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number, mix in enumerate(mixes):
            key = tuple((space.options[o].pool, space.options[o].tensor_parallel_size) for o in mix)
            groups.setdefault(key, []).append(number)
        pairs = [key for key in groups if len(key) > 1]
        num_pools = len(problem.pools)
        self._kinds = [
            _Kind(key, tuple(numbers), num_pools + pairs.index(key) if len(key) > 1 else key[0][0])
            for key, numbers in groups.items()
        ]
        # What two labels must have in common to be compared: nothing that still decides whether, or
        # how fast, the stages before can be placed may differ. Each column of ``use`` is one such
        # thing.
        # Labels count devices a replica of each type, and stages of each pair of types.
        # Where degrees do not divide servers, which ones were taken decides what finds a place.
        every = {group for kind in self._kinds for group in kind.groups}
        odd = sorted(
            each for each in every
            if any(problem.pools[p].devices_per_server % n for p, n in every if p == each[0])
        )  # fmt: skip
        first = num_pools + len(pairs)
        # Stages with unlike shares count apart: how many, and their replicas of the first type.
        unlike = np.array([2 * max(kind.row - num_pools, 0) for kind in self._kinds], dtype=int)
        # Columns of ``use``: devices by pool, stages by pair of types, one for each odd group,
        # then two for each pair with unlike shares.
        self._unlike = first + len(odd) + unlike
        columns = first + len(odd) + (2 * len(pairs) if space.unlike else 0)
        self._use = np.zeros((len(self._kinds), columns), dtype=np.int32)
        for number, kind in enumerate(self._kinds):
            self._use[number, kind.row] = kind.groups[0][1] if len(kind.groups) == 1 else 1
            for group in kind.groups:
                if group in odd:
                    self._use[number, first + odd.index(group)] = 1
        self._rows = np.vstack([price_rows(problem.pools), region.prices])
        self._worth = self._rows @ relaxation.budget
        self._price = self._least_prices(region.prices[None], d)[:, 0]
        self._prices = self._least_prices(self._rows, d)
        self._pairs = np.array(
            [[(mixes[v][0], mixes[v][-1]) for v in kind.variants] for kind in self._kinds]
        )  # [kinds, variants, 2]
        self._variants = np.array([kind.variants for kind in self._kinds])
        options = space.options
        self._sums = np.array([option.seconds for option in options])
        self._own_sent = np.array([option.output_seconds for option in options])
        self._own_back = np.array([(*option.gradient_seconds, 0.0) for option in options])
        self._own_back[:, 0] = 0.0
        # Messages do not depend on recomputation: the first variant's stand for all. [kinds, cuts]
        self._back = self._own_back[self._pairs[:, 0]].max(axis=1)
        self._sent = self._own_sent[self._pairs[:, 0]].max(axis=1)
        self._update_sums = np.array([option.updates for option in options])
        self._update_at = np.array([option.update_at for option in options])
        self._gather_ratio = gather_ratio(problem)
        rings = [
            (tuple(pool for pool, _ in kind.groups), tuple(degree for _, degree in kind.groups))
            for kind in self._kinds
        ]
        known = sorted(set(rings))
        # Kinds of equal types and degrees share a table. [rings, starts, ends]
        self._reduce = np.array([relaxation.rings.table(*ring) for ring in known])
        self._ring_of = np.array([known.index(ring) for ring in rings])
        self._crossing: np.ndarray | None = None  # [kinds, kinds, places]
        if space.between is not None:
            both = self._pairs[:, 0]
            crossing = space.between[both[:, None, :, None], both[None, :, None, :]]
            self._crossing = crossing.max(axis=(2, 3))
        if region.tables is None:
            firsts_of_caps = relaxation.firsts(region.high_seconds, region.high_exchange)
            # Bounds of what is still to be placed: by seconds and prices, and by devices alone. The
            # region's caps bound all stages, so its tables serve every label.
            rest = relaxation.tables(region.prices[None], firsts_of_caps, is_timed=True)[:, 0]
            devices = relaxation.tables(self._rows, firsts_of_caps, is_timed=False)
            self.region = region = replace(region, tables=(rest, devices))
        assert region.tables is not None
        self._rest, self._devices = region.tables
        self._budget = float(region.prices @ relaxation.budget)
        self._fixed = (self._m - 1) * region.low_seconds + region.low_exchange
        self._arcs: dict[tuple[int, int], _Arcs] = {}
        self._undecided = inf
        self.work = 0.0
        root = {name: np.zeros(1) for name in _VALUES}
        root |= {
            "bound": np.array([region.least_seconds]),
            # ``base`` is the bound before the region's own is taken as its floor: arcs add to it.
            "base": np.array([self._fixed + float(self._rest[0, -1]) - self._budget]),
            "price": np.zeros(1),
            "prices": np.zeros((1, len(self._rows))),
            "end": np.array([relaxation.size - 1]),
            "kind": np.array([-1]),
            "use": np.zeros((1, self._use.shape[1]), dtype=np.int32),
            "parent": np.array([-1]),
            "mix": np.array([-1]),
        }
        self._open: list[list[dict[str, np.ndarray]]] = [[] for _ in range(relaxation.most_stages)]
        if relaxation.most_stages:
            self._open[0].append(root)
        # Labels keep their parent's number only; plans are read back from here.
        self._history: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._firsts = [0]  # of each part of the history, and of the next
        self._compared = [0] * len(self._open)  # labels that were left when all were compared
        self._undealt: set[bytes] = set()

    def _least_prices(self, rows: np.ndarray, d: int) -> np.ndarray:
        """The least price of one replica of a stage [kinds, rows]; pairs have one of each type."""
        prices = []
        for kind in self._kinds:
            each = np.array([rows[:, pool] * devices for pool, devices in kind.groups])
            least, most = each.min(axis=0), each.max(axis=0)
            # Of a pair one replica at least is of the dearer type; the other d - 1 may be of the
            # cheaper.
            prices.append(least + (most - least) / d)
        return np.array(prices).reshape(len(self._kinds), len(rows))

    @property
    def least_seconds(self) -> float:
        """Seconds that no plan of the region left to be found is faster than."""
        bounds = [float(c["bound"].min(initial=inf)) for chunks in self._open for c in chunks]
        return min([*bounds, self._undecided, self.aim_seconds])

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to place under the aim."""
        return not any(len(c["bound"]) for chunks in self._open for c in chunks)

    def taken_work(self) -> float:
        """Entries that were looked at since the last call."""
        work, self.work = self.work, 0.0
        return work

    def advance(self, limit: float, width: int) -> list[tuple[float, Stages]]:
        """Place a stage before the most promising labels of each number of stages, in turn.

        ``width`` labels of each number of stages are taken; only plans under ``limit`` seconds
        count.

        Returns:
            Whole plans with their steps, each faster than the one before.

        Raises:
            OutOfTimeError: The effort's limit came first; nothing is lost.
        """
        found: list[tuple[float, Stages]] = []
        limit = min(limit, self.aim_seconds)
        for placed in range(len(self._open)):
            labels = self._taken(placed, limit, width)
            if labels is None:
                continue
            try:
                for end in np.unique(labels["end"]):
                    self._relaxation.effort.check()
                    own = {name: each[labels["end"] == end] for name, each in labels.items()}
                    for step, stages in self._placed(own, int(end), placed, limit):
                        found.append((step, stages))
                        limit = step
            except BaseException:
                # Nothing is lost: what was placed already is placed again later, equals a label
                # that is kept, and is dropped.
                self._open[placed].append(labels)
                raise
        return found

    def _taken(self, placed: int, limit: float, width: int) -> dict[str, np.ndarray] | None:
        """The labels of the least bounds, taken out; those that cannot beat the limit are gone."""
        chunks = self._open[placed]
        if not chunks:
            return None
        whole = {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}
        keep = whole["bound"] < limit
        if not keep.all():
            whole = {name: each[keep] for name, each in whole.items()}
        if not len(whole["bound"]):
            self._open[placed] = []
            return None
        # Comparing all with all is worth it only once they have doubled: so it costs as much, all
        # in all, as placing them did.
        if len(whole["bound"]) > 2 * self._compared[placed]:
            whole = _undominated(whole)
            self._compared[placed] = len(whole["bound"])
        if len(whole["bound"]) <= width:
            self._open[placed] = []
            return whole
        # The least bounds first, a beam of each number of stages: a good plan is found early, and
        # what it refutes is never placed. What is left over stays open, so nothing is lost.
        order = np.argsort(whole["bound"], kind="stable")
        self._open[placed] = [{name: each[order[width:]] for name, each in whole.items()}]
        return {name: each[order[:width]] for name, each in whole.items()}

    def _placed(
        self, labels: dict[str, np.ndarray], end: int, placed: int, limit: float
    ) -> list[tuple[float, Stages]]:
        """Put each stage that may come next before each of these labels, which have one end."""
        arcs = self._arcs_of(placed, end)
        # No label of this end can take an arc that raises the bound by more, so all others go at
        # once.
        spare = (limit - float(labels["base"].min())) * _SLACK
        chosen = np.flatnonzero(arcs.extra < spare)
        self.work += _WORK_OF_A_LABEL * len(chosen) * len(labels["bound"])
        if not len(chosen):
            return []
        recorded = self._record(labels, end)
        one, arc = np.divmod(np.arange(len(labels["bound"]) * len(chosen)), len(chosen))
        arc = chosen[arc]
        is_near = labels["base"][one] + arcs.extra[arc] < limit * _SLACK
        one, arc = one[is_near], arc[is_near]
        kind, start = arcs.kind[arc], arcs.start[arc]
        # The root has no stage behind; its -1 is read as kind 0 below, and the answer not used.
        before = labels["kind"][one]
        is_root = before < 0
        # A message is as slow as the slower of both stages' links, which only now are both known.
        back = np.maximum(self._back[np.maximum(before, 0), end], self._back[kind, end])
        sent = np.maximum(self._sent[np.maximum(before, 0), end], self._sent[kind, end])
        if self._crossing is not None:
            crossing = self._crossing[np.maximum(before, 0), kind, end]
            back, sent = np.maximum(back, crossing), np.maximum(sent, crossing)
        back, sent = np.where(is_root, 0.0, back), np.where(is_root, 0.0, sent)
        own_back, is_whole = self._back[kind, start], start == 0
        names = ("step", "total", "slowest", "pending")
        behind = {name: labels[name][one] for name in names}
        if self._relaxation.problem.hides_messages:
            last = LastStages(*behind.values())
            in_flight = min(placed + 1, self._m)
            whole = one_f_one_b_from(last, arcs.compute[arc], sent, in_flight, self._m)
            now, steps = dict(zip(names, whole, strict=True)), whole.step_seconds
            # If the stage before had a link as fast as this one's: the least that a whole plan can
            # take.
            rising = steps + own_back
        else:
            # Sailor counts the last stage's gradient, and the first one's output, twice.
            again = np.where(self._sailor & is_whole & (placed + 1 > 3), sent, 0.0)
            back = (2.0 if self._sailor and placed == 1 else 1.0) * back
            now = _waited_for(behind, arcs.compute[arc] + sent, back)
            slowest, pending = now["slowest"], now["pending"]
            steps = now["total"] + again + (self._m - 1) * np.maximum(slowest, pending + again)
            rising = now["total"] + own_back
            rising += (self._m - 1) * np.maximum(slowest, pending + own_back)
        values = now | {
            "update": np.maximum(labels["update"][one], arcs.update[arc]),
            "reduce": np.maximum(labels["reduce"][one], arcs.reduce[arc]),
            "kind": kind,
            "end": start,
            "price": labels["price"][one] + arcs.price[arc],
            "parent": recorded + one,
            "mix": arcs.mix[arc],
        }
        region, exchange = self.region, values["update"] + values["reduce"]
        low = (self._m - 1) * region.low_seconds
        # No stage of the region is faster than ``low_seconds`` at its slowest, even if none placed
        # so far is that slow.
        rising = np.maximum(rising, values["total"] + own_back + low)
        rising += np.maximum(exchange, region.low_exchange)
        # Prices count devices that are used and those that the rest will need, less the whole
        # pool's worth: what is over budget makes the bound rise, so no count of devices is needed
        # here.
        rest = values["price"] + self._rest[placed + 1][start]
        values["base"] = rising + rest - self._budget
        values["bound"] = np.maximum(values["base"], region.least_seconds)
        values["bound"] = np.maximum(values["bound"], steps + exchange)
        found = self._finished(values, steps + exchange, is_whole, labels, one, limit)
        limit = found[-1][0] if found else limit
        keep = ~is_whole & (values["bound"] < limit)
        if placed + 1 >= len(self._open) or not keep.any():
            return found
        kept = {name: each[keep] for name, each in values.items()}
        one, kind, start = one[keep], kind[keep], start[keep]
        kept["prices"] = labels["prices"][one] + self._prices[kind]
        needed = kept["prices"] + self._devices[placed + 1][:, start].T
        # The same by devices alone, under many prices at once: one that fails any is no plan.
        has_room = (needed <= self._worth * (1 + 1e-9)).all(axis=1)
        kept["use"] = labels["use"][one] + self._used(kind, kept["mix"])
        self._open[placed + 1].append({name: each[has_room] for name, each in kept.items()})
        return found

    def _finished(
        self,
        values: dict[str, np.ndarray],
        steps: np.ndarray,
        is_whole: np.ndarray,
        labels: dict[str, np.ndarray],
        one: np.ndarray,
        limit: float,
    ) -> list[tuple[float, Stages]]:
        """The fastest whole plan under the limit whose replicas can be dealt."""
        found: list[tuple[float, Stages]] = []
        whole = np.flatnonzero(is_whole & (values["bound"] < limit))
        if not len(whole):
            return found
        steps = steps[whole]
        for place in np.argsort(steps, kind="stable"):
            if steps[place] >= limit:
                break
            label, kind = one[whole[place]], values["kind"][whole[place]]
            own = self._used(kind[None], values["mix"][whole[place], None])[0]
            use = (labels["use"][label] + own).tobytes()
            # Alike counts cannot be dealt either, whatever the stages' order: they are not tried
            # again.
            if use in self._undealt:
                continue
            stages = self._stages(values, int(whole[place]))
            try:
                is_dealt = self._can_deal(stages)
            except UndecidedError:
                # The plan may exist, so its bound stays in the answer's; else a search would claim
                # too much.
                self._undecided = min(self._undecided, float(values["bound"][whole[place]]))
                continue
            if is_dealt:
                found.append((float(steps[place]), stages))
                break
            self._undealt.add(use)
        return found

    def _can_deal(self, stages: Stages) -> bool:
        relaxation = self._relaxation
        groups = [
            tuple((self._options[o].pool, self._options[o].tensor_parallel_size) for o in mix)
            for _, _, mix, _ in stages
        ]
        pools, fixed = relaxation.problem.pools, [first for *_, first in stages]
        return deal_to_places(groups, fixed, relaxation.num_replicas, pools) is not None

    def _used(self, kind: np.ndarray, mix: np.ndarray) -> np.ndarray:
        """What arcs use [arcs, columns], by their kinds and mixes."""
        # Mixes with unlike shares carry their replicas of the first type as multiples of the
        # number of mixes.
        first = mix // len(self._mixes)
        use: np.ndarray = np.where(first[:, None] > 0, 0, self._use[kind])
        rows = np.flatnonzero(first)
        use[rows, self._unlike[kind[rows]]] = 1
        use[rows, self._unlike[kind[rows]] + 1] = first[rows]
        return use

    def _record(self, labels: dict[str, np.ndarray], end: int) -> int:
        """Keep where these labels came from; return the number of the first."""
        ends = np.full(len(labels["parent"]), end)
        self._history.append((labels["parent"], labels["mix"], ends))
        self._firsts.append(self._firsts[-1] + len(ends))
        return self._firsts[-2]

    def _stages(self, values: dict[str, np.ndarray], place: int) -> Stages:
        start, mix = int(values["end"][place]), int(values["mix"][place])
        parent, stages = int(values["parent"][place]), []
        while mix >= 0:
            chunk = bisect_right(self._firsts, parent) - 1
            parents, mixes, ends = self._history[chunk]
            row = parent - self._firsts[chunk]
            end = int(ends[row])
            first, number = divmod(mix, len(self._mixes))
            stages.append((start, end, self._mixes[number], first))
            start, mix, parent = end, int(mixes[row]), int(parents[row])
        return tuple(stages)

    def _arcs_of(self, placed: int, end: int) -> _Arcs:
        """Stages that may come next before ``end``, with ``placed`` behind them."""
        key = placed, end
        if key not in self._arcs:
            self._arcs[key] = self._new_arcs(placed, end)
        return self._arcs[key]

    def _new_arcs(self, placed: int, end: int) -> _Arcs:
        relaxation, region = self._relaxation, self.region
        in_flight, is_last = min(placed + 1, self._m), end == relaxation.size - 1
        compute = np.full((len(self._options), end), inf)
        for o in np.unique(self._pairs):
            option = self._options[o]
            own = self._sums[o, end] - self._sums[o, :end]
            compute[o] = np.where(option.fits_before(end, in_flight), own, inf)
        both = compute[self._pairs]  # [kinds, variants, options, starts]
        if relaxation.shares_weights:
            both = both + [
                [[self._waits(o, kind)[:end, end] for o in pair] for pair in pairs]
                for kind, pairs in zip(self._kinds, self._pairs, strict=True)
            ]
        each = both.max(axis=2)
        # Of variants that differ in recomputation alone the fastest that fits is enough: it takes
        # the same devices, and leaves the same for others.
        best = each.argmin(axis=1)
        rows, starts = np.arange(len(best))[:, None], np.arange(end)[None, :]
        fastest = each[rows, best, starts]
        # What the region's caps are on.
        alone = self._with_messages(both, self._pairs, end).max(axis=2)[rows, best, starts]
        updates = self._update_at[:, :end]
        if not self._sailor:
            updates = self._update_sums[:, end, None] - self._update_sums[:, :end]
        update = np.maximum(updates[self._pairs[:, 0, 0]], updates[self._pairs[:, 0, 1]])
        kind, start = np.nonzero((alone <= region.high_seconds * _SLACK) & (fastest < inf))
        chosen, price = self._variants[kind, best[kind, start]], self._price[kind]
        even = (kind, start, chosen, price, fastest[kind, start], update[kind, start])
        found = [even, *self._unlike_arcs(placed, end, updates, fastest, update)]
        kind, start, mix, price, own, update = map(np.concatenate, zip(*found, strict=True))
        # Reduced cost: by how much the shortest path through this arc is longer than the shortest
        # one from ``end``.
        extra = own + self._back[kind, start] + price - self._rest[placed][end]
        extra += self._rest[placed + 1][start]
        extra += 0.0 if is_last else self._sent[kind, end]
        reduce = self._reduce[self._ring_of[kind], start, end]
        gathers = self._gather_ratio * reduce
        arcs = (kind, start, mix, price, own, update + gathers, reduce, extra)
        is_open = extra < inf
        return _Arcs(*(each[is_open] for each in arcs))

    def _waits(self, option: int, kind: _Kind) -> np.ndarray:
        """What transfers of weights that are shared add to passes [starts, ends]."""
        pools = tuple(pool for pool, _ in kind.groups)
        return self._relaxation.rings.waits(self._options[option], pools)

    def _with_messages(
        self, own: np.ndarray, options: "list[int] | np.ndarray", end: int
    ) -> np.ndarray:
        """T of stages [options, starts], with their own messages where passes do not hide these."""
        if self._relaxation.problem.hides_messages:
            return own
        sent = 0.0 if end == self._relaxation.size - 1 else self._own_sent[options, end][..., None]
        longest: np.ndarray = own + self._own_back[options, :end] + sent
        return longest

    def _unlike_arcs(
        self,
        placed: int,
        end: int,
        updates: np.ndarray,
        fastest: np.ndarray,
        equal: np.ndarray,
    ) -> Iterator[tuple[np.ndarray, ...]]:
        """Arcs of stages that share the optimizer's state unlike, for each number of replicas."""
        # ``updates``: [options, starts] seconds with equal shares.
        # ``fastest``: [kinds, starts] compute of the arcs with equal shares; infinite where none.
        # ``equal``: [kinds, starts] their updates.
        in_flight, region = min(placed + 1, self._m), self.region
        count = np.arange(1, self._relaxation.num_replicas)
        pairs = {frozenset(pair): pair for pair in self._relaxation.space.unlike}
        for kind, variants in enumerate(self._variants):
            for mix in variants if pairs else ():
                if frozenset(self._mixes[mix]) not in pairs:
                    continue
                both = list(pairs[frozenset(self._mixes[mix])])
                options = [self._options[o] for o in both]
                stages = np.s_[:end, end]
                fits, *shares = unlike_shares(options[0], options[1], count, stages, in_flight)
                own = self._sums[both, end, None] - self._sums[both, :end]
                if self._relaxation.shares_weights:
                    waits = [self._waits(o, self._kinds[kind])[:end, end] for o in both]
                    own = own + np.array(waits)
                alone = self._with_messages(own, both, end)
                fits &= (alone.max(axis=0) <= region.high_seconds * _SLACK)[:, None]
                times = [o.times_equal(s.T, stages).T for o, s in zip(options, shares, strict=True)]
                update = np.max(updates[both][:, :, None] * np.array(times), axis=0)
                own = own.max(axis=0)
                # Unlike shares are worth an arc only where they beat equal ones in passes or in
                # the update.
                fits &= (own < fastest[kind])[:, None] | (update < equal[kind][:, None])
                start, column = np.nonzero(fits)
                is_first = self._mixes[mix][0] == both[1]
                # ``count`` replicas are of both[1], the other d - count of both[0]; a mix counts
                # those of its own first option.
                first = count[column] if is_first else count[::-1][column]
                low, high = (region.prices[o.pool] * o.tensor_parallel_size for o in options)
                price = (count * high + count[::-1] * low) / (len(count) + 1)
                yield (
                    np.full(len(start), kind), start, mix + len(self._mixes) * first,
                    price[column], own[start], update[start, column],
                )  # fmt: skip


def _waited_for(
    behind: dict[str, np.ndarray], pending: np.ndarray, back: np.ndarray
) -> dict[str, np.ndarray]:
    """Labels with a stage before them whose messages nothing hides."""
    # ``pending`` is the first stage without its gradient, which the stage before it decides.
    return {
        "step": behind["step"],
        "total": behind["total"] + back + pending,
        "slowest": np.maximum(behind["slowest"], behind["pending"] + back),
        "pending": pending,
    }


def _undominated(labels: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The labels that no other, with the same left to decide, is at least as good as."""
    number = len(labels["bound"])
    if number < 2:
        return labels
    keys = np.concatenate(
        [labels["end"][:, None], labels["kind"][:, None], labels["use"]], axis=1
    ).astype(np.int64)
    # One number for each row of keys sorts groups together. Unlike keys may share a number, so
    # keys are compared as well; the seed is fixed for repeatable plans.
    weights = np.random.default_rng(0).integers(1, 1 << 62, keys.shape[1])
    hashed = (keys * weights).sum(axis=1)
    whole, values = labels["total"], [labels[name] for name in _VALUES]
    order = np.lexsort((labels["slowest"], whole, hashed))
    keep = np.ones(number, dtype=bool)
    # Each is compared with the first of its group, again and again with the first that is left.
    # Comparing all pairs of a group would cost its square. Three passes against the best by turns
    # of sum and slowest stage find most.
    for _ in range(3):
        left = order[keep[order]]
        same = hashed[left][1:] == hashed[left][:-1]
        first = np.maximum.accumulate(np.where(np.append(False, same), 0, np.arange(len(left))))
        best = left[first]
        worse = (best != left) & (keys[best] == keys[left]).all(axis=1)
        for each in values:
            worse &= each[best] <= each[left]
        if not worse.any():
            break
        keep[left[worse]] = False
        # The next to compare with is another one.
        order = np.lexsort((whole, labels["slowest"], hashed))
    return labels if keep.all() else {name: each[keep] for name, each in labels.items()}

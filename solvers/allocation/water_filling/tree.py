"""How levels rise together through a tree of shares, as a path over time (thesis 5.4.3).

A fair node passes its share on to its active children, jobs and nodes, by weight; a FIFO node gives
all of it to the first active child in order of arrival (nodes: of their first job). A row stops at
its cap and leaves its share to the others. All rows of a node share one counter, the tide: a row
has risen by its weight times the tide since the row began. So an event (a row reaches its cap)
touches its own node alone, unless that runs empty: N events cost O(N log N), plus the number of
nodes for each node that runs empty.

    a fair node with rows a and b of weights 1 and 3, each with a cap of 1
    both rise, 1/4 and 3/4 of the node's time: at time 4/3 b is at its cap, and a at 1/3
    then all is a's: at time 2 a is at its cap too
"""

import heapq
from bisect import bisect_right

import numpy as np

from ....schema.jobs import Entity
from ..program import Bools, Floats, Ints


class RowTree:
    """Weights and arrival of rows of equal jobs in a tree of entities.

    Rows stand in order of arrival, and a row that waits in a FIFO entity holds one job.
    """

    def __init__(
        self, entities: tuple[Entity, ...], entity: Ints, weight: Floats, count: Floats
    ) -> None:
        """Build the tree; jobs outside the entities hang at the top, a fair node."""
        self.top = len(entities)
        names = {node.name: i for i, node in enumerate(entities)}
        self.parent = [self.top if e.parent is None else names[e.parent] for e in entities]
        self.weight = [e.weight for e in entities]
        self.fifo = np.array([e.policy == "fifo" for e in entities] + [False])
        self.children: list[list[int]] = [[] for _ in range(self.top + 1)]
        for node, parent in enumerate(self.parent):
            self.children[parent].append(node)
        # Parents before children; the list grows while it is read.
        self.downwards = [self.top]
        for node in self.downwards:
            self.downwards.extend(self.children[node])
        # Arrival matters in FIFO nodes and below them.
        self.in_line = self.fifo.copy()
        for node in self.downwards[1:]:
            self.in_line[node] |= self.in_line[self.parent[node]]
        self.entity = np.where(entity < 0, self.top, entity)
        order = np.argsort(self.entity, kind="stable")
        ends = np.cumsum(np.bincount(self.entity, minlength=self.top + 1))
        self.rows_of = np.split(order, ends[:-1])
        # In a FIFO node weights do not count: one row at a time has all.
        self.job_weight = np.where(self.fifo[self.entity], 1.0, weight)
        self.count = count
        # Levels are per unit of weight; of a tree, per unit of the top's share.
        self.flow = 1.0 if entities else float(weight @ count)


class _Node:
    """A node while its jobs rise: the rows that still rise, its share, and its tide over time."""

    __slots__ = ("arrival", "arrived", "first", "line", "living", "log", "place", "rate",
                 "share", "since", "stamp", "tide", "weights")  # fmt: skip

    def __init__(self, line: list[int], arrival: list[int], weights: list[float]) -> None:
        self.line, self.place = line, 0  # own rows as they stop
        self.weights = weights  # of this row and all after it
        self.arrival, self.arrived = arrival, 0  # own rows as they came
        self.living = len(line)
        self.first = -1
        self.share = self.rate = self.tide = self.since = 0.0
        self.stamp = 0
        self.log: tuple[list[float], list[float], list[float]] = ([], [], [])


class Path:
    """The rise of all active rows from ``level`` [rows] until each has reached ``cap`` [rows].

    ``times`` are those of the events; between them every level is linear in time.
    """

    def __init__(self, tree: RowTree, level: Floats, active: Bools, cap: Floats) -> None:
        self._tree, self._base = tree, level
        # A row at its cap or beyond has nothing to rise by.
        active = active & (cap > level)
        self._active = active
        # [rows] by how much the tide may rise until the row is at its cap, from when it began.
        self._room = np.where(active, (cap - level) / tree.job_weight, 0.0)
        # Rows that wait in line have not begun: infinite.
        self._begin = np.where(active & ~tree.fifo[tree.entity], 0.0, np.inf)
        self._gone = ~active
        self._heap: list[tuple[float, int, int]] = []
        self._nodes = [self._lined_up(node) for node in range(tree.top + 1)]
        # From the leaves up: a node lives while it has living rows or children.
        for node in reversed(tree.downwards):
            at = self._nodes[node]
            for child in tree.children[node]:
                if self._nodes[child].living:
                    at.living += 1
            at.first = self._earliest(node)
        self.times = [0.0]
        if self._nodes[tree.top].living:
            self._flow(tree.top, tree.flow, 0.0)
        while self._heap:
            time, node, stamp = heapq.heappop(self._heap)
            # A node that flowed anew since has a newer entry: this one is void.
            if stamp == self._nodes[node].stamp:
                if time > self.times[-1]:
                    self.times.append(time)
                self._stop(node, self.times[-1])

    def levels(self, time: float) -> Floats:
        """Every row's level at a time [rows]; rows not active keep theirs."""
        tides = np.array([_tide_at(node, time) for node in self._nodes])
        risen = np.clip(tides[self._tree.entity] - self._begin, 0.0, self._room)
        levels: Floats = self._base + self._tree.job_weight * risen
        return levels

    def _lined_up(self, node: int) -> _Node:
        tree = self._tree
        rows: Ints = tree.rows_of[node]
        rows = rows[self._active[rows]]
        if tree.fifo[node]:
            return _Node(rows.tolist(), rows.tolist(), [])
        # The row that stops first stands first, so a node looks at one row for its next event.
        line = rows[np.argsort(self._room[rows], kind="stable")]
        # Suffix sums: the weight of all rows that still rise.
        weights = (tree.job_weight * tree.count)[line[::-1]].cumsum()[::-1]
        return _Node(line.tolist(), rows.tolist(), [*weights.tolist(), 0.0])

    def _earliest(self, node: int) -> int:
        """The first active row in order of arrival in a node and below it."""
        at = self._nodes[node]
        if not self._tree.in_line[node]:
            return -1
        while at.arrived < len(at.arrival) and self._gone[at.arrival[at.arrived]]:
            at.arrived += 1
        own = at.arrival[at.arrived : at.arrived + 1]
        below = [
            self._nodes[child].first
            for child in self._tree.children[node]
            if self._nodes[child].living
        ]
        return min(own + below, default=-1)

    def _flow(self, node: int, share: float, time: float) -> None:
        """Give a node its share from now on, and those below it theirs."""
        tree, waiting = self._tree, [(node, share)]
        while waiting:
            node, share = waiting.pop()
            at = self._nodes[node]
            # What has risen until now, at the rate until now; then the new share.
            at.tide += at.rate * (time - at.since)
            at.share, at.since = share, time
            below = [child for child in tree.children[node] if self._nodes[child].living]
            # All of it goes to the first in line: an own row, or the child that has it.
            if tree.fifo[node]:
                own = at.place < len(at.line) and at.line[at.place] == at.first
                at.rate = share if own else 0.0
                # A row of a line begins when its turn comes.
                if own and np.isinf(self._begin[at.first]):
                    self._begin[at.first] = at.tide
                for child in below:
                    head = not own and self._nodes[child].first == at.first
                    waiting.append((child, share if head else 0.0))
            else:
                total = at.weights[at.place] + sum(tree.weight[child] for child in below)
                at.rate = share / total if at.living else 0.0
                # A node's rate is per unit of weight, for rows and children alike.
                waiting.extend((child, at.rate * tree.weight[child]) for child in below)
            self._note(node, time)

    def _note(self, node: int, time: float) -> None:
        """Log the tide, and say when the next row stops."""
        at = self._nodes[node]
        for column, value in zip(at.log, (time, at.tide, at.rate), strict=True):
            column.append(value)
        at.stamp += 1
        if at.rate > 0 and at.place < len(at.line):
            left = self._full(at.line[at.place]) - at.tide
            heapq.heappush(self._heap, (time + max(left, 0.0) / at.rate, node, at.stamp))

    def _full(self, row: int) -> float:
        return float(self._begin[row] + self._room[row])

    def _stop(self, node: int, time: float) -> None:
        """The rows of a node that are at their caps stop; what changed above flows anew."""
        tree, at = self._tree, self._nodes[node]
        at.tide, at.since = self._full(at.line[at.place]), time
        # Rows with equal caps stop in one event.
        while at.place < len(at.line) and self._full(at.line[at.place]) <= at.tide:
            row = at.line[at.place]
            self._gone[row] = True
            at.place += 1
            at.living -= 1
        # From the node up as far as anything changes: a node that runs empty gives its share back
        # to its parent, and the head of a line may be another one.
        changed = node
        while True:
            at = self._nodes[node]
            before, at.first = at.first, self._earliest(node)
            if tree.fifo[node] and at.first != before:
                changed = node
            if node == tree.top:
                break
            parent = self._nodes[tree.parent[node]]
            if not at.living:
                self._flow(node, 0.0, time)
                parent.living -= 1
                changed = tree.parent[node]
            # Above a fair node outside all lines nothing has changed.
            elif not tree.in_line[node]:
                break
            node = tree.parent[node]
        self._flow(changed, self._nodes[changed].share, time)


def _tide_at(node: _Node, time: float) -> float:
    times, tides, rates = node.log
    if not times:
        return 0.0
    i = max(bisect_right(times, time) - 1, 0)
    return tides[i] + rates[i] * (time - times[i])

"""The tree of shares of thesis 5.4.3, by definition: first shares, and when each job stops rising.

Water filling raises the levels of jobs over time. Times are measured in volumes: the volume of a
node is its share of the resources, summed over the time since the start.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from ...schema.jobs import Entity, Job

TOP = ""
SAME_VOLUME = 1e-9


class Tree:
    """Jobs under their entities, in order of arrival; jobs without an entity are at the root."""

    def __init__(self, jobs: Iterable[Job], entities: Iterable[Entity]) -> None:
        self.nodes = {TOP: Entity(name="top")} | {e.name: e for e in entities}
        self.jobs: dict[str, dict[str, Job]] = {name: {} for name in self.nodes}
        self.children: dict[str, list[str]] = {name: [] for name in self.nodes}
        self.place: dict[str, int] = {}
        for place, job in enumerate(jobs):
            self.jobs[job.entity or TOP][job.id] = job
            self.place[job.id] = place
        for name, node in self.nodes.items():
            if name != TOP:
                self.children[node.parent or TOP].append(name)
        self.downwards = [TOP]
        for name in self.downwards:
            self.downwards.extend(self.children[name])
        self.first: dict[str, int] = {}
        for name in reversed(self.downwards):
            own = [self.place[job] for job in self.jobs[name]]
            below = [self.first[child] for child in self.children[name] if child in self.first]
            if own or below:
                self.first[name] = min(own + below)

    def first_shares(self) -> dict[str, float]:
        """Return each job's fraction of the whole before any job has stopped; 0 if it waits."""
        share, answer = {TOP: 1.0}, dict.fromkeys(self.place, 0.0)
        for name in self.downwards:
            below = [child for child in self.children[name] if child in self.first]
            if self.nodes[name].policy == "fifo":
                for job in self.jobs[name]:
                    answer[job] = share[name] if self.place[job] == self.first[name] else 0.0
                for child in below:
                    share[child] = share[name] * (self.first[child] == self.first[name])
                continue
            total = sum(job.priority_weight for job in self.jobs[name].values())
            total += sum(self.nodes[child].weight for child in below)
            for job, entry in self.jobs[name].items():
                answer[job] = share[name] * entry.priority_weight / total
            for child in below:
                share[child] = share[name] * self.nodes[child].weight / total
        return answer

    def times(self, level: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """Compute when each job reaches its level, and when it stops there, in volumes of the root.

        A job in a FIFO node may reach its level and then wait for its next turn. It stops only when
        that turn comes and does not raise it.

        Args:
            level: The level that each job has in the end.

        Returns:
            Job id -> volume when it reaches its level, and job id -> volume when it stops.
        """
        ends: dict[str, list[_End]] = {}
        for name in reversed(self.downwards):
            below = {c: ends.pop(c) for c in self.children[name] if c in self.first}
            is_fifo = self.nodes[name].policy == "fifo"
            pour = self._in_turn if is_fifo else self._together
            ends[name] = pour(name, level, below)
        return {e.job: e.has for e in ends[TOP]}, {e.job: e.stops for e in ends[TOP]}

    def _together(
        self, name: str, level: dict[str, float], below: dict[str, list["_End"]]
    ) -> list["_End"]:
        """Raise all members by weight: at height h a member holds weight * min(h, its height)."""
        own = {job: level[job] / entry.priority_weight for job, entry in self.jobs[name].items()}
        tops = [(height, self.jobs[name][job].priority_weight) for job, height in own.items()]
        for child, inner in below.items():
            weight = self.nodes[child].weight
            tops.append((max(end.stops for end in inner) / weight, weight))
        tops.sort()
        heights = [height for height, _ in tops]
        full = [*accumulate((height * weight for height, weight in tops), initial=0.0)]
        rising = [*accumulate((weight for _, weight in reversed(tops)), initial=0.0)][::-1]

        def volume(height: float) -> float:
            done = bisect_right(heights, height)
            return full[done] + height * rising[done]

        ends = [_End(job, volume(height), volume(height)) for job, height in own.items()]
        for child, inner in below.items():
            weight = self.nodes[child].weight
            ends += [_End(e.job, volume(e.has / weight), volume(e.stops / weight)) for e in inner]
        return ends

    def _in_turn(
        self, name: str, level: dict[str, float], below: dict[str, list["_End"]]
    ) -> list["_End"]:
        """Fill members in FIFO order: the one whose earliest running job arrived first gets all."""
        left = {job: [_End(job, level[job], level[job])] for job in self.jobs[name]} | below
        ends, has = [], dict[str, float]()
        poured, held = 0.0, dict.fromkeys(left, 0.0)
        while left:
            head = min(left, key=lambda member: min(self.place[e.job] for e in left[member]))
            first = min(left[head], key=lambda end: self.place[end.job])
            until = max(first.stops, held[head])
            for end in left[head]:
                if end.has <= until * (1 + SAME_VOLUME):
                    has.setdefault(end.job, poured + max(min(end.has, until) - held[head], 0.0))
            # A job that stops at the same volume as the first may only be waiting for its turn.
            done = [e for e in left[head] if e is first or e.stops < until * (1 - SAME_VOLUME)]
            for end in done:
                stops = poured + max(end.stops - held[head], 0.0)
                ends.append(_End(end.job, has[end.job], stops))
            poured, held[head] = poured + until - held[head], until
            left[head] = [end for end in left[head] if end not in done]
            if not left[head]:
                del left[head]
        return ends


class _End(NamedTuple):
    """The volumes of a node at which a job reaches its level (``has``) and at which it stops."""

    job: str
    has: float
    stops: float

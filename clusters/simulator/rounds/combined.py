"""Rounds in which a pair of jobs may share devices, and a job may hold several types at once.

A pair takes one worker slot (thesis 5.5): it is chosen as a whole, by its own priority, and no
job runs twice in a round. By the ``text`` convention the partner of a job that ends goes on
alone, at its own rate, for the rest of the round; by the ``published`` one at the pair's, and
both count as finished when the later one does. Device-seconds that two jobs share are charged
to each by half.
"""

from dataclasses import dataclass

import numpy as np

from ...mechanisms.arrays import NOWHERE, Bools, Floats, Ints
from ...mechanisms.rounds.decide import choose_together, receive_together
from ...mechanisms.rounds.pairs import Chosen
from .base import STEPS_LEFT, Rounds


@dataclass(slots=True)
class _Work:
    """What jobs did in a round: place, column, partner (or -1), seconds, steps, share of cost."""

    job: Ints
    column: Ints
    seconds: Floats
    steps: Floats
    charged: Floats


class CombinedRounds(Rounds):
    """Rounds over combinations: jobs alone on a column, and pairs."""

    def begin(self) -> None:
        """Start with no job moved."""
        self.moved: Bools = np.zeros(0, dtype=bool)

    def run_round(self) -> None:
        """Choose combinations and let them work for a round."""
        chosen = choose_together(self.state, self.allocator, self.options)
        kind = np.full(len(self.active), NOWHERE, dtype=np.int64)
        kind[chosen.first] = chosen.placed
        paired = chosen.second >= 0
        kind[chosen.second[paired]] = chosen.placed[paired]
        work = self._work_together(chosen, kind)
        self._record(chosen, work, kind)

    def _work_together(self, chosen: Chosen, kind: Ints) -> _Work:
        active, options = self.active, self.options
        moved = active.last_type != kind
        a, c = chosen.first, chosen.placed
        two = chosen.second >= 0
        b = np.where(two, chosen.second, a)
        slow_a = slow_b = np.ones(len(a))
        if self.state.servers is not None:
            ids = self._ids(chosen)
            close, relocated = self.seat(ids, c, active.scale[a], (chosen.column != c).tolist())
            slow_a, slow_b = self.spread_rate(a, c, close), self.spread_rate(b, c, close)
            moved[a] |= relocated
            moved[b[two]] |= relocated[two]
        self.moved = moved
        lost = self.lost(np.arange(len(active)), moved)
        alone_a, alone_b = active.rate[c, a] * slow_a, active.rate[c, b] * slow_b
        rate_a, rate_b = alone_a.copy(), np.zeros(len(a))
        rate_a[two] = self.state.pairs.rate[chosen.pair[two]] * slow_a[two]
        rate_b[two] = self.state.pairs.beside[chosen.pair[two]] * slow_b[two]
        first = _phase(active.left[a], rate_a, lost[a])
        second = np.where(two, _phase(active.left[b], rate_b, lost[b]), np.inf)
        length = np.full(len(a), options.round_seconds)
        if options.convention == "published":
            seconds_a, steps_a = self._whole_steps(rate_a, active.left[a])
            seconds_b, steps_b = self._whole_steps(rate_b, active.left[b])
            seconds_a = np.maximum(seconds_a, np.where(two, seconds_b, 0.0))
            seconds_b = seconds_a
        else:
            seconds_a, steps_a = _finish(
                active.left[a], rate_a, alone_a, lost[a], second, first, length
            )
            seconds_b, steps_b = _finish(
                active.left[b], rate_b, alone_b, lost[b], first, second, length
            )
        both = np.where(two, np.minimum(seconds_a, seconds_b), 0.0)
        return _Work(
            np.concatenate((a, b[two])),
            np.concatenate((c, c[two])),
            np.concatenate((seconds_a, seconds_b[two])),
            np.concatenate((steps_a, steps_b[two])),
            np.concatenate((seconds_a - both / 2, (seconds_b - both / 2)[two])),
        )

    def _whole_steps(self, rate: Floats, left: Floats) -> tuple[Floats, Floats]:
        possible = np.maximum(np.floor(rate * self.options.round_seconds), 1.0)
        steps = np.minimum(possible, left)
        return steps / np.where(rate > 0, rate, np.inf), steps

    def _record(self, chosen: Chosen, work: _Work, kind: Ints) -> None:
        active, resources = self.active, self.pool.resources
        usage = np.where(self.pool.is_mix[work.column] == 1, 1, active.scale[work.job])
        hits = self._hit(chosen)
        both = np.concatenate((chosen.first[hits], chosen.second[hits]))
        struck = np.unique(both[both >= 0])
        hit = np.isin(work.job, struck)
        work.steps[hit] = 0.0
        left = active.left[work.job] - work.steps
        done = left <= STEPS_LEFT
        active.left[work.job] = left
        active.held[work.column, work.job] += work.charged
        self.busy += resources[:, work.column] @ (work.charged * usage)
        self._receive(chosen, work)
        self.note(work.job, self.moved[work.job])
        if self.book is not None:
            number, ids = len(chosen.first), self._ids(chosen)
            seconds = [[time] for time in work.seconds[:number].tolist()]
            paired = (chosen.second >= 0).nonzero()[0].tolist()
            for place, time in zip(paired, work.seconds[number:].tolist(), strict=True):
                seconds[place].append(time)
            self.hold(self.book, ids, chosen.placed, usage[:number], seconds, hits)
        kind[struck] = NOWHERE  # it restarts
        active.last_type[:] = kind
        start, number = self.now, len(active)
        self.now = self.end(work.seconds, done)
        if done.any():
            gone = work.job[done]
            self.outcomes.extend(active.remove(gone, start + work.seconds[done], self.hourly))
            self.state.pairs.drop(gone, number)
            self.num_done += len(gone)
            self.state.changed = True

    def _ids(self, chosen: Chosen) -> list[tuple[str, ...]]:
        jobs = self.active.jobs
        return [
            (jobs[a].id,) if b < 0 else (jobs[a].id, jobs[b].id)
            for a, b in zip(chosen.first.tolist(), chosen.second.tolist(), strict=True)
        ]

    def _receive(self, chosen: Chosen, work: _Work) -> None:
        """Count the seconds of combinations, each once."""
        number = len(chosen.first)
        seconds = work.seconds[:number].copy()
        two = chosen.second >= 0
        seconds[two] = np.maximum(seconds[two], work.seconds[number:])
        receive_together(self.state, chosen, seconds)

    def _hit(self, chosen: Chosen) -> Ints:
        """Which placements a failure hits."""
        if self.outages is None:
            return np.zeros(0, dtype=np.int64)
        mix = self.pool.is_mix[chosen.placed] == 1
        often = np.where(mix, 1, self.active.scale[chosen.first])
        usage = self.pool.resources[:, chosen.placed] * often
        return self.strike(self._ids(chosen), usage, self.outages)


def _phase(left: Floats, rate: Floats, lost: Floats) -> Floats:
    """Seconds until a job ends at this rate; infinite where it stands still."""
    return np.where(rate > 0, lost + left / np.where(rate > 0, rate, 1.0), np.inf)


def _finish(
    left: Floats, rate: Floats, alone: Floats, lost: Floats, partner: Floats, own: Floats,
    length: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Seconds and steps of a job whose partner leaves after ``partner`` seconds.

    Args:
        left: Steps to run.
        rate: Steps per second while the partner is there.
        alone: Steps per second afterwards.
        lost: Seconds that a restart takes first.
        partner: When the partner ends at its pair's rate.
        own: When this job would.
        length: Seconds of the round.
    """
    together = np.minimum(np.minimum(partner, own), length)
    shared = np.minimum(rate * np.maximum(together - lost, 0.0), left)
    ends = own <= np.minimum(partner, length)
    after = np.maximum(length - np.maximum(together, lost), 0.0)
    later = np.where(ends, 0.0, np.minimum(alone * after, left - shared))
    steps = np.where(ends, left, shared + later)
    over = np.where(alone > 0, later / np.where(alone > 0, alone, 1.0), 0.0)
    seconds = np.where(ends, own, np.maximum(together, lost) + over)
    done = steps >= left
    return np.where(done, seconds, length), steps

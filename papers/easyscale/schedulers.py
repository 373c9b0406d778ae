"""What EasyScale is compared with in virtual time: YARN's capacity scheduler, and its own variants.

YARN is first in, first out: a whole gang of one type at once.
"""

from collections.abc import Callable, Iterable

from ...clusters.mechanisms.easyscale import VARIANTS, admit_gangs
from ...clusters.mechanisms.pool import ClusterPool
from ...clusters.simulator.cases import SCHEDULERS, SimulatedScheduler, by_proposals
from ...clusters.simulator.events import Counts, Entry, EventCluster, EventOptions, est_rate
from ...clusters.simulator.metrics import Simulation
from ...schema.jobs import Job


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

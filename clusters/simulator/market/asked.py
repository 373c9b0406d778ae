"""Ask a policy of ``hetflow rent`` what kind of machine a job of a simulated market should hold.

The policy sees the job as one on a machine as fast as the fastest that stays; it says spot, on
demand or nothing, and the market's rules then choose the offer of that kind. It is asked whenever
something changes, and at the start of each of its ticks.
"""

from dataclasses import dataclass
from math import floor

from ....schema.errors import InfeasibleError, ProblemError
from ....schema.options import option
from ....solvers.market.job import Held, Moment, RentJob
from ....solvers.market.policies import PLAIN

FREE, SPOT, ON_DEMAND, NOTHING = range(4)
"""What a job may hold: anything (no policy says), one of a kind, or nothing."""
TICK_SECONDS = 600.0


def check_policy(name: str) -> None:
    """Refuse a policy that is none, or that has to learn first.

    Raises:
        ProblemError: It is.
    """
    if name not in PLAIN:
        raise ProblemError(
            f"{option('rent_policy', repr(name))}: known are {', '.join(PLAIN)}",
            hint="give one of them",
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """A job as a policy sees it: ``rate`` is that of the fastest machine that stays."""

    policy: str
    job: RentJob
    rate: float

    @classmethod
    def of(
        cls, policy: str, steps: float, rate: float, deadline_seconds: float, restart_seconds: float
    ) -> "Asked | None":
        """None where a policy has nothing to say: the job cannot end in time in whole ticks."""
        try:
            job = RentJob(
                work_seconds=steps / rate,
                deadline_seconds=deadline_seconds,
                restart_seconds=restart_seconds,
                tick_seconds=TICK_SECONDS,
                on_demand_dollars_per_hour=1.0,  # these rules look at no price
                spot_dollars_per_hour=(0.0,),
            )
        except (InfeasibleError, ProblemError):
            return None
        return cls(policy, job, rate)

    def kind(
        self, seconds: float, left: float, pending: float, *, held: int, has_spot: bool
    ) -> int:
        """What to hold so long after the job's arrival, with so many steps left."""
        tick = floor(seconds / TICK_SECONDS + 1e-9)
        if tick >= self.job.num_ticks:
            return FREE
        now = Moment(
            tick=tick,
            work_left_seconds=left / self.rate,
            held=Held(int(held == SPOT), int(held == ON_DEMAND)),
            zone=0,
            pending_seconds=pending,
            available=(int(has_spot),),
            run_lengths=(1,),
            spot_dollars_per_hour=(0.0,),
        )
        wanted = PLAIN[self.policy](self.job, now)
        return SPOT if wanted.num_spot else ON_DEMAND if wanted.num_on_demand else NOTHING

    @staticmethod
    def next_tick(seconds: float) -> float:
        """When the tick after this time begins, since the job's arrival."""
        return (floor(seconds / TICK_SECONDS + 1e-9) + 1) * TICK_SECONDS

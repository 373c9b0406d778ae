"""What a running job should hold now: a policy of the replays, asked for one decision."""

from collections.abc import Sequence
from math import floor

from ....schema.errors import ProblemError
from ....schema.market import RentAdvice, RentState, held_text
from ....schema.spelling import did_you_mean
from ....solvers.market import policies as known
from ....solvers.market.job import Held, Moment, RentJob, RentPolicy
from ....solvers.market.windows import Traces
from .compare import chain_for


class Adviser:
    """Policies that are asked for one decision at a time."""

    def __init__(
        self,
        job: RentJob,
        zones: Sequence[str],
        *,
        history: Sequence[Traces] = (),
        policies: Sequence[str] | None = None,
        of_one_kind: bool = False,
    ) -> None:
        """Make the policies.

        Args:
            job: The job.
            zones: Names of its zones, in order.
            history: What ``dynamic_program`` learns from.
            policies: Names, of which the first decides; None for all, ``dynamic_program`` first
                where there is a history, else ``uniform_progress``.
            of_one_kind: Whether spot machines and on-demand ones cannot be held at once; where a
                policy wants both, all are on demand.

        Raises:
            ProblemError: The history is of other zones, or there is no policy of that name.
        """
        self._job, self._zones = job, tuple(zones)
        learned = [one.of_zones(zones, job.num_machines) for one in history]
        chain = chain_for(job, [one.ticks for one in learned]) if learned else None
        names = policies or (known.NAMES if chain else tuple(known.PLAIN))[::-1]
        self.policies = {name: known.policy_of(name, job, chain) for name in names}
        if of_one_kind:
            self.policies = {name: _unmixed(each) for name, each in self.policies.items()}

    def __call__(self, state: RentState) -> RentAdvice:
        """Ask the first policy, and the others beside it.

        Raises:
            ProblemError: The state is of other zones, holds more than there is or than the job can
                use, or is at or after the deadline.
        """
        zones, job = self._zones, self._job
        now = _moment(job, zones, state)
        asked = {name: policy(job, now) for name, policy in self.policies.items()}
        choice, held = next(iter(asked.items()))
        left = job.num_ticks - now.tick - job.ticks_for(now.work_left_seconds)
        spare = left * job.tick_seconds
        return RentAdvice(
            choice=choice,
            num_spot=held.num_spot,
            num_on_demand=held.num_on_demand,
            zone=zones[held.zone] if held.num_machines else None,
            is_change=held != now.held,
            dollars_per_hour=job.dollars_per_hour(held, now.spot_dollars_per_hour),
            spare_seconds=spare,
            decide_again_seconds=job.tick_seconds,
            reason=_reason(job, now, held, spare),
            others={
                name: held_text(*one[:2], zones[one.zone])
                for name, one in asked.items()
                if name != choice
            },
        )


def _unmixed(policy: RentPolicy) -> RentPolicy:
    def decide(job: RentJob, now: Moment) -> Held:
        held = policy(job, now)
        is_mixed = held.num_spot and held.num_on_demand
        return Held(0, held.num_machines, held.zone) if is_mixed else held

    return decide


def _moment(job: RentJob, zones: Sequence[str], state: RentState) -> Moment:
    seen = (*state.available, *state.spot_dollars_per_hour)
    for name in (*seen, *([state.zone] if state.zone else [])):
        if name not in zones:
            raise ProblemError(
                f"the state is of zone {name!r}; the offers are of {', '.join(zones)}",
                hint=did_you_mean(name, zones) or None,
            )
    there = tuple(min(state.available.get(name, 0), job.num_machines) for name in zones)
    place = None if state.zone is None else zones.index(state.zone)
    held = Held(state.num_spot, state.num_on_demand, place or 0)
    if held.num_machines and (place is None or held.num_machines > job.num_machines):
        raise ProblemError(
            f"the state holds {held.num_machines} machines in zone {state.zone}; the job can use "
            f"{job.num_machines}",
            hint="give the zone of what is held, and as many machines as the job can use",
        )
    tick = floor(state.elapsed_seconds / job.tick_seconds + 1e-9)
    if tick >= job.num_ticks:
        raise ProblemError(
            f"the state is {state.elapsed_seconds:g} s after the start, the deadline "
            f"{job.deadline_seconds:g} s",
            hint="ask while there is a tick left",
        )
    pending, lost = state.pending_seconds, held.num_spot > there[held.zone]
    if lost:
        held = held._replace(num_spot=there[held.zone])
        pending = job.restart_seconds
    return Moment(
        tick=tick,
        work_left_seconds=state.work_left_seconds,
        held=held,
        zone=place,
        pending_seconds=pending,
        available=there,
        run_lengths=tuple(
            1 + floor(state.unchanged_seconds.get(name, 0.0) / job.tick_seconds + 1e-9)
            for name in zones
        ),
        spot_dollars_per_hour=[
            state.spot_dollars_per_hour.get(name, price)
            for name, price in zip(zones, job.spot_dollars_per_hour, strict=True)
        ],
    )


def _reason(job: RentJob, now: Moment, held: Held, spare_seconds: float) -> str:
    line = job.work_seconds * (now.tick * job.tick_seconds / job.deadline_seconds)
    ahead = job.work_seconds - now.work_left_seconds - line
    rest = f"the work is {abs(ahead) / 3600:.3g} h {'ahead of' if ahead >= 0 else 'behind'} a "
    rest += "straight line to the deadline"
    if spare_seconds < job.tick_seconds:
        first = "there is no time left to wait for spot machines"
    elif held.num_on_demand:
        first = "waiting or spot machines alone would cost more later"
    elif held.num_spot:
        first = "spot machines are there"
    else:
        first = "no spot machine is there that is worth its restart, and there is time to wait"
    return f"{first}; {rest}"

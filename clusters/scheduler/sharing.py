"""How a policy shares a live cluster: which jobs it can serve, when it decides, and who gets what.

There are three kinds. Policies of allocation decide at the end of a round, and give each job the
most of the range of devices that it states. Under weighted fair sharing (``mechanisms.elastic``)
and under EasyScale's schedulers (``mechanisms.easyscale``) jobs grow and shrink within their
ranges. There a decision is due at once when a job comes or ends, and at the end of each round for
what became of devices.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.jobs import Entity, Job, ModelThroughput
from ..engines.protocol import EngineDevice
from ..mechanisms import easyscale, elastic
from ..mechanisms.allocators import PolicyAllocator, allocator_named
from ..mechanisms.round_state import RoundRules, RoundState
from ..mechanisms.rounds import next_round
from ..mechanisms.seats import Seat
from .known_jobs import KnownJobs
from .occupancy import Occupancy, Places
from .plans import Rate, pool_from, rates_and_wish, rates_of
from .submission import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """How a live cluster is run. ``grace_seconds`` is what a job has to save in.

    ``policy`` is one of allocation, ``elastic``, or one of ``easyscale.VARIANTS``. ``entities`` are
    the tree that jobs may name a node of, and ``dollars_per_hour`` the price of a device by type.
    ``on_change`` is who is told of changes of jobs' states (``notices``); it may hold a secret, so
    it is in no file. ``group`` is the one whose users may use the cluster.
    """

    policy: str = "las"
    rules: RoundRules = field(default_factory=RoundRules)
    grace_seconds: int = 30
    entities: tuple[Entity, ...] = ()
    dollars_per_hour: Mapping[str, float] = field(default_factory=dict)
    on_change: str | None = None
    group: str | None = None


class Sharing(Protocol):
    """What differs by the kind of policy."""

    @property
    def moves_running_jobs(self) -> bool:
        """Whether a decision also moves those that run when a job comes or ends."""

    @property
    def waits_for_rests(self) -> bool:
        """Whether no decision is made while a server rests: all jobs would have to stop."""

    def rates_of(self, asked: Submission) -> tuple[Rate, ...]:
        """How fast a new job is with each number of devices that it can hold, the fewest first.

        Raises:
            HetflowError: It can never run here; says why.
        """

    def next_devices(
        self, state: RoundState, known: KnownJobs, occupied: Occupancy, now: float
    ) -> dict[str, Seat]:
        """The devices of each job that runs from now on; the state is left for the next decision.

        Raises:
            HetflowError: The policy has no answer.
        """


def sharing_of(settings: ClusterSettings, places: Places) -> Sharing:
    """The sharing that a policy's name stands for.

    Raises:
        ProblemError: There is no such policy, or it does not fit the devices.
    """
    if settings.policy == elastic.NAME:
        return FairSharing(places)
    if (variant := easyscale.VARIANTS.find(settings.policy)) is not None:
        return Proposals(variant, places)
    return RoundSharing(settings, places)


def check_settings(settings: ClusterSettings, devices: Iterable[EngineDevice]) -> None:
    """Check that a policy can share the devices of a cluster, before a state is made for it.

    Raises:
        ProblemError: There is no such policy, it does not fit the devices, or it needs prices or
            entities that are not given.
    """
    sharing = sharing_of(settings, Places(devices))
    if isinstance(sharing, RoundSharing):
        sharing.try_out()


class RoundSharing:
    """A policy of allocation; all jobs hold the most of their range."""

    moves_running_jobs = False
    waits_for_rests = False

    def __init__(self, settings: ClusterSettings, places: Places) -> None:
        """Make the policy's allocators.

        LAS has a faster form while no job is on several types at once.

        Raises:
            ProblemError: There is no such policy, or it is not one of live clusters.
        """
        name, entities = settings.policy, settings.entities
        others = (elastic.NAME, *easyscale.VARIANTS.names())
        alone = allocator_named(name, others=others, entities=entities)
        mixing = allocator_named(name, columns=True, entities=entities)
        if alone.shares_space:
            raise ProblemError(f"{name} puts two jobs on a device, which a live cluster does not")
        # One of each class, which remembers what it saw.
        self._alone = alone
        self._mixing = alone if type(mixing) is type(alone) else mixing
        self._settings, self._places = settings, places

    def try_out(self) -> None:
        """Share the devices among one job, to see whether the policy can.

        Raises:
            ProblemError: It needs prices or entities that are not given.
        """
        num_devices = self._places.num_devices
        rate = ModelThroughput(model="any", steps_per_second=dict.fromkeys(num_devices, 1.0))
        pool = pool_from([rate], num_devices, self._settings.dollars_per_hour)
        rounds = RoundState.empty(pool)
        rounds.admit([Job(id="any", model="any", steps=1.0)], 0.0)
        self._alone.allocate(rounds.active, 0.0)

    def rates_of(self, asked: Submission) -> tuple[Rate, ...]:
        """A job's rates, as of ``Sharing``; on several types only if the job names its devices."""
        return rates_of(asked, self._places.num_devices, self._no_mixes())

    def _no_mixes(self) -> str | None:
        """Why no job can have devices of several types here; None where it can."""
        if self._places.num_servers > 1:
            return "jobs get devices of several types only where all devices are on one server"
        if not isinstance(self._mixing, PolicyAllocator):
            return f"{self._settings.policy} gives a job devices of one type"
        return None

    def next_devices(
        self, state: RoundState, known: KnownJobs, occupied: Occupancy, now: float
    ) -> dict[str, Seat]:
        """Choose as ``Sharing`` does: the jobs that lack most of their shares."""
        allocator = self._mixing if state.pool.uses_mixes else self._alone
        rules = replace(self._settings.rules, fills_idle=not allocator.leaves_idle)
        found = next_round(
            state, allocator, now, rules,
            sizes=self._places.sizes, down=occupied.down, held=occupied.held,
            kept=occupied.kept, taken=occupied.taken,
        )  # fmt: skip
        return {**found, **occupied.kept}


class FairSharing:
    """Weighted fair sharing: it counts devices alone, so they are of one type."""

    moves_running_jobs = True

    def __init__(self, places: Places) -> None:
        """Share the devices of a cluster.

        Raises:
            ProblemError: They are of several types.
        """
        types = sorted(places.num_devices)
        if len(types) > 1:
            raise ProblemError(
                f"{elastic.NAME} shares devices of one type, the cluster has "
                f"{', '.join(types)[:200]}",
                hint="start with one type, or take easyscale or a policy of `hetflow allocate`",
            )
        self._places = places
        self.waits_for_rests = self._is_alone

    @property
    def _is_alone(self) -> bool:
        """Whether all devices are on one server."""
        return self._places.servers is None

    def rates_of(self, asked: Submission) -> tuple[Rate, ...]:
        """A job's rates, as of ``Sharing``; all its devices are on one server."""
        try:
            return rates_of(asked, self._places.largest)
        except InfeasibleError as error:
            where = "" if self._is_alone else "; all devices of a job are on one server"
            raise InfeasibleError(f"{error.message}{where}", hint=error.hint) from None

    def next_devices(
        self, state: RoundState, known: KnownJobs, occupied: Occupancy, now: float
    ) -> dict[str, Seat]:
        """Choose as ``Sharing`` does: by weight."""
        return elastic.next_shares(
            state, known.numbers, now, sizes=self._places.sizes,
            down={*occupied.down, *occupied.taken},
            held=occupied.held, kept=occupied.kept,
        )  # fmt: skip


class Proposals:
    """EasyScale's schedulers: jobs propose devices that they would be faster on."""

    moves_running_jobs = True
    waits_for_rests = False

    def __init__(self, variant: easyscale.Variant, places: Places) -> None:
        """Share the devices of a cluster by one of these schedulers."""
        self._variant, self._places = variant, places

    def rates_of(self, asked: Submission) -> tuple[Rate, ...]:
        """A job's rates, as of ``Sharing``; all its devices are on one server."""
        places = self._places
        return rates_and_wish(asked, places.num_devices, places.layout, self._variant)[0]

    def next_devices(
        self, state: RoundState, known: KnownJobs, occupied: Occupancy, now: float
    ) -> dict[str, Seat]:
        """Choose as ``Sharing`` does: by what each job can run on."""
        return easyscale.next_devices(
            state, {job.id: known.wish(job.id) for job in state.active.jobs}, now,
            variant=self._variant, layout=self._places.layout,
            down={*occupied.down, *occupied.taken},
            held=occupied.decided, kept=occupied.kept,
        )  # fmt: skip

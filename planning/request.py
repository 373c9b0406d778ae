"""What is asked of a plan: the request, with profiles, pool and optimizer as records."""

from dataclasses import dataclass
from pathlib import Path

from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.optimizer import OptimizerState, named_optimizer
from ..schema.options import option
from ..schema.problem import Problem
from ..schema.profile import Profile
from ..schema.requests.solve import SolveRequest
from ..schema.schedule import is_planned, planned_schedules
from ..schema.spelling import did_you_mean
from .inputs import name_of, pool_of, profiles_of, under_todays_names
from .limits import SolveLimits
from .options import Given, Kind, Planner, given


@dataclass(frozen=True)
class Question:
    """Everything that a plan depends on.

    Attributes:
        asked: The options.
        profiles: Profiles of one model.
        pool: The devices.
        optimizer: The one that will train; None takes the profiles'.
        corrected_by: The runs by which the profiles were corrected.
    """

    asked: SolveRequest
    profiles: tuple[Profile, ...]
    pool: Cluster
    optimizer: OptimizerState | None = None
    corrected_by: tuple[str, ...] = ()

    @property
    def pool_name(self) -> str:
        """The text by which the user named the pool, for the plan's provenance."""
        return name_of(self.asked.pool)

    @property
    def problem(self) -> Problem:
        """What is asked of any plan."""
        asked = self.asked
        return Problem(
            self.profiles,
            self.pool,
            asked.batch_size,
            self.optimizer,
            asked.memory_reserve_bytes,
            asked.link_bytes_per_second,
        )

    @property
    def profiles_in_pool(self) -> list[Profile]:
        """The profiles of the pool's types, as far as there are some."""
        return [p for p in self.profiles if p.device_type in self.pool.num_devices]

    @property
    def limits(self) -> SolveLimits:
        """Limits of the search."""
        return SolveLimits(self.asked.time_limit_seconds, self.asked.gap)

    @property
    def fixes_microbatches(self) -> bool:
        """Whether both virtual nodes and microbatches were asked for, and are the same.

        Then plans of all kinds cut a batch alike, and each can go on from a checkpoint of another.
        """
        nodes, samples = self.asked.virtual_nodes, self.asked.microbatch_size
        batch = self.asked.batch_size
        return nodes is not None and samples is not None and nodes * samples == batch

    @property
    def planners(self) -> dict[Kind, Planner]:
        """The planner of each kind of plan that these options ask for."""
        by_method: Planner = "split" if self.asked.method == "exact" else "milp"
        if self.asked.shard != "none":
            by_method = "sharded"
        return {
            "split": "waste" if self.asked.objective == "waste" else by_method,
            "pipeline": "repetitive" if self.asked.repetitive else "pipeline",
            "parallel": "parallel",
        }

    @property
    def options(self) -> list[Given]:
        """The options that were given.

        Virtual nodes and microbatches that are the same are read by plans of all kinds.
        """
        known = list(given(self.asked))
        if self.fixes_microbatches:
            known = [one for one in known if one.name not in ("virtual_nodes", "microbatch_size")]
        return known


def question_of(asked: SolveRequest, pool: Cluster | None = None) -> Question:
    """Read what a request names: profiles, pool, optimizer, and runs that correct the profiles.

    Args:
        asked: The request.
        pool: The request's pool where it was read already, to have prices.

    Raises:
        ProblemError: No solver plans the schedule, or profiles, pool and runs do not fit together.
        FileError: A file is missing or has faults.
    """
    if asked.schedule != "auto" and not is_planned(asked.schedule):
        known = ("auto", *planned_schedules())
        raise ProblemError(
            f"{option('schedule')} must be one of {', '.join(known)}, got {asked.schedule!r}"
            + did_you_mean(asked.schedule, known, before="; ")
        )
    pool = pool or pool_of(asked.pool)
    profiles = under_todays_names(profiles_of(asked.profiles, asked.model), pool.num_devices)
    pool = pool.spelled_as(profile.device_type for profile in profiles)
    used: tuple[str, ...] = ()
    if asked.runs is not None and asked.cost_model != "measured":
        from .correcting import corrected_by_runs

        profiles, used = corrected_by_runs(profiles, Path(asked.runs))
    trains = asked.optimizer
    optimizer = named_optimizer(trains) if isinstance(trains, str) else trains
    return Question(asked, profiles, pool, optimizer, used)

"""What is asked of a plan: the request, with profiles, pool and optimizer as records."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.optimizer import OptimizerState, named_optimizer
from ..schema.options import asked_of, command, option, told
from ..schema.problem import Problem
from ..schema.profile import Profile
from ..schema.requests.solve import PIPELINES, SPLITS, SolveRequest
from ..schema.schedule import is_planned, planned_schedules
from ..schema.spelling import did_you_mean
from .inputs import name_of, pool_of, profiles_of, under_todays_names
from .limits import SolveLimits

# Which options of a request have an effect: each field of ``SolveRequest`` says who reads it.
#
# An option that was given and that no planner in question reads is refused.


Kind = Literal["split", "pipeline", "parallel"]
Planner = Literal[
    "split", "milp", "waste", "sharded", "pipeline", "repetitive", "stages", "parallel"
]

_PLANS = {
    "split": "exact splits",
    "milp": "splits by the MILP",
    "waste": "splits by waste",
    "sharded": "splits that share states",
    "pipeline": "pipelines",
    "repetitive": "pipelines planned with {repetitive}",
    "stages": "pipelines that share states",
    "parallel": "parallel plans",
}
_CHOSEN_BY = {
    "split": "{strategy=split}",
    "milp": "{method=cbc|highs}",
    "waste": "{objective=waste}",
    "sharded": "{shard=auto}",
    "pipeline": "{strategy=pipeline}",
    "repetitive": "{strategy=pipeline} {schedule=2bw} {repetitive=True}",
    "stages": "{strategy=pipeline} {shard=auto}",
    "parallel": "{strategy=parallel}",
}


@dataclass(frozen=True, slots=True)
class Given:
    """An option that was given: who reads its value, and what it does to a comparison.

    An option that ``narrows`` asks for something of the plan, such as a number of stages. Where
    several kinds of plans are compared, only those that read it stay. Other options say how some
    of the kinds are to be planned, and leave the comparison as it is.
    """

    name: str
    value: object
    read_by: tuple[str, ...]
    narrows: bool

    def __str__(self) -> str:
        return option(self.name, self.value)


def given(request: SolveRequest) -> Iterator[Given]:
    """Yield the options of a request that were given, and that not all plans read."""
    # Those are what differs from the default, and what the request says was stated.
    for asked in asked_of(SolveRequest):
        said, value = asked.option, getattr(request, asked.name)
        if not (said.read_by or said.values):
            continue
        if value == asked.default and asked.name not in request.stated:
            continue
        shown = value if value is False or isinstance(value, str) or value in said.values else None
        narrows = said.narrows and value not in said.open_values
        yield Given(asked.name, shown, said.values.get(value, said.read_by), narrows)


def refuse_unread(asked: Collection[Given], tried: Collection[str], why_no_others: str) -> None:
    """Refuse an option that none of the planners that would be tried reads.

    Raises:
        ProblemError: Names the option, who reads it, and what would make it count.
    """
    for one in asked:
        if not set(one.read_by) & set(tried):
            raise _unread(one, tried, why_no_others)


def _unread(one: Given, tried: Collection[str], why_no_others: str) -> ProblemError:
    message = f"{one} is for {_plans(one.read_by)}: it has no effect on {_plans(tried, one)}"
    if why_no_others and not set(one.read_by) & set(SPLITS):
        return ProblemError(
            f"{message}, and {why_no_others}",
            hint=f"leave it out, or profile the layers ({command('profile', layers=True)})",
        )
    return ProblemError(message, hint=f"leave it out, or {_way(one.read_by, tried)}")


def _plans(planners: Collection[str], beside: Given | None = None) -> str:
    """Name the plans of several planners."""
    # All planners of a kind are named by the kind. So is one alone if ``beside``, an option that
    # it does not read, is read by no planner of that kind.
    # Pipelines that share states are parallel plans, and read what those read.
    left = [one for one in planners if one != "stages" or "parallel" not in planners]
    names: list[str] = []
    for whole, name in ((SPLITS, "splits"), (PIPELINES, "pipelines")):
        apart = beside is None or set(beside.read_by) & set(whole)
        if set(whole) <= set(left) or (set(whole) & set(left) and not apart):
            left = [planner for planner in left if planner not in whole]
            names.append(name)
    names += [told(_PLANS[planner]) for planner in left]
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def _way(read_by: Collection[str], tried: Collection[str]) -> str:
    """What to change so that one of ``read_by`` is asked instead of ``tried``."""
    if "repetitive" in tried and "pipeline" in read_by:
        return told("leave {repetitive} out")
    if "stages" in tried and {"pipeline", "repetitive"} & set(read_by):
        return told("leave {shard} out")
    if "pipeline" in tried and "repetitive" in read_by:
        return told("add {repetitive=True} {schedule=2bw}")
    if "split" in read_by and set(tried) & {"milp", "waste"}:
        return "take the exact method and objective of splits"
    ways = []
    for planner in read_by:
        covered = planner in ("milp", "waste", "sharded") and "split" in read_by
        covered |= planner in ("repetitive", "stages") and "pipeline" in read_by
        covered |= planner == "stages" and "parallel" in read_by
        if not covered:
            ways.append(_CHOSEN_BY[planner])
    return told("add " + " or ".join(ways))


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
        """Whether both virtual nodes and microbatches were asked for, and are the same."""
        # Then plans of all kinds cut a batch alike, and each can go on from a checkpoint of
        # another.
        nodes, samples = self.asked.virtual_nodes, self.asked.microbatch_size
        batch = self.asked.batch_size
        return nodes is not None and samples is not None and nodes * samples == batch

    @property
    def planners(self) -> dict[Kind, Planner]:
        """The planner of each kind of plan that these options ask for."""
        by_method: Planner = "split" if self.asked.method == "exact" else "milp"
        by_schedule: Planner = "repetitive" if self.asked.repetitive else "pipeline"
        if self.asked.shard != "none":
            by_method = "sharded"
            # Where kinds are compared, the parallel plan is as good as a pipeline that shares.
            by_schedule = "stages" if self.asked.strategy == "pipeline" else by_schedule
        return {
            "split": "waste" if self.asked.objective == "waste" else by_method,
            "pipeline": by_schedule,
            "parallel": "parallel",
        }

    @property
    def options(self) -> list[Given]:
        """The options that were given."""
        # Virtual nodes and microbatches that are the same are read by plans of all kinds.
        known = list(given(self.asked))
        if self.fixes_microbatches:
            known = [one for one in known if one.name not in ("virtual_nodes", "microbatch_size")]
        return known


def question_of(asked: SolveRequest, pool: Cluster | None = None) -> Question:
    """Read what a request names: profiles, pool, optimizer, and runs that correct the profiles.

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
    if asked.masters:
        measured = [p.optimizer for p in profiles if p.device_type in pool.num_devices]
        optimizer = optimizer or next((each for each in measured if each is not None), None)
        optimizer = optimizer and optimizer.with_masters()
    return Question(asked, profiles, pool, optimizer, used)

"""Jobs, throughputs, the allocation problem and its answer (thesis chapter 5)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from .errors import ProblemError
from .frames import Rows, Shown, Table, fields_table
from .options import Placement
from .records import (
    Count,
    Dollars,
    Fraction,
    Name,
    NonNegative,
    Positive,
    PositiveDollars,
    PositiveSeconds,
    Seconds,
    record,
)
from .spelling import did_you_mean

Rate = Annotated[float, Field(ge=0, le=1e12)]
Weight = Annotated[float, Field(gt=0, le=1e12)]


@record
class Job:
    """One training job.

    ``steps`` is the number of steps still to run (num_steps_m). ``elapsed_seconds`` is t_m, and
    ``isolated_seconds`` is t_m^isolated of thesis 5.4.2. ``slo_seconds`` is the time within which
    the remaining steps must be done. The job runs on ``scale_factor`` devices at once.

    Example:
        >>> import hetflow
        >>> hetflow.Job(id="a", model="resnet50", steps=7200, slo_seconds=86400).scale_factor
        1
    """

    id: Name
    model: Name
    steps: Positive
    scale_factor: Count = 1
    arrival_seconds: Seconds = 0.0
    priority_weight: Weight = 1.0
    slo_seconds: PositiveSeconds | None = None
    entity: Name | None = None
    elapsed_seconds: Seconds = 0.0
    isolated_seconds: Seconds = 0.0


@record
class Entity:
    """A node of the hierarchy (thesis 5.4.3), with ``weight`` in its parent's resources.

    ``policy`` is how it shares its resources among its children, which are entities or jobs.
    """

    name: Name
    weight: Weight = 1.0
    policy: Literal["fairness", "fifo"] = "fairness"
    parent: Name | None = None


@record
class Jobs(Shown):
    """Jobs in order of arrival, and the entities they belong to.

    Example:
        >>> import hetflow
        >>> hetflow.Jobs(jobs=(hetflow.Job(id="a", model="m", steps=100),)).title
        '1 jobs of 1 models'
    """

    schema: Literal["hetflow.jobs/1"] = "hetflow.jobs/1"
    jobs: tuple[Job, ...]
    entities: tuple[Entity, ...] = ()
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _refuse_twins([job.id for job in self.jobs], "jobs: id")
        _refuse_twins([entity.name for entity in self.entities], "entities: name")
        names = {entity.name: entity for entity in self.entities}
        for entity in self.entities:
            _known_entity(entity.parent, names, f"entity {entity.name!r}")
            _refuse_cycle(entity, names)
        for job in self.jobs:
            _known_entity(job.entity, names, f"job {job.id!r}")

    @property
    def title(self) -> str:
        """The number of jobs and of their models."""
        models = {job.model for job in self.jobs}
        return f"{len(self.jobs)} jobs of {len(models)} models"

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each job: the columns of a CSV file of jobs."""
        return fields_table(self.jobs, Job, but=["elapsed_seconds", "isolated_seconds"])


def _refuse_twins(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ProblemError(f"{what} {name!r} appears twice; keep one")
        seen.add(name)


def _known_entity(name: str | None, names: Mapping[str, Entity], who: str) -> None:
    if name is not None and name not in names:
        fix = did_you_mean(name, names, "add it to entities")
        raise ProblemError(f"{who} belongs to {name!r}, which is not an entity; {fix}")


def _refuse_cycle(start: Entity, names: Mapping[str, Entity]) -> None:
    path = [start.name]
    parent = start.parent
    while parent is not None and parent in names:
        path.append(parent)
        if parent in path[:-1]:
            shown = " -> ".join(path[path.index(parent) :])
            raise ProblemError(f"entities form a cycle: {shown}; give one of them no parent")
        parent = names[parent].parent


@record
class ModelThroughput:
    """Steps per second of a model running alone on ``scale_factor`` devices, by device type.

    A model does not run on a type that is missing or 0. ``unconsolidated_steps_per_second`` is the
    rate with the devices on separate servers (thesis 5.3.1, placement sensitivity).

    Example:
        >>> import hetflow
        >>> rates = hetflow.ModelThroughput(model="m", steps_per_second={"V100": 8, "P100": 2.5})
        >>> rates.steps_per_second["P100"]
        2.5
    """

    model: Name
    scale_factor: Count = 1
    steps_per_second: dict[str, Rate]
    unconsolidated_steps_per_second: dict[str, Rate] | None = None


@record
class PairThroughput:
    """Steps per second of two models that share the same devices, by device type."""

    models: tuple[Name, Name]
    scale_factor: Count = 1
    steps_per_second: dict[str, tuple[Rate, Rate]]

    def __post_init__(self) -> None:
        if self.models[0] != self.models[1]:
            return
        for name, (first, second) in self.steps_per_second.items():
            if first != second:
                raise ProblemError(
                    f"two jobs of {self.models[0]!r} on {name!r}: which is the first cannot be "
                    f"told, so their rates must be equal, got {first} and {second}; give the mean"
                )


@record
class MixThroughput:
    """Steps per second of a model on several device types at once (VirtualFlow 6.5.2).

    The job holds all ``devices`` (type -> number) at once. The rate comes from the batch split
    solver.
    """

    model: Name
    scale_factor: Count = 1
    devices: dict[str, Count]
    steps_per_second: Annotated[float, Field(gt=0, le=1e12)]

    def __post_init__(self) -> None:
        if not self.devices:
            raise ProblemError(f"a mix of {self.model!r} must hold at least one device")


@record
class Throughputs(Shown):
    """Throughputs of all models on all device types: alone, in pairs, and on mixes of types.

    Example:
        >>> import hetflow
        >>> rates = hetflow.ModelThroughput(model="m", steps_per_second={"V100": 8, "P100": 2.5})
        >>> hetflow.Throughputs(models=(rates,)).title
        '1 models on 2 device types, 0 pairs'
    """

    schema: Literal["hetflow.throughputs/1"] = "hetflow.throughputs/1"
    models: tuple[ModelThroughput, ...]
    pairs: tuple[PairThroughput, ...] = ()
    mixes: tuple[MixThroughput, ...] = ()
    provenance: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        keys = [f"{entry.model} x{entry.scale_factor}" for entry in self.models]
        _refuse_twins(keys, "models: model and scale_factor")
        _refuse_contradictions(self.pairs)
        mixed = [f"{m.model} x{m.scale_factor} on {sorted(m.devices.items())}" for m in self.mixes]
        _refuse_twins(mixed, "mixes: model, scale_factor and devices")

    @property
    def title(self) -> str:
        """The number of models and of device types."""
        types = {name for entry in self.models for name in entry.steps_per_second}
        models = {entry.model for entry in self.models} | {mix.model for mix in self.mixes}
        return f"{len(models)} models on {len(types)} device types, {len(self.pairs)} pairs"

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each rate, without mixes: the columns of its CSV file."""
        columns = [
            "model", "device_type", "steps_per_second", "scale_factor",
            "unconsolidated_steps_per_second", "shared_with", "shared_with_steps_per_second",
        ]  # fmt: skip
        alone = [
            (entry.model, name, rate, entry.scale_factor, apart.get(name), None, None)
            for entry in self.models
            for apart in [entry.unconsolidated_steps_per_second or {}]
            for name, rate in entry.steps_per_second.items()
        ]
        shared = [
            (pair.models[0], name, first, pair.scale_factor, None, pair.models[1], second)
            for pair in self.pairs
            for name, (first, second) in pair.steps_per_second.items()
        ]
        return columns, [dict(zip(columns, row, strict=True)) for row in [*alone, *shared]]


def _refuse_contradictions(pairs: tuple[PairThroughput, ...]) -> None:
    """Refuse a pair that is listed in both orders with different rates."""
    # Measured tables list both orders, so a consistent second entry is allowed.
    seen: dict[tuple[str, str, int, str], tuple[float, float]] = {}
    for pair in pairs:
        a, b = pair.models
        for device, (first, second) in pair.steps_per_second.items():
            rates = (first, second) if a <= b else (second, first)
            known = seen.setdefault((min(a, b), max(a, b), pair.scale_factor, device), rates)
            if known != rates:
                raise ProblemError(
                    f"pairs: {a!r} and {b!r} x{pair.scale_factor} on {device!r} appear twice with "
                    "other rates; keep one"
                )


def consolidated_devices(
    throughputs: Throughputs, servers: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Count the devices of each type that consolidated jobs can hold at once [types].

    The minimum over the scale factors that fit a server. For example, jobs with 2 devices can use
    only 2 of a server's 3 devices.

    ``servers`` [types][servers] are devices of each type on each server that has it.
    """
    scales = sorted({entry.scale_factor for entry in throughputs.models})
    answer = []
    for sizes in servers:
        fitting = [s for s in scales if 1 < s <= max(sizes)]
        answer.append(min((sum(n // s * s for n in sizes) for s in fitting), default=sum(sizes)))
    return tuple(answer)


@record
class AllocationProblem:
    """The problem of sharing a pool among the jobs that are there now (thesis 5.3).

    ``heterogeneity`` agnostic replaces each job's throughputs by a single value for all types. With
    ``placement`` mixed, consolidated and unconsolidated devices are separate choices, and at most
    ``consolidated_devices`` can be held consolidated. ``budget_dollars`` is B of thesis 6.4.3. The
    list of jobs may be empty. Jobs that do not fit the pool get no row in the allocation, which
    lists them.
    """

    jobs: Jobs
    throughputs: Throughputs
    num_devices: dict[str, Count]
    dollars_per_hour: dict[str, PositiveDollars] = Field(default_factory=dict)
    heterogeneity: Literal["aware", "agnostic"] = "aware"
    space_sharing: bool = False
    placement: Placement = "consolidated"
    consolidated_devices: dict[str, Count] = Field(default_factory=dict)
    budget_dollars: PositiveDollars | None = None

    def __post_init__(self) -> None:
        if not self.num_devices:
            raise ProblemError("the pool is empty; give at least one device type")
        rates = self._rates()
        for job in self.jobs.jobs:
            key = (job.model, job.scale_factor)
            if key not in rates and job.scale_factor <= self._largest and not self._mixes(job):
                raise ProblemError(no_throughput(job, list(rates)))

    def why_left_out(self, job: Job) -> str | None:
        """Return why a job does not fit the pool even if it is empty; None if it fits."""
        if self._mixes(job):
            return None
        if job.scale_factor > self._largest:
            return (
                f"it asks for {job.scale_factor} devices of one type, but the pool "
                f"has at most {self._largest}; lower its scale_factor or grow the pool"
            )
        entry = self._rates().get((job.model, job.scale_factor))
        if any(self._runs(job, entry, name) for name in self.num_devices):
            return None
        known = [] if entry is None else [n for n, r in entry.steps_per_second.items() if r > 0]
        where = f" (its throughputs are for {', '.join(known)})" if known else ""
        return (
            f"{job.model} x{job.scale_factor} runs on none of {', '.join(self.num_devices)}"
            f"{where}; add a device type that fits it or drop the job"
        )

    @property
    def _largest(self) -> int:
        return max(self.num_devices.values())

    def _rates(self) -> dict[tuple[str, int], ModelThroughput]:
        return {(entry.model, entry.scale_factor): entry for entry in self.throughputs.models}

    def _mixes(self, job: Job) -> list[MixThroughput]:
        return [mix for mix in self.throughputs.mixes if self._offers(mix, job)]

    def _offers(self, mix: MixThroughput, job: Job) -> bool:
        if (mix.model, mix.scale_factor) != (job.model, job.scale_factor):
            return False
        return all(number <= self.num_devices.get(name, 0) for name, number in mix.devices.items())

    def _runs(self, job: Job, entry: ModelThroughput | None, name: str) -> bool:
        if entry is None or job.scale_factor > self.num_devices[name]:
            return False
        alone = entry.steps_per_second
        if self.placement != "consolidated" and job.scale_factor > 1:
            apart = entry.unconsolidated_steps_per_second or {}
            if self.placement == "unconsolidated":
                return apart.get(name, 0.0) > 0
            return max(apart.get(name, 0.0), alone.get(name, 0.0)) > 0
        return alone.get(name, 0.0) > 0


def no_throughput(job: Job, known: list[tuple[str, int]]) -> str:
    """Say that a job's (model, scale factor) has no throughput, and which known one is nearest."""
    scales = sorted(scale for model, scale in known if model == job.model)
    if scales:
        return (
            f"job {job.id!r}: no throughput of {job.model!r} with {job.scale_factor} devices; "
            f"measured with {', '.join(map(str, scales))}; add it, or change its scale_factor"
        )
    fix = did_you_mean(
        job.model, sorted({model for model, _ in known}), "add it to the throughputs"
    )
    return f"job {job.id!r}: no throughput of {job.model!r}; {fix}"


@record
class PairShare:
    """The fractions of time that two jobs share the same devices, by column."""

    jobs: tuple[Name, Name]
    shares: dict[str, Fraction]


@record
class LevelPrices:
    """Dual prices that prove that some jobs of water filling could rise no further (thesis 5.4.3).

    At ``resource_prices``, the pool costs exactly what the jobs stopped so far pay for their
    throughputs. Without space sharing, a job pays the lowest cost of its throughput. With space
    sharing, ``job_prices`` (per step per second) and ``time_prices`` (per unit of a job's time) are
    used.
    """

    resource_prices: dict[str, Rate]
    job_prices: dict[str, Rate] = Field(default_factory=dict)
    time_prices: dict[str, Rate] = Field(default_factory=dict)


@record
class DollarCut:
    """The allocations in which a job's cost is at most, or at least, ``dollars_per_hour``."""

    job: Name
    side: Literal["at_most", "at_least"]
    dollars_per_hour: Dollars


@record
class RegionPrices:
    """Dual prices that bound a sum of ratios (thesis 6.4.2) over the allocations within ``cuts``.

    A cut limits the dollars per hour of a job that runs at exactly the throughput of its SLO.
    """

    cuts: tuple[DollarCut, ...] = ()
    resource_prices: dict[str, Rate] = Field(default_factory=dict)


@record
class Certificate:
    """How good an allocation is, with a proof that anyone can check.

    ``bound`` is an upper bound of the objective if ``sense`` is max, and a lower bound if it is
    min; ``gap`` is the relative distance of objective and bound. The bound follows by weak duality
    from the dual prices: ``resource_prices`` (per device of a type; the key ``budget`` is per
    dollar), ``job_prices`` (per step per second) and, if jobs share devices, ``time_prices``.

    For water filling, these prices prove the first level, and ``levels`` prove the others; jobs at
    their highest possible throughput need no proof. For a sum of ratios under SLOs, ``regions``
    prove the bound. Each region covers a part of the allocations, and together they cover all.
    """

    termination: Literal["optimal", "feasible"]
    sense: Literal["max", "min"]
    objective: float
    bound: float | None
    gap: NonNegative | None
    method: str
    resource_prices: dict[str, Rate] = Field(default_factory=dict)
    job_prices: dict[str, Rate] = Field(default_factory=dict)
    time_prices: dict[str, Rate] = Field(default_factory=dict)
    levels: tuple[LevelPrices, ...] = ()
    regions: tuple[RegionPrices, ...] = ()


@record
class Allocation(Shown):
    """The fraction of time that each job spends on each column, ``x[job][column]``.

    A column that is missing is 0. A column is a device type, ``TYPE/unconsolidated``, or a mix such
    as ``2xV100+8xP100``. ``throughputs`` are effective throughputs in steps per second (thesis
    5.3.1). ``space_sharing``, ``placement`` and ``budget_dollars`` are the options of the problem;
    they are None in older files, and the budget is also None if there was none. ``left_out`` maps
    each job that does not fit the pool to the reason; such a job has no row.

    ``fill`` is how the devices left idle by the policy's optimum were shared out: lexicographically
    (proved by the certificate's ``levels``), or None for not at all. ``idle_devices`` (device type
    -> number) are still idle. ``usable_idle_devices`` is how many of them could speed up a job,
    each type considered alone; ``idle_reason`` says why they are idle nevertheless. Older files do
    not have the two numbers; they are None then.

    Example:
        >>> import hetflow
        >>> jobs = hetflow.Jobs(jobs=(hetflow.Job(id="a", model="m", steps=100),))
        >>> rates = hetflow.ModelThroughput(model="m", steps_per_second={"V100": 2})
        >>> hetflow.allocate(jobs, hetflow.Throughputs(models=(rates,)), "V100").title
        'las for 1 jobs: optimal'
    """

    schema: Literal["hetflow.allocation/1"] = "hetflow.allocation/1"
    policy: Name
    heterogeneity: Literal["aware", "agnostic"] = "aware"
    x: dict[str, dict[str, Fraction]]
    pairs: tuple[PairShare, ...] = ()
    throughputs: dict[str, Rate]
    certificate: Certificate
    space_sharing: bool | None = None
    placement: Placement | None = None
    budget_dollars: PositiveDollars | None = None
    left_out: dict[Name, str] = Field(default_factory=dict)
    fill: Literal["lexicographic"] | None = None
    idle_devices: dict[str, Rate] | None = None
    usable_idle_devices: dict[str, Rate] | None = None
    idle_reason: str | None = None
    provenance: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        """The policy, the number of jobs, and how it was proved."""
        left_out = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"{self.policy} for {len(self.x)} jobs{left_out}: {self.certificate.termination}"

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each job: its throughput, then its shares by column."""
        columns = list(dict.fromkeys(name for row in self.x.values() for name in row))
        rows = [
            {"job": job, "steps_per_second": self.throughputs.get(job)}
            | {name: row.get(name, 0.0) for name in columns}
            for job, row in self.x.items()
        ]
        return ["job", "steps_per_second", *columns], rows


JobsTable = Jobs | Table | Path | str
"""Jobs; a DataFrame with the columns of a CSV file of jobs; or the file of jobs."""
ThroughputsTable = Throughputs | Table | Path | str
"""Throughputs; a DataFrame with the columns of a CSV file of throughputs; or their file."""

"""An allocation problem as arrays, the form in which policies are written.

Columns are the places a job may spend time on: a device type, a device type unconsolidated
(thesis 5.3.1), or a mix of types held at once (VirtualFlow 6.5.2). Resources are what columns
use: devices of a type, and consolidated devices where these are limited.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...schema.errors import ProblemError
from ...schema.jobs import AllocationProblem, Entity, Job, PairThroughput
from ..effort import never
from .program import Floats, FractionProgram, Ints

CONSOLIDATED = "/consolidated"
UNCONSOLIDATED = "/unconsolidated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Jobs and a pool as arrays.

    ``rate`` T [jobs, columns] in steps per second, 0 where the job does not run; ``usage``
    [jobs, columns] times ``resources`` [resources, columns] is what a job holds; ``capacity``
    [resources]. ``equal`` and ``isolated`` [jobs] are throughput(m, X^equal) and
    throughput(m, X^isolated). ``scale``, ``weight``, ``steps``, ``elapsed_seconds``,
    ``isolated_seconds``, ``slo_seconds`` (infinite where there is none) [jobs].
    ``dollars`` [columns] per hour and unit of usage, NaN where no price is known.
    ``kind`` [jobs] numbers the (model, scale factor); ``pair_rate`` [kinds, kinds, columns] is
    the rate of the first kind beside the second, 0 where they cannot share, None without space
    sharing. ``entity`` [jobs] numbers ``entities``, -1 for jobs at the top. ``should_stop`` says
    that the caller's limit of time has come: solvers then end with the best that they can prove.
    """

    ids: Sequence[str]
    columns: tuple[str, ...]
    resource_names: tuple[str, ...]
    rate: Floats
    usage: Floats
    resources: Floats
    capacity: Floats
    equal: Floats
    isolated: Floats
    scale: Floats
    weight: Floats
    steps: Floats
    elapsed_seconds: Floats
    isolated_seconds: Floats
    slo_seconds: Floats
    dollars: Floats
    kind: Ints
    pair_rate: Floats | None = None
    entity: Ints | None = None
    entities: tuple[Entity, ...] = ()
    budget_dollars: float | None = None
    arrival: Floats = field(default_factory=lambda: np.zeros(0))
    should_stop: Callable[[], bool] = never

    @property
    def num_jobs(self) -> int:
        """How many jobs there are."""
        return len(self.rate)

    def flat(self) -> "Instance":
        """The instance for heterogeneity-agnostic policies: one rate a job, on every type."""
        # The rate is throughput(m, X^equal), so that steps, SLOs and durations keep their scale; a
        # type that does not run the job stays shut.
        total = float(self.capacity[: self.num_types].sum())
        share = np.minimum(1.0, total / self.num_jobs / self.scale)
        pairs = None
        if self.pair_rate is not None:
            pairs = _flat_pairs(self)
        return replace(
            self,
            rate=np.where(self.rate > 0, self.equal[:, None], 0.0),
            isolated=self.equal * share,
            pair_rate=pairs,
        )

    def program(
        self,
        *,
        level: Floats | None = None,
        floor: Floats | None = None,
        worth: Floats | None = None,
        charge: Floats | None = None,
        unit: float = 0.0,
    ) -> FractionProgram:
        """The program with these demands or this worth of a step, over all valid allocations.

        Args:
            level: Throughput that one unit of z asks of each job [jobs]; z is maximised.
            floor: Least throughput [jobs]; added to the level's where both are given.
            worth: What a step earns [jobs, columns].
            charge: What holding one unit of a column costs [columns].
            unit: The objective's scale, where its optimum may be near 0.

        Raises:
            ProblemError: An array has another shape (goals may come from plug-ins).
        """
        each_job, each_column = self.rate.shape[:1], self.rate.shape[1:]
        _require_shape("level", level, each_job)
        _require_shape("floor", floor, each_job)
        _require_shape("worth", worth, self.rate.shape)
        _require_shape("charge", charge, each_column)
        zero = np.zeros(self.num_jobs)
        level_of, floor_of = zero if level is None else level, zero if floor is None else floor
        gain = np.zeros_like(self.rate) if worth is None else worth * self.rate
        if charge is not None:
            gain = gain - np.where(self.rate > 0, self.usage * charge, 0.0)
        return FractionProgram(
            count=np.ones(self.num_jobs),
            rate=self.rate,
            usage=self.usage,
            gain=gain,
            resources=self.resources,
            capacity=self.capacity,
            level=level_of,
            floor=floor_of,
            demands=(level_of > 0) | (floor_of > 0),
            level_weight=0.0 if level is None else 1.0,
            level_capacity=np.zeros(len(self.capacity)),
            unit=unit,
        )

    @property
    def num_types(self) -> int:
        """Resources that are device types; others limit consolidation."""
        return sum(not name.endswith(CONSOLIDATED) for name in self.resource_names)


def _require_shape(name: str, given: Floats | None, shape: tuple[int, ...]) -> None:
    if given is not None and np.shape(given) != shape:
        raise ProblemError(
            f"the {name} of the policy's goal has the shape {np.shape(given)}, not {shape}",
            hint="of an Instance, rate is [jobs, columns], weight [jobs] and dollars [columns]",
        )


def _flat_pairs(instance: Instance) -> Floats:
    """Pair rates that ignore the type but not the partner: the pair's loss averaged over types."""
    assert instance.pair_rate is not None
    alone = np.zeros((len(instance.pair_rate), instance.rate.shape[1]))
    level = np.zeros(len(instance.pair_rate))
    alone[instance.kind], level[instance.kind] = instance.rate, instance.equal
    runs = (instance.pair_rate > 0) & (alone[:, None, :] > 0)
    kept = np.where(runs, instance.pair_rate / np.where(alone > 0, alone, 1.0)[:, None, :], 0.0)
    mean = kept.sum(axis=2) / np.maximum(runs.sum(axis=2), 1)
    return np.where(runs, (mean * level[:, None])[:, :, None], 0.0)


def make_instance(
    *, rate: Floats, scale: Floats, capacity: Floats, columns: Sequence[str], **given: object
) -> Instance:
    """An instance from arrays, one column a device type; for simulators that hold arrays.

    Args:
        rate: Steps per second [jobs, types].
        scale: Devices a job asks for [jobs].
        capacity: Devices of each type [types].
        columns: Names of the types.
        given: Any further field of Instance; weights are 1, times and SLOs unset, by default.
    """
    number, types = rate.shape
    rate = np.where(scale[:, None] <= capacity, rate, 0.0)
    ones = np.ones(number)
    values: dict[str, object] = {
        "ids": range(number), "columns": tuple(columns), "resource_names": tuple(columns),
        "rate": rate, "usage": np.repeat(scale[:, None], types, axis=1),
        "resources": np.eye(types), "capacity": capacity, "scale": scale,
        "equal": rate @ (capacity / capacity.sum()),
        "isolated": isolated_rate(rate, scale, capacity),
        "weight": ones, "steps": ones, "elapsed_seconds": 0 * ones, "isolated_seconds": 0 * ones,
        "slo_seconds": np.full(number, np.inf), "dollars": np.full(types, np.nan),
        "kind": np.arange(number),
    }  # fmt: skip
    return Instance(**{**values, **given})  # type: ignore[arg-type]


def isolated_rate(rate: Floats, scale: Floats, capacity: Floats) -> Floats:
    """throughput(m, X^isolated): 1/n of the cluster, time fractions scaled to at most 1."""
    share = capacity / len(rate) / scale[:, None]
    share = share / np.maximum(share.sum(axis=1), 1.0)[:, None]
    answer: Floats = (rate * share).sum(axis=1)
    return answer


def instance_of(problem: AllocationProblem) -> Instance:
    """Turn a problem into arrays.

    Raises:
        ProblemError: Space sharing is asked for without pairs, or mixes name unknown devices.
    """
    jobs = problem.jobs.jobs
    types = tuple(problem.num_devices)
    capacity = np.array([float(problem.num_devices[name]) for name in types])
    scale = np.array([float(job.scale_factor) for job in jobs])
    keys = {key: i for i, key in enumerate(dict.fromkeys(_key(job) for job in jobs))}
    kind = np.array([keys[_key(job)] for job in jobs])
    table = _Columns(problem, types)
    rate = table.rates(keys)[kind]
    usage = np.where(table.is_mix, 1.0, scale[:, None])
    rate = np.where((usage[:, :, None] * table.resources.T <= table.capacity).all(axis=2), rate, 0)
    base = rate[:, : len(types)]
    entities = {entity.name: i for i, entity in enumerate(problem.jobs.entities)}
    return Instance(
        ids=[job.id for job in jobs],
        columns=table.names,
        resource_names=table.resource_names,
        rate=rate,
        usage=usage,
        resources=table.resources,
        capacity=table.capacity,
        equal=_positive(base @ (capacity / capacity.sum()), rate, 1),
        isolated=_positive(isolated_rate(base, scale, capacity), rate, len(jobs)),
        scale=scale,
        weight=np.array([job.priority_weight for job in jobs]),
        steps=np.array([job.steps for job in jobs]),
        elapsed_seconds=np.array([job.elapsed_seconds for job in jobs]),
        isolated_seconds=np.array([job.isolated_seconds for job in jobs]),
        slo_seconds=np.array([job.slo_seconds or np.inf for job in jobs]),
        dollars=_dollars(problem.dollars_per_hour, types, table.resources),
        kind=kind,
        pair_rate=_pair_rates(problem, keys, table.names),
        entity=np.array([entities.get(job.entity or "", -1) for job in jobs]),
        entities=problem.jobs.entities,
        budget_dollars=problem.budget_dollars,
        arrival=np.array([job.arrival_seconds for job in jobs]),
    )


def _key(job: Job) -> tuple[str, int]:
    return job.model, job.scale_factor


def _positive(level: Floats, rate: Floats, share: int) -> Floats:
    """A job that runs only unconsolidated or on mixes is measured against its best column."""
    answer: Floats = np.where(level > 0, level, rate.max(axis=1) / share)
    return answer


def _dollars(prices: Mapping[str, float], types: tuple[str, ...], uses: Floats) -> Floats:
    known = np.array([prices.get(name, np.nan) for name in types])
    held = uses[: len(types)]
    dollars: Floats = np.where(held > 0, known[:, None] * held, 0.0).sum(axis=0)
    return dollars


class _Columns:
    """The columns and resources of a problem."""

    def __init__(self, problem: AllocationProblem, types: tuple[str, ...]) -> None:
        self.problem, self.types = problem, types
        self.mixed = problem.placement == "mixed"
        mixes = dict.fromkeys(tuple(mix.devices.items()) for mix in problem.throughputs.mixes)
        self.mixes = [m for m in mixes if all(name in types for name, _ in m)]
        apart = [name + UNCONSOLIDATED for name in types] if self.mixed else []
        self.names = (*types, *apart, *(mix_name(dict(mix)) for mix in self.mixes))
        self.is_mix = np.array([i >= len(types) + len(apart) for i in range(len(self.names))])
        limits = problem.consolidated_devices if self.mixed else {}
        self.limited = tuple(limits)
        unknown = [name for name in limits if name not in types]
        if unknown:
            raise ProblemError(f"consolidated_devices names {unknown[0]!r}, not in the pool")
        self.resource_names = (*types, *(name + CONSOLIDATED for name in limits))
        self.resources = self._uses(list(limits))
        devices = [problem.num_devices[name] for name in types]
        self.capacity = np.array([*devices, *limits.values()], dtype=float)

    def _uses(self, limited: list[str]) -> Floats:
        uses = np.zeros((len(self.resource_names), len(self.names)))
        for c, name in enumerate(self.types):
            uses[c, c] = 1.0
            if self.mixed:
                uses[c, len(self.types) + c] = 1.0
            if name in limited:
                uses[len(self.types) + limited.index(name), c] = 1.0
        for i, mix in enumerate(self.mixes):
            for name, number in mix:
                uses[self.types.index(name), len(self.names) - len(self.mixes) + i] = number
        return uses

    def rates(self, keys: Mapping[tuple[str, int], int]) -> Floats:
        table = np.zeros((len(keys), len(self.names)))
        for entry in self.problem.throughputs.models:
            row = keys.get((entry.model, entry.scale_factor))
            if row is None:
                continue
            alone = entry.steps_per_second
            apart = entry.unconsolidated_steps_per_second or {}
            if entry.scale_factor == 1:  # consolidated anywhere, also beside the limit
                apart = {name: alone.get(name, 0.0) for name in self.limited}
            only = self.problem.placement == "unconsolidated" and entry.scale_factor > 1
            for c, name in enumerate(self.types):
                table[row, c] = (apart if only else alone).get(name, 0.0)
                if self.mixed:
                    table[row, len(self.types) + c] = apart.get(name, 0.0)
        for mix in self.problem.throughputs.mixes:
            row = keys.get((mix.model, mix.scale_factor))
            if row is not None and tuple(mix.devices.items()) in self.mixes:
                table[row, self.names.index(mix_name(mix.devices))] = mix.steps_per_second
        return table


def mix_name(devices: Mapping[str, int]) -> str:
    """A mix as a column: ``2xV100+8xP100``."""
    return "+".join(f"{number}x{name}" for name, number in devices.items())


def _pair_rates(
    problem: AllocationProblem, keys: Mapping[tuple[str, int], int], columns: tuple[str, ...]
) -> Floats | None:
    if not problem.space_sharing:
        return None
    if not problem.throughputs.pairs:
        raise ProblemError("space sharing needs throughputs of pairs, and the file has none")
    rates = np.zeros((len(keys), len(keys), len(columns)))
    for pair in problem.throughputs.pairs:
        _fill_pair(rates, pair, keys, columns)
    return rates


def _fill_pair(
    rates: Floats,
    pair: PairThroughput,
    keys: Mapping[tuple[str, int], int],
    columns: tuple[str, ...],
) -> None:
    a = keys.get((pair.models[0], pair.scale_factor))
    b = keys.get((pair.models[1], pair.scale_factor))
    if a is None or b is None:
        return
    for name, (first, second) in pair.steps_per_second.items():
        if name in columns and (first > 0 or second > 0):
            c = columns.index(name)
            rates[a, b, c], rates[b, a, c] = first, second

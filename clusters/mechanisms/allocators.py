"""Allocators: policies and baselines, in the form that a simulator calls again and again."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...schema.errors import InfeasibleError, ProblemError
from ...schema.jobs import Entity
from ...schema.plugins import Registry
from ...schema.spelling import did_you_mean
from ...solvers.allocation import Instance, Policy, make_instance, solve
from ...solvers.allocation.engine import Outcome, solve_alone, spread
from ...solvers.allocation.instance import CONSOLIDATED, isolated_rate
from ...solvers.allocation.las import WarmMaxMin, centre
from ...solvers.allocation.policy import POLICIES, MaxMin
from ...solvers.allocation.program import max_min_program
from ...solvers.allocation.space_sharing.column_generation import PairTimes
from .pool import Active, Floats, Ints


@dataclass(frozen=True, slots=True)
class Shares:
    """Time fractions ``x`` [columns, jobs] of jobs alone, and those of pairs where they share."""

    x: Floats
    pairs: PairTimes | None = None


class Allocator(Protocol):
    """What shares the pool among the jobs present."""

    name: str
    agnostic: bool
    shares_space: bool

    @property
    def leaves_idle(self) -> bool:
        """Whether devices that no job has a share of stay idle on purpose."""

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Share the pool."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A scheduler that policies are compared with: an allocator that solves no program.

    ``make`` gets the seed of its random draws. ``most_devices`` is how many it gives one job at
    most; None: what the job asks for.
    """

    make: Callable[[int], Allocator]
    shares_space: bool = False
    most_devices: int | None = None


BASELINES: Registry[Baseline] = Registry(
    "policy", group="hetflow.baselines", own=("hetflow.papers.gavel.baselines",)
)
OPTIMA: Registry[Callable[[bool], Allocator]] = Registry(
    "optimum", group="hetflow.optima", own=("hetflow.papers.gavel.centre_las",)
)
"""Of LAS's optima, those that take longer than a vertex; called with whether weights count."""


Key = tuple[float, int, tuple[bool, ...]]


class FlatLas:
    """LAS that ignores device types, over classes of jobs that are then equal.

    With one rate on every type a job's row is ``sum_j X_mj >= z w_m / s_m``. So jobs of one weight,
    scale factor and set of types are alike whatever their models. Of several optima: the analytic
    centre of the optimal face, which depends on how many jobs each class has and on nothing else.
    Where the jobs that run anywhere fill the pool it is known: every job gets the same part of each
    type, X_mj = C_j / (N s_m). Elsewhere Newton's method finds it, once for each tuple of counts.
    """

    agnostic = True
    shares_space = False
    leaves_idle = False

    def __init__(self, *, weighted: bool = False, blind: bool = False) -> None:
        """Start with nothing solved.

        ``blind``: types that cannot run a job count as if they did, where it fits.
        """
        self.name = "las_weighted" if weighted else "las"
        self.weighted, self.blind = weighted, blind
        self._start(None)

    def _start(self, capacity: Ints | None) -> None:
        """Begin again with nothing solved, where other devices are up than before [types]."""
        self._capacity = capacity
        self._solved: dict[tuple[tuple[Key, int], ...], dict[Key, list[float]]] = {}
        self._last: dict[Key, list[float]] = {}
        self._numbers: dict[tuple[int, float], int] = {}
        self._keys: list[Key] = []

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Count the classes present and give each job its class's share; O(jobs).

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        if active.pool.uses_mixes:
            raise ProblemError("agnostic LAS knows device types only; mixes need columns=True")
        capacity, number = active.capacity, len(active)
        # The same array means the same devices: its identity is enough, and costs nothing.
        if capacity is not self._capacity:
            self._start(capacity)
        # All jobs run everywhere and fill the pool: the centre is known in closed form.
        if not self.weighted and number * active.scale.min() >= capacity.sum():
            runs = active.scale <= capacity[:, None]
            runs = runs if self.blind else runs & (active.rate > 0)
            if runs.all():
                return Shares(capacity[:, None] / (number * active.scale))
        group = self._groups(active)
        present = np.bincount(group, minlength=len(self._keys)).tolist()
        counts: Counter[Key] = Counter()
        for key, jobs in zip(self._keys, present, strict=True):
            if jobs:
                counts[key] += jobs
        # Classes by what counts for them: jobs of unlike kinds may be alike.
        state = tuple(sorted(counts.items()))
        if state not in self._solved:
            # The same counts come again and again as jobs come and go.
            self._solved[state] = self._centre(state, capacity.astype(float))
        found = self._last = self._solved[state]
        table = np.zeros((len(capacity), len(present)))
        for place, (key, jobs) in enumerate(zip(self._keys, present, strict=True)):
            if jobs:
                table[:, place] = found[key]
        return Shares(table[:, group])

    def _groups(self, active: Active) -> Ints:
        """A number for each job, the same for jobs of one kind and weight [jobs]."""
        scales = [scale for _, scale in active.kinds]
        if not self.weighted:
            for kind in range(len(self._keys), len(scales)):
                self._keys.append(self._key(active, kind, 1.0, scales[kind]))
            return active.kind
        group = []
        for pair in zip(active.kind.tolist(), active.weight.tolist(), strict=True):
            number = self._numbers.setdefault(pair, len(self._numbers))
            if number == len(self._keys):
                self._keys.append(self._key(active, *pair, scales[pair[0]]))
            group.append(number)
        return np.array(group)

    def _key(self, active: Active, kind: int, weight: float, scale: int) -> Key:
        rate = active.fresh(kind)[0]
        fits = scale <= active.capacity
        runs = fits if self.blind else fits & (rate > 0)
        return weight, scale, tuple(runs.tolist())

    def _centre(
        self, state: tuple[tuple[Key, int], ...], capacity: Floats
    ) -> dict[Key, list[float]]:
        """Time fractions [types] of a job of each class."""
        keys = [key for key, _ in state]
        counts = [float(number) for _, number in state]
        scale = [float(s) for _, s, _ in keys]
        runs = [mask for *_, mask in keys]
        level = [w / s for w, s, _ in keys]
        if self.blind:  # throughput(m, X^equal) at rate 1 is the part of the pool that fits
            part = [float(capacity[list(mask)].sum() / capacity.sum()) for mask in runs]
            level = [one * fits for one, fits in zip(level, part, strict=True)]
        # A type without a device up runs nobody; a limit of 0 would leave no centre.
        capacity = np.where(capacity > 0, capacity, 1.0)
        # From the last centre, which is near where one job came or left.
        start = [self._last.get(key) for key in keys]
        found = centre(counts, scale, runs, level, capacity.tolist(), start)
        if found is None:
            # By the interior point method, which ends before the centre but never fails.
            rate = np.array(runs, dtype=float)
            near = max_min_program(
                np.array(counts), rate, np.array(scale), np.array(level), capacity
            )
            found = solve_alone(near).x.tolist()
        return dict(zip(keys, found, strict=True))


class WarmLas:
    """LAS over classes of equal jobs; each call starts from the last basis, which is fast.

    Of several optima: the simplex vertex nearest to the last one's basis; equal jobs get equal
    shares. With space sharing every pair of classes that can share is a column too.
    """

    agnostic = False
    leaves_idle = False

    def __init__(self, *, weighted: bool = False, shares_space: bool = False) -> None:
        """Start cold."""
        self.name = "las_weighted" if weighted else "las"
        self.weighted, self.shares_space = weighted, shares_space
        self._program: WarmMaxMin | None = None
        self._start(None)

    def _start(self, capacity: Ints | None) -> None:
        """Begin again without classes, where other devices are up than before [types]."""
        self._capacity = capacity
        self._classes: dict[tuple[int, float], int] = {}
        self._keys: list[tuple[str, int]] = []
        self._counts = np.zeros(0, dtype=np.int64)
        self._of_kind = np.zeros(0, dtype=np.int64)  # -1: no class yet; where weights do not count

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Move the counts of classes to the jobs present, and go on from the last basis.

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        program, of, counts = self.count(active)
        self.tell(program, counts)
        _, times = program.solve()
        # A class's total, dealt equally.
        x = (times[of] / counts[of][:, None]).T
        if not self.shares_space:
            return Shares(x)
        a, b, column, time = program.pair_times()
        kept = (counts[a] > 0) & (counts[b] > 0)  # absent classes may keep a tolerance of time
        totals = PairTimes(a=a[kept], b=b[kept], column=column[kept], time=time[kept])
        return Shares(x, spread(totals, of, counts.astype(float)))

    def count(self, active: Active) -> tuple[WarmMaxMin, Ints, Ints]:
        """The program, the class of each job [jobs], and the jobs of each class [classes].

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        if active.pool.uses_mixes:
            raise ProblemError("the warm solver knows device types only; mixes need columns=True")
        if self._program is None or active.capacity is not self._capacity:
            self._start(active.capacity)
            self._program = WarmMaxMin(active.capacity.astype(float))
        of = self._classes_of(self._program, active)
        return self._program, of, np.bincount(of, minlength=len(self._counts))

    def tell(self, program: WarmMaxMin, counts: Ints) -> None:
        """Bring the program up to date with the jobs of each class [classes]."""
        # Only what changed, so that the basis stays good.
        changed = (counts != self._counts).nonzero()[0]
        program.set_counts(changed, counts[changed])
        self._counts = counts

    def _classes_of(self, program: WarmMaxMin, active: Active) -> Ints:
        """The class of each job [jobs]; new ones are added in the order of their first jobs."""
        kinds = active.kind
        if self.weighted:
            keys = list(zip(kinds.tolist(), active.weight.tolist(), strict=True))
            for i, key in enumerate(keys):
                if key not in self._classes:
                    self._add_class(program, active, i, key)
            return np.array([self._classes[key] for key in keys])
        more = len(active.kinds) - len(self._of_kind)
        # Kinds that are new since the last call have no class.
        self._of_kind = np.append(self._of_kind, np.full(more, -1)) if more else self._of_kind
        of: Ints = self._of_kind[kinds]
        if of.min() >= 0:
            return of
        for i in (of < 0).nonzero()[0].tolist():
            kind = int(kinds[i])
            if self._of_kind[kind] < 0:
                self._add_class(program, active, i, (kind, 1.0))
                self._of_kind[kind] = len(self._counts) - 1
        return self._of_kind[kinds]

    def _add_class(
        self, program: WarmMaxMin, active: Active, i: int, key: tuple[int, float]
    ) -> None:
        scale, capacity = float(active.scale[i]), program.capacity
        rate = np.where(scale <= capacity, active.rate[:, i], 0.0)
        # throughput(m, X^equal): the rate at an equal part of every type.
        equal = float(np.add.reduce(rate * capacity) / capacity.sum())  # no BLAS, see interior
        number = program.add_class(rate, scale, key[1] * equal / scale)
        job = active.jobs[i]
        self._classes[key] = number
        self._counts = np.append(self._counts, 0)
        self._keys.append((job.model, job.scale_factor))
        if not self.shares_space:
            return
        # With every class so far, itself included: a pair needs the same number of devices.
        for other, beside in enumerate(self._keys):
            if beside[1] == job.scale_factor:
                rates = active.pool.pair_rates(self._keys[number], beside)
                program.add_pair(number, other, rates, scale)


class PolicyAllocator:
    """Any policy of ``solvers.allocation``, solved anew each time.

    It gives the policy's optimum without water filling, as Gavel's simulator does; the mechanism
    gives devices that the optimum leaves idle to other jobs. Of several optima: the one that
    ``solvers.allocation.solve`` states.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        agnostic: bool = False,
        blind: bool = False,
        shares_space: bool = False,
        entities: tuple[Entity, ...] = (),
    ) -> None:
        """Wrap a policy.

        Args:
            policy: The policy.
            agnostic: Show it one rate a job for all types.
            blind: As the published agnostic policies: the rate on the pool's first type
                everywhere, types that cannot run the job included.
            shares_space: Whether pairs of jobs may share devices.
            entities: The tree that jobs name their nodes of, for hierarchies.
        """
        self.shares_space, self.entities = shares_space, entities
        self._node = {entity.name: i for i, entity in enumerate(entities)}
        self.policy, self.agnostic, self.blind = policy, agnostic, blind
        self.name, self.leaves_idle = policy.name, bool(policy.leaves_idle)
        self._isolated_rate: dict[str, tuple[float, float]] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Solve for the jobs present."""
        instance = self._instance(active, now_seconds)
        found, lost = solve_what_can_be_met(instance, self.policy)
        active.given_up.update(active.jobs[job].id for job in lost)
        return Shares(found.x.T, found.pairs)

    def _instance(self, active: Active, now_seconds: float) -> Instance:
        pool, hourly = active.pool, active.pool.hourly()
        types, capacity = len(pool.types), active.capacity.astype(float)
        rate = active.rate[:types].T
        isolated = active.isolated_rate()
        if self.blind:
            # The first type's rate, or its best where that type cannot run it.
            known = np.where(rate[:, 0] > 0, rate[:, 0], rate.max(axis=1))
            rate = np.where(active.scale[:, None] <= capacity, known[:, None], 0.0)
            # It believes this of the past too: steps made took less time alone than they did.
            isolated = isolated_rate(rate, active.scale.astype(float), pool.capacity.astype(float))
        self._count_isolated(active, isolated)
        deadlines = [
            np.inf
            if job.slo_seconds is None or job.id in active.given_up
            else job.arrival_seconds + job.slo_seconds
            for job in active.jobs
        ]
        arrivals = np.array([job.arrival_seconds for job in active.jobs])
        given: dict[str, object] = {
            "weight": active.weight,
            "steps": active.left,
            # Not before they came, though a clock that was set may say so of a live cluster's.
            "elapsed_seconds": np.maximum(now_seconds - arrivals, 0.0),
            "isolated_seconds": active.isolated,
            "slo_seconds": np.array(deadlines) - now_seconds,
        }
        if hourly is not None:
            given["dollars"] = hourly
        if self.entities:
            given["entities"] = self.entities
            given["entity"] = np.array([self._node.get(j.entity or "", -1) for j in active.jobs])
        instance = make_instance(
            rate=rate,
            scale=active.scale.astype(float),
            capacity=capacity,
            columns=pool.types,
            **given,
        )
        if len(pool.columns) > types:
            instance = _with_columns(instance, active)
        if self.shares_space:
            kind, rates = pair_table(active)
            instance = replace(instance, kind=kind, pair_rate=rates)
        instance = instance.flat() if self.agnostic and not self.blind else instance
        # A type without a device up runs nobody; its limit of 0 leaves a program no interior.
        return replace(instance, capacity=np.where(instance.capacity > 0, instance.capacity, 1.0))

    def _count_isolated(self, active: Active, isolated: Floats) -> None:
        """Add to t^isolated what the steps since the last call would have taken in isolation."""
        rates, left, so_far = isolated.tolist(), active.left.tolist(), active.isolated
        for i, job in enumerate(active.jobs):
            before = self._isolated_rate.get(job.id)
            if before is not None:
                # Steps since the last call, at the isolated rate of then.
                so_far[i] += (before[0] - left[i]) / before[1]
        # Jobs that do not fit now keep what is known of them.
        waits = {
            id_: self._isolated_rate[id_] for id_ in active.waiting & self._isolated_rate.keys()
        }
        self._isolated_rate = waits | {
            job.id: (left[i], rates[i]) for i, job in enumerate(active.jobs)
        }


def _with_columns(instance: Instance, active: Active) -> Instance:
    """The mixes, or the unconsolidated types and the limit on consolidated ones, besides."""
    pool, rate = active.pool, active.rate.T
    best = rate.max(axis=1)
    resources, capacity = pool.limits(active.capacity, active.consolidated)
    usage = np.where(pool.is_mix == 1, 1.0, active.scale[:, None])
    # A column that not even the whole of what is up can hold runs nobody.
    fits = (usage[:, None, :] * resources <= capacity[:, None]).all(axis=1)
    rate = np.where(fits, rate, 0.0)
    close = [name + CONSOLIDATED for name in pool.types]
    return replace(
        instance,
        columns=pool.columns,
        rate=rate,
        usage=usage,
        resources=resources.astype(float),
        capacity=capacity.astype(float),
        resource_names=(*pool.types, *close)[: len(capacity)],
        equal=np.where(instance.equal > 0, instance.equal, best),
        isolated=np.where(instance.isolated > 0, instance.isolated, best / len(rate)),
    )


def pair_table(active: Active) -> tuple[Ints, Floats]:
    """Kinds of the jobs present [jobs], and the rate of each beside each [kinds, kinds, columns].

    A type that does not run a job alone is shut to its pairs.
    """
    pool = active.pool
    _, first, kind = np.unique(active.kind, return_index=True, return_inverse=True)
    keys = [(active.jobs[i].model, active.jobs[i].scale_factor) for i in first]
    rates = np.zeros((len(keys), len(keys), len(pool.columns)))
    for a, one in enumerate(keys):
        for b, two in enumerate(keys[: a + 1]):
            rates[a, b], rates[b, a] = pool.pair_rates(one, two)
    return kind.reshape(-1), rates


def allocator_named(
    name: str,
    *,
    agnostic: bool = False,
    warm: bool = True,
    columns: bool = False,
    blind: bool = False,
    shares_space: bool = False,
    seed: int = 0,
    entities: tuple[Entity, ...] = (),
    others: Sequence[str] = (),
) -> Allocator:
    """The allocator of a policy's name.

    Args:
        name: A policy of ``solvers.allocation``, or a baseline such as ``fifo_greedy``.
        agnostic: Whether the policy is blind to what device types differ in.
        warm: Whether LAS ends in a vertex, from its last basis (fast), rather than in the centre.
        columns: Whether there are other columns than device types (mixes, placements).
        blind: See ``PolicyAllocator``.
        shares_space: Whether pairs of jobs may share devices.
        seed: Of what a policy draws at random.
        entities: The tree of a hierarchy.
        others: What the caller knows by name besides, for the error where there is none.

    Raises:
        ProblemError: There is none of that name, it does not share space, or it makes no sense
            for jobs that come and go.
    """
    policy = POLICIES.find(name)
    baseline = BASELINES.find(name) if policy is None else None
    if baseline is not None:
        if shares_space and not baseline.shares_space:
            raise ProblemError(f"{name} runs every job alone; leave space sharing out")
        return baseline.make(seed)
    if policy is None:
        known = [*POLICIES.names(), *BASELINES.names(), *others]
        fix = did_you_mean(name, known, f"known: {', '.join(known)}")
        raise ProblemError(f"no policy {name!r}; {fix}")
    if policy.incremental is not None and not columns:
        weighted = policy.incremental.weighted
        if agnostic and not shares_space:
            return FlatLas(weighted=weighted, blind=blind)
        if warm and not agnostic:
            return WarmLas(weighted=weighted, shares_space=shares_space)
        if not agnostic and not shares_space:
            return OPTIMA.get("centre")(weighted)
    if policy.single_use:
        raise ProblemError(
            f"{name} {policy.single_use}; with jobs that come and go it means nothing",
            hint="use `hetflow allocate`, or min_cost_slo, or makespan",
        )
    return PolicyAllocator(
        policy, agnostic=agnostic, blind=blind, shares_space=shares_space, entities=entities
    )


def always_pairs(name: str) -> bool:
    """Whether an allocator pairs jobs in any case, so that it needs the pairs' throughputs."""
    baseline = BASELINES.find(name)
    return baseline is not None and baseline.shares_space


def most_devices(name: str) -> int | None:
    """Devices that an allocator gives one job at most; None where a job gets what it asks for."""
    baseline = BASELINES.find(name)
    return None if baseline is None else baseline.most_devices


def solve_what_can_be_met(instance: Instance, policy: Policy) -> tuple[Outcome, list[int]]:
    """Solve a policy, dropping SLOs until the others can be met.

    Dropped at once: SLOs in the past, and those that ask for more than the job's fastest devices.
    Then, one after another, the SLO whose throughput costs most at the prices of the bottleneck
    (of the program that raises all floors together). Of equals it is the earlier job's.

    Returns:
        The outcome, and the jobs (places) whose SLO was dropped.

    Raises:
        InfeasibleError: Something else than SLOs cannot be met.
    """
    slo = instance.slo_seconds.copy()
    floor = _floor(replace(instance, slo_seconds=np.where(slo > 0, slo, np.inf)), policy)
    if floor is None:
        return solve(instance, policy), []
    best = instance.rate.max(axis=1)
    # A floor at a job's best rate leaves no way to choose, and rounding may make it infeasible.
    fast = best * (1 - 1e-9) if instance.pair_rate is None else best
    lost = np.flatnonzero((slo <= 0) | (floor > fast)).tolist()
    while True:
        slo[lost] = np.inf
        fewer = replace(instance, slo_seconds=slo)
        try:
            return solve(fewer, policy), lost
        except InfeasibleError:
            floor = _floor(fewer, policy)
            # Not the floors: nothing is gained by dropping them.
            if floor is None or not (floor > 0).any():
                raise
            prices = MaxMin(level=floor).optimise(fewer).job_prices
            # The dearest floor at the prices of raising all together; a tiny weight keeps free
            # floors before absent ones.
            lost.append(int(np.argmax(np.where(floor > 0, prices * floor + 1e-300, 0.0))))


def _floor(instance: Instance, policy: Policy) -> Floats | None:
    """The least throughputs that a policy asks for [jobs], None where it asks for none."""
    floor: Floats | None = getattr(policy.goal(instance), "floor", None)
    return floor

"""``hetflow.throughputs`` and ``hetflow.allocate``."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..planning.allocate import allocate as allocate_problem
from ..planning.allocate import allocation_problem
from ..planning.inputs import pool_of
from ..planning.limits import SolveLimits, TimeShares
from ..schema import files
from ..schema.cluster import Cluster
from ..schema.errors import InfeasibleError, ProblemError
from ..schema.jobs import Allocation, MixThroughput, ModelThroughput, Throughputs
from ..schema.options import option
from ..schema.problem import Problem
from ..schema.profile import Profile
from ..schema.requests.simulate import AllocateRequest, ThroughputsRequest
from ..schema.spelling import did_you_mean
from .calls import takes
from .files import jobs_of, priced_pool, throughputs_of

_log = logging.getLogger("hetflow")


@takes(AllocateRequest)
def allocate(request: AllocateRequest) -> Allocation:
    """Share a pool among jobs according to a policy (thesis 5.3); the allocation carries its proof.

    Returns:
        The time fractions of each job on each device type, with a certificate of their optimality.

    Raises:
        ProblemError: There is no such policy, the jobs do not fit the pool, or a device type has
            no price in the market.
        InfeasibleError: No allocation satisfies the policy's constraints.
        FileError: A file is missing or has faults.
        TooLittleTimeError: The limit of time came before there was an allocation.
        BackendError: The solver's allocation fails its check, which is a bug.

    Example:
        >>> import hetflow
        >>> jobs = hetflow.Jobs(
        ...     jobs=(
        ...         hetflow.Job(id="a", model="m", steps=100),
        ...         hetflow.Job(id="b", model="m", steps=100),
        ...     )
        ... )
        >>> rates = hetflow.ModelThroughput(model="m", scale_factor=1, steps_per_second={"V100": 2})
        >>> shares = hetflow.allocate(jobs, hetflow.Throughputs(models=(rates,)), "V100")
        >>> {job: round(row["V100"], 6) for job, row in shares.x.items()}
        {'a': 0.5, 'b': 0.5}
    """
    clock = TimeShares(SolveLimits(time_limit_seconds=request.time_limit_seconds))
    devices, _ = priced_pool(pool_of(request.pool), request.market, request.at)
    problem = allocation_problem(
        jobs_of(request.jobs),
        throughputs_of(request.throughputs, pairs=request.space_sharing),
        devices,
        heterogeneity="agnostic" if request.agnostic else "aware",
        space_sharing=request.space_sharing,
        placement=request.placement,
        budget_dollars=request.budget_dollars,
    )
    return allocate_problem(problem, request.policy, fills=request.fill, clock=clock)


@takes(ThroughputsRequest)
def throughputs(request: ThroughputsRequest) -> Throughputs:
    """Turn profiles into the throughputs that ``allocate`` and ``simulate`` need.

    A job keeps its batch whatever it runs on: a rate is one over the step that ``solve`` predicts
    for that batch on so many devices of the type.

    Returns:
        The steps per second of each model and scale factor, by device type.

    Raises:
        ProblemError: A model has no batch, or a batch no model.
        InfeasibleError: A batch fits no profiled type.
        FileError: The folder holds no profile, or one with faults.

    Example:
        >>> import hetflow
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=1 << 30)
        >>> v100 = hetflow.Profile(
        ...     model="m", device_type="V100", device_memory_bytes=16 << 30,
        ...     weight_bytes=4, update_seconds=0.0, batch_curve=(point,),
        ... )
        >>> hetflow.throughputs([v100], batch_size=16).models[0].steps_per_second
        {'V100': 5.0}
    """
    profiles, scale_factors = request.profiles, request.scale_factors
    memory_reserve_bytes = request.memory_reserve_bytes
    where = {"profiles": str(profiles)} if isinstance(profiles, str | Path) else {}
    if isinstance(profiles, str | Path):
        measured = files.read_profiles(Path(profiles))
    else:
        measured = tuple(profiles)
    models = sorted({profile.model for profile in measured})
    batches = _batches(request.batch_size, models)
    if len(set(scale_factors)) < len(scale_factors):
        raise ProblemError(
            f"{option('scale_factors')}: a number appears twice: {list(scale_factors)}"
        )
    rates: list[ModelThroughput] = []
    mixed: list[MixThroughput] = []
    for model in models:
        own = [profile for profile in measured if profile.model == model]
        for scale in scale_factors:
            alone, together = _rates(
                own, batches[model], scale, max(scale_factors), memory_reserve_bytes
            )
            rates.append(alone)
            mixed += together if request.mixes else ()
    return Throughputs(
        models=tuple(rates),
        mixes=tuple(mixed),
        provenance={"batch_sizes": batches}
        | where
        | ({"memory_reserve_bytes": memory_reserve_bytes} if memory_reserve_bytes else {}),
    )


def _rates(
    profiles: Sequence[Profile], batch_size: int, scale: int, most: int, reserve: int
) -> tuple[ModelThroughput, tuple[MixThroughput, ...]]:
    """The rates of one model and scale factor; types that cannot run it are left out."""
    from ..clusters.simulator.mixes import split_throughput
    from ..planning.split_problem import split_problem

    model = profiles[0].model
    pool = Cluster.parse(",".join(f"{most}x{profile.device_type}" for profile in profiles))
    problem = split_problem(Problem(profiles, pool, batch_size, memory_reserve_bytes=reserve))
    alone, together = split_throughput(model, batch_size, problem.devices, scale)
    rates = {name: rate for name, rate in alone.steps_per_second.items() if rate > 0}
    if not rates:
        raise InfeasibleError(
            f"{model}: no {scale} device(s) of one type can run a batch of {batch_size}",
            hint=f"give a batch that profiled sizes add up to ({option('batch_size')})",
        )
    for profile in profiles:
        if profile.device_type not in rates:
            _log.warning(
                f"{model} x{scale}: no rate on {profile.device_type}, a batch of {batch_size} does "
                "not fit it"
            )
    if scale > 1 and any(profile.sync is None for profile in profiles):
        _log.warning(
            f"{model} x{scale}: the profiles hold no synchronisation, so it counts as nothing"
        )
    return replace(alone, steps_per_second=rates), together


def _batches(given: int | Mapping[str, int], models: list[str]) -> dict[str, int]:
    """The batch of each model."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(models, given)
    for name in given:
        if name not in models:
            raise ProblemError(
                f"{option('batch_size')}: no profile of model {name!r}"
                + did_you_mean(name, models, before="; "),
                hint=f"profiled models: {', '.join(models)}",
            )
    missing = [model for model in models if model not in given]
    if missing:
        raise ProblemError(f"{option('batch_size')}: says nothing of {', '.join(missing)}")
    return dict(given)

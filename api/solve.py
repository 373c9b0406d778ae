"""``hetflow.solve``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from ..planning.inputs import name_of, pool_of, profiles_of, under_todays_names
from ..planning.limits import Clock, Limits
from ..planning.request import (
    AnyObjective,
    CostModelName,
    Method,
    ParallelOptions,
    PipelineOptions,
    SolveRequest,
    SplitOptions,
    Strategy,
)
from ..planning.solve import solve as solve_request
from ..schema.files import Plan
from ..schema.optimizer import OptimizerState, named_optimizer
from ..schema.parallel import ParallelPlan
from ..schema.pipeline import PipelinePlan, StageCost
from ..schema.plan import SplitPlan
from ..schema.records import Bytes, Count, Fraction, PositiveRate, PositiveSeconds
from ..schema.requests.kinds import Markets, Pool, Profiles
from ..schema.schedule_traits import DEFAULT_SCHEDULE
from .naming import names_arguments

if TYPE_CHECKING:
    from ..planning.market_prices import DevicePrice


class SolveOptions(TypedDict, total=False):
    """The options of ``solve`` besides its batch and strategy, for type checkers; see there."""

    model: str | None
    objective: AnyObjective | None
    optimizer: OptimizerState | str | None
    memory_reserve_bytes: Bytes
    fastest: bool
    time_limit_seconds: PositiveSeconds | None
    gap: Fraction | None
    runs: Path | str | None
    virtual_nodes: Count | None
    interpolate: bool
    method: Method | None
    top: Count | None
    schedule: str | None
    microbatch_size: Count | None
    num_stages: Count | None
    replication: bool | None
    num_model_chunks: Count | None
    link_bytes_per_second: PositiveRate | None
    stage_cost: StageCost | None
    repetitive: bool
    cost_model: CostModelName | None
    recompute: bool | None
    sequence_parallel: bool | None
    shard_optimizer: bool
    market: "Markets | None"
    at: str | None
    spot: bool | None


@overload
def solve(
    profiles: Profiles,
    pool: Pool,
    *,
    batch_size: Count,
    strategy: Literal["split"],
    **options: Unpack[SolveOptions],
) -> SplitPlan: ...
@overload
def solve(
    profiles: Profiles,
    pool: Pool,
    *,
    batch_size: Count,
    strategy: Literal["pipeline"],
    **options: Unpack[SolveOptions],
) -> PipelinePlan: ...
@overload
def solve(
    profiles: Profiles,
    pool: Pool,
    *,
    batch_size: Count,
    strategy: Literal["parallel"],
    **options: Unpack[SolveOptions],
) -> ParallelPlan: ...
@overload
def solve(
    profiles: Profiles,
    pool: Pool,
    *,
    batch_size: Count,
    strategy: Strategy = "auto",
    **options: Unpack[SolveOptions],
) -> Plan: ...
@names_arguments(
    gpus="pool",
    cluster="pool",
    time_limit="time_limit_seconds",
    state_bytes_per_weight_byte="optimizer=OptimizerState(...)",
    memory_reserve="memory_reserve_bytes",
    no_spot="spot=False",
    no_replication="replication=False",
    no_recompute="recompute=False",
    no_sequence_parallel="sequence_parallel=False",
    chunks_per_device="num_model_chunks",
)
def solve(
    profiles: Profiles,
    pool: Pool,
    *,
    batch_size: Count,
    model: str | None = None,
    strategy: Strategy = "auto",
    objective: AnyObjective | None = None,
    optimizer: OptimizerState | str | None = None,
    memory_reserve_bytes: Bytes = 0,
    fastest: bool = False,
    time_limit_seconds: PositiveSeconds | None = None,
    gap: Fraction | None = None,
    runs: Path | str | None = None,
    virtual_nodes: Count | None = None,
    interpolate: bool = False,
    method: Method | None = None,
    top: Count | None = None,
    schedule: str | None = None,
    microbatch_size: Count | None = None,
    num_stages: Count | None = None,
    replication: bool | None = None,
    num_model_chunks: Count | None = None,
    link_bytes_per_second: PositiveRate | None = None,
    stage_cost: StageCost | None = None,
    repetitive: bool = False,
    cost_model: CostModelName | None = None,
    recompute: bool | None = None,
    sequence_parallel: bool | None = None,
    shard_optimizer: bool = False,
    market: "Markets | None" = None,
    at: str | None = None,
    spot: bool | None = None,
) -> Plan:
    """Find the best plan for a model on a pool; the plan carries its proof and has been checked.

    An option that no kind of plan in question reads is refused, also if it is given the value that
    it has by default.

    Args:
        profiles: Profiles, or the folder that ``hetflow profile`` wrote.
        pool: ``"2xV100,8xP100"``, ``{"V100": 2, "P100": 8}``, a ``Cluster``, or the ``Path`` of a
            cluster's file.
        batch_size: Global batch, samples of one optimizer step over all devices.
        model: Name of the model; None if all profiles are of one model.
        strategy: Kind of plan; ``auto`` compares splits and, if the profiles have layers,
            pipelines and parallel plans.
        objective: ``step_seconds`` [default]; ``waste`` for splits (EasyScale 3.4);
            ``bottleneck`` for pipelines (thesis 2.4.1).
        optimizer: The optimizer that will train, by name or by its state; None takes the
            profiles'.
        memory_reserve_bytes: Bytes of each device that the plan leaves free, besides what the
            profiles measured beside tensors.
        fastest: Whether to take the plan with the least predicted time, even if a simpler plan is
            as fast within the accuracy of the measurements.
        time_limit_seconds: Most wall seconds for a pipeline's searches or the MILP.
        gap: Stop when a pipeline is proved to be within this fraction of the best.
        runs: Folder of run records. Those of the model first correct the profiles; with
            ``cost_model="measured"``, costs are taken from them instead.
        virtual_nodes: Split the batch B into N equal virtual nodes of B/N samples.
        interpolate: Whether to allow split sizes between profiled ones.
        method: ``exact`` for splits [default], or its MILP by ``cbc`` or ``highs``.
        top: With ``objective="waste"``: keep the K best configurations [default: 1]. With
            ``strategy="parallel"``: up to K points of time against devices and memory.
        schedule: Schedule of a pipeline [default: ``1f1b``]; ``auto`` takes the fastest of those
            that flush.
        microbatch_size: Samples per microbatch; None takes the fastest profiled size.
        num_stages: Exact number of stages; None lets the solver choose.
        replication: Whether stages may have replicas [default: they may].
        num_model_chunks: Stages per device, for ``interleaved``; None tries 2 to 4. Parallel plans
            also try 1.
        link_bytes_per_second: Bandwidth of links that the pool does not state.
        stage_cost: How a stage's cost is computed [default: ``ring``] (docs/pipeline.md).
        repetitive: Plan equal stages of repeating layers, schedule ``2bw`` (thesis 3.3).
        cost_model: With ``repetitive``: which costs to use [default: ``profiled``].
        recompute: With ``strategy="parallel"``: whether stages may recompute activations
            [default: they may].
        sequence_parallel: With ``strategy="parallel"``: whether the devices of a group spread
            tokens between the layers that they share; None only if no plan fits otherwise.
        shard_optimizer: With ``strategy="parallel"``: whether each replica of a stage keeps and
            updates only a share of the optimizer's state (ZeRO-1).
        market: Markets, or their files. The plan's prediction gets the dollars of its devices, at
            the cheapest price of each type; what is minimised stays the same.
        at: The time of those prices, such as ``2020-03-07T00:00:00Z``; None takes the last known.
        spot: Whether to count only spot prices, or only those on demand; None counts both.

    Returns:
        A plan that ``hetflow.check`` accepts for these profiles and this pool.

    Raises:
        ProblemError: Profiles, pool and options do not fit together, or a device type of the pool
            has no price in the market.
        InfeasibleError: No plan exists; the message says what to relax.
        FileError: A file is missing or has faults.
        BackendError: A solver's plan fails its check, which is a bug.

    Example:
        >>> import hetflow
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=1 << 30)
        >>> v100 = hetflow.Profile(
        ...     model="m", device_type="V100", device_memory_bytes=16 << 30,
        ...     weight_bytes=4, update_seconds=0.0, batch_curve=(point,),
        ... )
        >>> plan = hetflow.solve([v100], "V100", batch_size=16)
        >>> plan.groups[0].virtual_nodes, plan.predicted.step_seconds, plan.proof.gap
        (2, 0.2, 0.0)
    """
    limits = Limits(time_limit_seconds, gap)
    clock = Clock(limits)
    devices = pool_of(pool)
    offers: dict[str, DevicePrice] = {}
    if market is not None or at is not None or spot is not None:
        from ..planning.market_prices import asked_prices

        devices, offers = asked_prices(devices, market, at, spot=spot)
    known = under_todays_names(profiles_of(profiles, model), devices.num_devices)
    used: tuple[str, ...] = ()
    measures = cost_model == "measured"
    if runs is not None and not measures:
        from ..planning.correcting import corrected_by_runs

        known, used = corrected_by_runs(known, Path(runs))
    asked = {
        "objective": objective,
        "method": method,
        "top": top,
        "schedule": schedule,
        "replication": replication,
        "stage_cost": stage_cost,
        "cost_model": cost_model,
        "recompute": recompute,
    }
    request = SolveRequest(
        profiles=known,
        pool=devices,
        pool_name=name_of(pool),
        batch_size=batch_size,
        strategy=strategy,
        objective=objective or "step_seconds",
        top=top or 1,
        split=SplitOptions(method or "exact", virtual_nodes, interpolate),
        pipeline=PipelineOptions(
            schedule=schedule or DEFAULT_SCHEDULE,
            stage_cost=stage_cost or "ring",
            num_stages=num_stages,
            replication=replication is not False,
            link_bytes_per_second=link_bytes_per_second,
            microbatch_size=microbatch_size,
            num_model_chunks=num_model_chunks,
            repetitive=repetitive,
            cost_model=cost_model or "profiled",
            runs=Path(runs) if measures and runs is not None else None,
        ),
        parallel=ParallelOptions(recompute is not False, sequence_parallel, shard_optimizer),
        optimizer=named_optimizer(optimizer) if isinstance(optimizer, str) else optimizer,
        memory_reserve_bytes=memory_reserve_bytes,
        fastest=fastest,
        limits=limits,
        corrected_by=used,
        stated=frozenset(name for name, value in asked.items() if value is not None),
    )
    plan = solve_request(request, clock)
    if not offers:
        return plan
    prices = {
        name: {"dollars_per_hour": one.dollars_per_hour, "machine": one.title}
        for name, one in offers.items()
    }
    return replace(plan, provenance={**(plan.provenance or {}), "prices": prices})

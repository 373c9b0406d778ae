"""Which solver answers which flags, and the comparison of kinds of plans."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ..schema.cluster import Cluster
from ..schema.errors import BackendError, HetflowError, InfeasibleError, ProblemError
from ..schema.pipeline import FLUSHING, Objective, PipelinePlan, PlannedSchedule, StageCost
from ..schema.plan import EmulatedDevice, PassTime, SplitPlan
from ..schema.problem import SplitProblem
from ..schema.profile import Profile
from .common import note, warn
from .solve_pipeline import solve_pipeline
from .solve_repetitive import CostModelName, solve_repetitive


@dataclass(frozen=True)
class SplitFlags:
    """The flags of a batch split, as ``hetflow solve`` names them."""

    objective: str = "step_seconds"
    method: str = "exact"
    virtual_nodes: int | None = None
    top: int = 1
    interpolate: bool = False
    time_limit_seconds: float | None = None


@dataclass(frozen=True)
class PipelineFlags:
    """The flags of a pipeline, as ``hetflow solve`` names them."""

    schedule: PlannedSchedule | Literal["auto"] = "1f1b"
    stage_cost: StageCost = "ring"
    num_stages: int | None = None
    replication: bool = True
    link_bytes_per_second: float | None = None
    objective: Objective | None = None
    microbatch_size: int | None = None
    num_model_chunks: int | None = None
    repetitive: bool = False
    cost_model: CostModelName = "profiled"
    runs: Path | None = None


@dataclass(frozen=True)
class Question:
    """Everything a plan depends on."""

    profiles: tuple[Profile, ...]
    pool: Cluster
    pool_name: str
    batch_size: int
    split: SplitFlags
    pipeline: PipelineFlags


def answer(question: Question, strategy: str) -> SplitPlan | PipelinePlan:
    """Solve with the strategy asked for; ``auto`` takes the faster of the two, and says so.

    Raises:
        ProblemError: Flags that do not go together.
        InfeasibleError: No plan of the kind asked for exists; with ``auto``, of no kind.
        BackendError: A solver's plan fails its check.
    """
    if strategy == "pipeline":
        return _pipeline(question)
    if question.split.objective == "bottleneck" and strategy != "pipeline":
        raise ProblemError("--objective bottleneck is a pipeline's", hint="add --strategy pipeline")
    if strategy == "split" or not _could_be_pipeline(question):
        return _split(question)
    return _faster(question)


def ended_early(plan: SplitPlan | PipelinePlan) -> bool:
    """Whether a limit cut the search short.

    The least step of a pipeline is searched to the end of its bound; what the bound leaves open
    is the plan's gap, not a search that was stopped. A cost model's choice claims no bound.
    """
    claims = plan.proof.lower_bound is not None
    if isinstance(plan, PipelinePlan) and (plan.objective == "step" or not claims):
        return False
    return plan.proof.termination != "optimal"


def _could_be_pipeline(question: Question) -> bool:
    """Whether all types are profiled by layer and nothing asked for belongs to a split."""
    in_pool = [p for p in question.profiles if p.device_type in question.pool.num_devices]
    layered = bool(in_pool) and all(profile.layers is not None for profile in in_pool)
    return layered and question.split == SplitFlags()


def _faster(question: Question) -> SplitPlan | PipelinePlan:
    plans: list[SplitPlan | PipelinePlan] = []
    refusals: list[HetflowError] = []
    for solve in (_split, _pipeline):
        try:
            plans.append(solve(question))
        except (InfeasibleError, ProblemError) as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    if refusals:
        note(f"compared with nothing: {refusals[0].message}")
        return plans[0]
    best, other = sorted(plans, key=lambda plan: plan.predicted.step_seconds)
    gain = other.predicted.step_seconds / best.predicted.step_seconds - 1
    note(f"{best.kind} is {gain:.1%} faster than {other.kind}")
    comparison = {
        "kind": other.kind, "step_seconds": other.predicted.step_seconds, "faster_by": gain,
    }  # fmt: skip
    origin = {**(best.provenance or {}), "compared_with": comparison}
    return dataclasses.replace(best, provenance=origin)


def _pipeline(question: Question) -> PipelinePlan:
    if question.split.objective == "waste":
        raise ProblemError("--objective waste is a split's", hint="add --strategy split")
    asked = question.pipeline.schedule
    sizes = _microbatch_sizes(question)
    _say_links(question)
    if question.pipeline.repetitive:
        return _repetitive(question, sizes)
    if question.pipeline.cost_model != "profiled" or question.pipeline.runs is not None:
        raise ProblemError(
            "--cost-model and --runs belong to the planner of repetitive models",
            hint="add --repetitive --schedule 2bw",
        )
    if asked == "auto":
        return _best_schedule(question, sizes)
    return _scheduled(question, asked, sizes)


def _repetitive(question: Question, sizes: list[int]) -> PipelinePlan:
    flags = question.pipeline
    if flags.schedule != "2bw":
        raise ProblemError(
            f"--repetitive plans schedule 2bw (thesis 3.3), not {flags.schedule}",
            hint="add --schedule 2bw",
        )
    taken = {"--num-stages": flags.num_stages, "--stage-cost": flags.stage_cost != "ring"}
    for name, value in taken.items():
        if value:
            raise ProblemError(f"--repetitive chooses by itself; leave {name} out")
    return solve_repetitive(
        question.profiles,
        question.pool,
        question.batch_size,
        sizes,
        pool_name=question.pool_name,
        link_bytes_per_second=flags.link_bytes_per_second,
        cost_model=flags.cost_model,
        runs=flags.runs,
    )


def _best_schedule(question: Question, sizes: list[int]) -> PipelinePlan:
    """The fastest schedule of one semantics: those that flush train alike."""
    plans: list[PipelinePlan] = []
    refusals: list[HetflowError] = []
    for schedule in FLUSHING:
        if question.pipeline.num_model_chunks is not None and schedule != "interleaved":
            continue
        try:
            plans.append(_scheduled(question, cast(PlannedSchedule, schedule), sizes))
        except (InfeasibleError, ProblemError) as error:
            refusals.append(error)
            note(f"{schedule}: {error.message}")
    if not plans:
        raise refusals[0]
    best, *others = sorted(plans, key=lambda plan: plan.predicted.step_seconds)
    compared = []
    for other in others:
        gain = other.predicted.step_seconds / best.predicted.step_seconds - 1
        note(f"{best.schedule} is {gain:.1%} faster than {other.schedule}")
        compared.append({"schedule": other.schedule, "step_seconds": other.predicted.step_seconds})
    origin = {**(best.provenance or {}), "compared_schedules": compared}
    return dataclasses.replace(best, provenance=origin)


def _scheduled(question: Question, schedule: PlannedSchedule, sizes: list[int]) -> PipelinePlan:
    """The best microbatch size of one schedule."""
    plans: dict[int, PipelinePlan] = {}
    refusals: list[HetflowError] = []
    for size in sizes:
        try:
            plans[size] = _pipeline_at(question, schedule, size)
        except (InfeasibleError, ProblemError) as error:
            refusals.append(error)
    if not plans:
        raise refusals[0]
    best = min(plans, key=lambda size: (plans[size].predicted.step_seconds, -size))
    if len(sizes) > 1:
        tried = ", ".join(
            f"{size}: {plans[size].predicted.step_seconds * 1e3:.1f} ms"
            if size in plans
            else f"{size}: no plan"
            for size in sorted(sizes)
        )
        note(f"microbatches of {best} are the fastest of those profiled ({tried})")
    return plans[best]


def _microbatch_sizes(question: Question) -> list[int]:
    """The one asked for, or the nearest profiled to it; else all that are profiled everywhere.

    Raises:
        ProblemError: Device types without layers, or none at a common size.
    """
    in_pool = [p for p in question.profiles if p.device_type in question.pool.num_devices]
    tables = [{table.microbatch_size for table in p.layer_tables} for p in in_pool]
    common = sorted(set.intersection(*tables)) if tables else []
    asked = question.pipeline.microbatch_size
    if not common:
        return [asked or 1]  # the solver's own checks say what is missing
    if asked is None:
        return common
    nearest = min(common, key=lambda size: (abs(size - asked), size))
    if nearest != asked:
        known = ", ".join(map(str, common))
        warn(f"layers are profiled at {known}: took microbatches of {nearest}, not {asked}")
    return [nearest]


def _say_links(question: Question) -> None:
    """What links between devices are taken for, where only the profiles tell."""
    from ..solvers.pipeline_problems import measured_link

    in_pool = [p for p in question.profiles if p.device_type in question.pool.num_devices]
    rate = measured_link(in_pool)
    if question.pipeline.link_bytes_per_second is None and rate is not None:
        note(f"links that the pool does not state: {rate / 1e6:.0f} MB/s, as profiled")


def _pipeline_at(
    question: Question, schedule: PlannedSchedule, microbatch_size: int
) -> PipelinePlan:
    flags = question.pipeline
    return solve_pipeline(
        question.profiles,
        question.pool,
        question.batch_size,
        pool_name=question.pool_name,
        microbatch_size=microbatch_size,
        link_bytes_per_second=flags.link_bytes_per_second,
        schedule=schedule,
        stage_cost=flags.stage_cost,
        num_stages=flags.num_stages,
        replication=flags.replication,
        objective=flags.objective,
        num_model_chunks=flags.num_model_chunks,
    )


def _split(question: Question) -> SplitPlan:
    from ..checks.batch_split import check
    from ..solvers.problems import split_problem

    flags = question.split
    problem = split_problem(
        question.profiles, question.pool, question.batch_size, flags.virtual_nodes,
        flags.interpolate,
    )  # fmt: skip
    _warn_about_free_communication(problem)
    plan = _with_origin(_solve_split(problem, flags), question)
    faults = check(plan, problem)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")
    return plan


def _warn_about_free_communication(problem: SplitProblem) -> None:
    unsynced = [option.device_type for option in problem.devices if option.sync is None]
    if unsynced and sum(option.num_devices for option in problem.devices) > 1:
        warn(
            f"no measured sync_seconds for {', '.join(unsynced)}: communication counts as free; "
            "profile with two devices to measure it"
        )


def _solve_split(problem: SplitProblem, flags: SplitFlags) -> SplitPlan:
    if flags.objective == "waste":
        return _solve_waste(problem, flags)
    if flags.top != 1:
        raise ProblemError("--top lists EasyScale's configurations", hint="add --objective waste")
    if flags.method == "exact":
        if flags.time_limit_seconds is not None:
            raise ProblemError("--time-limit concerns the MILP", hint="add --method cbc or highs")
        from ..solvers import batch_split

        return batch_split.solve(problem)
    from ..solvers import batch_split_milp

    backend: Literal["cbc", "highs"] = "cbc" if flags.method == "cbc" else "highs"
    return batch_split_milp.solve(
        problem, backend=backend, time_limit_seconds=flags.time_limit_seconds
    )


def _solve_waste(problem: SplitProblem, flags: SplitFlags) -> SplitPlan:
    if problem.virtual_nodes is None:
        raise ProblemError("--objective waste needs maxP", hint="add --virtual-nodes maxP")
    if flags.method != "exact":
        raise ProblemError("--objective waste has one method", hint="leave --method out")
    from ..solvers import est_mapping

    return est_mapping.solve(problem, top=flags.top)


def _with_origin(plan: SplitPlan, question: Question) -> SplitPlan:
    """Add what a launch needs of emulated devices, and where the plan came from."""
    used = {group.device_type for group in plan.groups}
    emulated = tuple(
        EmulatedDevice(
            device_type=profile.device_type,
            base_device_type=profile.emulation.base_device_type,
            speed=profile.emulation.speed,
            passes=tuple(
                PassTime(batch_size=point.batch_size, step_seconds=point.step_seconds)
                for point in profile.batch_curve
            ),
        )
        for profile in question.profiles
        if profile.emulation is not None and profile.device_type in used
    )
    origin = {**(plan.provenance or {}), "pool": question.pool_name}
    return dataclasses.replace(plan, emulated=emulated, provenance=origin)

"""Another plan for a running job, of the same virtual nodes or microbatches."""

from dataclasses import replace
from typing import cast

from ..schema.errors import ProblemError
from ..schema.launch import LaunchConfig
from ..schema.pipeline import PipelinePlan
from ..schema.plan import SplitPlan
from ..schema.schedule_traits import is_planned
from .inputs import Pool, Profiles, name_of, pool_of, profiles_of, under_todays_names
from .request import PipelineOptions, SolveRequest, SplitOptions
from .solve import solve


def split_again(now: LaunchConfig, profiles: Profiles, pool: Pool) -> SplitPlan | PipelinePlan:
    """The best split of a job's equal virtual nodes over other devices, by the profiles.

    Args:
        now: The running launch.
        profiles: Profiles of its model, or their folder.
        pool: All devices from now on.

    Raises:
        ProblemError: The job's virtual nodes differ in size.
        InfeasibleError: They do not fit these devices.
    """
    sizes = _batch_sizes(now)
    if len(set(sizes)) > 1:
        raise ProblemError(
            "the job's virtual nodes differ in size, so a new plan would change them",
            hint="leave --profiles out: they are spread in proportion",
        )
    options = SplitOptions(virtual_nodes=len(sizes), interpolate=True)
    asked = replace(_request(now, profiles, pool), strategy="split", split=options)
    return cast(SplitPlan | PipelinePlan, solve(replace(asked, optimizer=now.optimizer)))


def cut_again(
    now: LaunchConfig, before: PipelinePlan, profiles: Profiles, pool: Pool
) -> SplitPlan | PipelinePlan:
    """The best cut for the same schedule, microbatches, links and optimizer, by the profiles.

    Args:
        now: The running launch of a pipeline.
        before: The plan that it started with.
        profiles: Profiles of its model, or their folder.
        pool: All devices from now on.

    Raises:
        ProblemError: The schedule is one that no solver plans.
        InfeasibleError: No cut fits these devices.
    """
    if now.pipeline is None:
        raise ProblemError("only pipelines are cut again, this run has a split plan")
    name = now.pipeline.schedule
    if not is_planned(name):
        raise ProblemError(
            f"{name} is no schedule that `hetflow solve` plans", hint="give --plan FILE"
        )
    options = PipelineOptions(
        schedule=name,
        microbatch_size=_batch_sizes(now)[0],
        link_bytes_per_second=before.link_bytes_per_second,
    )
    asked = replace(_request(now, profiles, pool), strategy="pipeline", pipeline=options)
    return cast(SplitPlan | PipelinePlan, solve(replace(asked, optimizer=before.optimizer)))


def seconds_a_sample(now: LaunchConfig, plan: SplitPlan) -> dict[str, float]:
    """What a run's plan knows of the speed of each device type [type -> seconds].

    Args:
        now: The running launch; of emulated types it holds the measured times.
        plan: The plan that it started with.
    """
    found: dict[str, float] = {}
    largest = max(_batch_sizes(now))
    for device in now.emulated:
        nearest = min(device.passes, key=lambda p: abs(p.batch_size - largest))
        found[device.device_type] = nearest.step_seconds / nearest.batch_size
    for group in plan.groups:
        if group.pass_seconds:
            found[group.device_type] = group.pass_seconds / group.virtual_node_batch_size
    return found


def _request(now: LaunchConfig, profiles: Profiles, pool: Pool) -> SolveRequest:
    """The launch's own model and batch, on other devices."""
    devices = pool_of(pool)
    return SolveRequest(
        profiles=under_todays_names(profiles_of(profiles, now.model), devices.num_devices),
        pool=devices,
        pool_name=name_of(pool),
        batch_size=now.global_batch_size,
    )


def _batch_sizes(config: LaunchConfig) -> list[int]:
    """Samples of each virtual node or microbatch, by index."""
    nodes = [node for slot in config.workers for node in slot.virtual_nodes]
    return [node.batch_size for node in sorted(nodes, key=lambda node: node.index)]

"""Plan other devices for a running job, keeping its virtual nodes or microbatches."""

from dataclasses import replace

from ..schema.errors import ProblemError
from ..schema.launch import LaunchConfig
from ..schema.options import option
from ..schema.plan import Plan
from ..schema.profile import asked_bytes
from ..schema.requests.kinds import Pool, Profiles
from ..schema.requests.solve import SolveRequest
from ..schema.schedule import is_planned
from .request import question_of
from .solve import solve


def split_again(now: LaunchConfig, before: Plan, profiles: Profiles, pool: Pool) -> Plan:
    """Find the best split of a job's equal virtual nodes over other devices.

    Raises:
        ProblemError: The job's virtual nodes differ in size.
        InfeasibleError: The virtual nodes do not fit these devices.
    """
    sizes = _batch_sizes(now)
    if len(set(sizes)) > 1:
        raise ProblemError(
            "the job's virtual nodes differ in size, so a new plan would change them",
            hint=f"leave {option('profiles')} out: they are spread in proportion",
        )
    asked = replace(
        _request(now, before, profiles, pool),
        strategy="split",
        optimizer=now.optimizer,
        virtual_nodes=len(sizes),
        interpolate=now.shard is None,
        shard=now.shard or "none",
    )
    return solve(question_of(asked))


def cut_again(now: LaunchConfig, before: Plan, profiles: Profiles, pool: Pool) -> Plan:
    """Find the best pipeline plan with the same schedule, microbatches, links and optimizer.

    Raises:
        ProblemError: No solver plans the schedule.
        InfeasibleError: No plan fits these devices.
    """
    if now.pipeline is None:
        raise ProblemError("only pipelines are cut again, this run has a split plan")
    name = now.pipeline.schedule
    if not is_planned(name):
        raise ProblemError(
            f"{name} is no schedule that `hetflow solve` plans",
            hint=f"give {option('plan', 'FILE')}",
        )
    asked = replace(
        _request(now, before, profiles, pool),
        strategy="pipeline",
        optimizer=before.optimizer,
        schedule=name,
        microbatch_size=_batch_sizes(now)[0],
        link_bytes_per_second=before.link_bytes_per_second,
    )
    return solve(question_of(asked))


def seconds_a_sample(now: LaunchConfig, plan: Plan) -> dict[str, float]:
    """Compute the seconds per sample of each device type from a run's plan.

    ``now`` gives the measured times of emulated types.

    Returns:
        Device type -> seconds per sample; types without known times are missing.
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


def _request(now: LaunchConfig, before: Plan, profiles: Profiles, pool: Pool) -> SolveRequest:
    """Request a plan for the launch's model and batch on other devices."""
    return SolveRequest(
        profiles,
        pool,
        model=now.model,
        batch_size=now.global_batch_size,
        memory_reserve_bytes=asked_bytes(before.reserves),
    )


def _batch_sizes(config: LaunchConfig) -> list[int]:
    """Samples of each virtual node or microbatch, by index."""
    nodes = [node for slot in config.workers for node in slot.virtual_nodes]
    return [node.batch_size for node in sorted(nodes, key=lambda node: node.index)]

"""``hetflow.rent.run``."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..clusters.scheduler.renting import (
    RECORD,
    Agent,
    RealFeed,
    RentedTraining,
    ReplayedFeed,
    machines_for,
    rents,
)
from ..clusters.simulator.renting import Adviser, replay
from ..schema import files
from ..schema.errors import FileError, ProblemError
from ..schema.market import RentRun
from ..schema.options import option
from ..schema.plan import Plan
from ..schema.requests.rent import RunRentRequest
from ..solvers.market.job import Held, Moment, RentJob
from ..solvers.market.odds import interval_seconds
from ..solvers.market.windows import Traces, windows_of
from .calls import takes
from .files import plan_of
from .rent import asked_job

_log = logging.getLogger("hetflow")
_FAR_OFF = 0.2  # of the work: the plan's own word for it differs by more


@takes(RunRentRequest)
def rent_run(request: RunRentRequest) -> RentRun:
    """Train on rented machines: the policy of the replays decides, real launches follow it.

    The market is a window of the past, replayed from now on, perhaps faster than it was. A machine
    that it takes away is announced, so that the training saves, or its launch is killed. Started
    again with the same folder, a run that was killed goes on.

    Returns:
        What was held and paid, beside what the same policy was predicted to pay.

    Raises:
        ProblemError: A number, a window, a policy or an engine's name cannot be used.
        InfeasibleError: The work cannot end in time on any machines.
        LaunchError: The training failed.
        FileError: A file is missing or has faults, or the folder has another run.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import Availability
        >>> there = Availability(zone="a", tick_seconds=60, available=(1,) * 60)
        >>> run = hetflow.rent.run(
        ...     "plan.json", "train.py", offers=[there], steps=2, folder="rented", time_scale=60,
        ...     work_seconds=60, deadline_seconds=3600, policies=["greedy"],
        ...     on_demand_dollars_per_hour=3, spot_dollars_per_hour=1,
        ... )
        >>> run.status, run.num_launches, run.held[0].zone
        ('done', 1, 'a')
    """
    job, traces, history = asked_job(request)
    plans, folder = _plans(request, job), Path(request.folder).resolve()
    most, zones = job.num_machines, traces[0].zones
    ((_, window), *_) = windows_of(traces[:1], job.num_ticks, None, most=most).windows
    engine, devices = machines_for(plans, request.engine)
    is_real = rents(engine)
    if is_real and request.time_scale != 1:
        raise ProblemError(f"{option('time_scale')} is for replays", hint="leave it out")
    notice_seconds = 0.0 if is_real else request.notice_seconds  # clouds' own do not come here
    step_seconds = job.work_seconds / request.steps
    _compare(plans[0], job, step_seconds / request.time_scale)
    fastest_seconds = step_seconds / job.speeds[-1]
    every = request.checkpoint_every or _interval(request, history or traces, fastest_seconds)
    # Without notice a loss repeats half an interval; the policy is ready for a whole one.
    lost_seconds = 0.0 if notice_seconds else every * fastest_seconds
    ready = replace(job, restart_seconds=job.restart_seconds + lost_seconds)
    usual = replace(job, restart_seconds=job.restart_seconds + lost_seconds / 2)
    adviser = Adviser(
        ready, zones, history=history, policies=request.policies or None, of_one_kind=is_real
    )
    policy = next(iter(adviser.policies))

    def decide(job: RentJob, now: Moment) -> Held:
        return adviser.policies[policy](ready, now)

    predicted = replay(usual, decide, *window)
    record = RentRun(
        status="running",
        policy=policy,
        work_seconds=job.work_seconds,
        deadline_seconds=job.deadline_seconds,
        restart_seconds=job.restart_seconds,
        num_steps=request.steps,
        checkpoint_every=every,
        time_scale=request.time_scale,
        started_seconds=time.time(),
        predicted_seconds=predicted.seconds,
        predicted_dollars=predicted.used_dollars,
        predicted_launches=predicted.num_launches,
    )
    record = _begun(folder, record)
    if record.status == "done":
        return record
    paths = tuple(folder / f"plan-{number}.json" for number in range(1, most + 1))
    for path, plan in zip(paths, plans, strict=True):
        files.write(path, plan, force=True)
    agent = Agent(
        training=RentedTraining(
            folder=folder,
            plans=paths,
            script=(str(request.script), *request.arguments),
            directory=Path.cwd(),
            notice_seconds=notice_seconds,
            save_seconds=request.save_seconds,
            grace_seconds=request.grace_seconds,
            move_dollars=job.leaving_dollars(0),
        ),
        engine=engine,
        devices=devices,
        feed=RealFeed(
            zones=zones,
            tick_seconds=job.tick_seconds,
            retry_seconds=request.retry_seconds,
            num_machines=most,
        )
        if is_real
        else ReplayedFeed(
            zones=zones,
            tick_seconds=job.tick_seconds,
            available=window.available,
            spot_dollars_per_hour=window.spot_dollars_per_hour,
        ),
        decide=adviser,
        num_ticks=job.num_ticks,
        tick_seconds=job.tick_seconds,
        record=record,
        speeds=job.speeds,
        tell=_log.info,
    )
    return agent.run()


def _plans(request: RunRentRequest, job: RentJob) -> list[Plan]:
    """The plans for 1, 2, ... machines."""
    plans = [plan_of(one) for one in (request.plan, *request.more_plans)]
    if len(plans) != job.num_machines:
        raise ProblemError(
            f"{len(plans)} plans for a job on up to {job.num_machines} machines",
            hint=f"give {option('num_machines')}, and {option('more_plans', 'FILE')} for 2 "
            "machines, for 3, and so on",
        )
    if job.rates:
        raise ProblemError(
            "a run's machines are alike", hint=f"leave {option('machine_speeds')} out"
        )
    return plans


def _begun(folder: Path, new: RentRun) -> RentRun:
    """The record of a folder that has one of this job; else the new one."""
    if not (folder / RECORD).exists():
        folder.mkdir(parents=True, exist_ok=True)
        return new
    old = files.read(folder / RECORD, RentRun)
    same = ("policy", "work_seconds", "deadline_seconds", "num_steps", "time_scale")
    for name in same:
        if getattr(old, name) != getattr(new, name):
            raise FileError(
                f"{folder}: has a run with {name} {getattr(old, name)}, not {getattr(new, name)}",
                hint="name another folder, or start the same run again to go on with it",
            )
    return old


def _interval(request: RunRentRequest, traces: Sequence[Traces], step_seconds: float) -> int:
    """Steps between checkpoints, by how long machines last; a tenth of the work if for ever."""
    ticks = [(zone, one.tick_seconds) for one in traces for zone in one.ticks]
    daly = interval_seconds(ticks, request.checkpoint_seconds)
    seconds = min(request.work_seconds / 10, daly or request.work_seconds)
    return max(1, round(seconds / step_seconds))


def _compare(plan: Plan, job: RentJob, asked_seconds: float) -> None:
    """Warn where the plan predicts another length of the work than was given."""
    step = plan.predicted.step_seconds
    if abs(step / asked_seconds - 1) > _FAR_OFF:
        hours = job.work_seconds / 3600
        _log.warning(
            "by the plan the work takes %.3g h, not %.3g h: dollars may differ from the prediction",
            hours * step / asked_seconds,
            hours,
        )

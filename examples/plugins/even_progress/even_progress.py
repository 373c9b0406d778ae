"""Max-min fairness over the part of its remaining steps that each job makes in a second."""

from hetflow.plugins import Instance, Judge, MaxMin, judge, policy


@policy(
    "even_progress",
    title="max-min fairness over the part of the remaining steps",
    sense="max",
    unit="1/s",
)
def goal(jobs: Instance) -> MaxMin:
    """Ask the same multiple of its steps of every job."""
    return MaxMin(level=jobs.steps)


# The same objective a second time, job by job, for `hetflow check`; without it the checker holds an
# allocation only to what every allocation must keep, and says so.
judge(
    "even_progress",
    Judge(level=lambda pool: {name: job.steps for name, job in pool.jobs.items()}),
    module=__name__,
)

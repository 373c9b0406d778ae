"""Max-min fairness over each job's progress per second, as a fraction of its remaining steps."""

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


# The same objective again, job by job, for `hetflow check`. Without it, the checker only verifies
# the rules that every allocation must keep, and says so.
judge(
    "even_progress",
    Judge(level=lambda pool: {name: job.steps for name, job in pool.jobs.items()}),
    module=__name__,
)

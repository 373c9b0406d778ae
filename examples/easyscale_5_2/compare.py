"""EasyScale's trace on 32 V100, 16 P100 and 16 T4 (5.2): paper beside ours.

    python examples/easyscale_5_2/compare.py [--seeds 3]

The paper withholds the trace (arrivals like Microsoft's, lengths from its own production), the GPU
type that each job requires under YARN-CS, and the models' speeds; README.md states what stands in
for them. Every choice is run and printed.
"""

import argparse
import itertools
import statistics
import sys
from dataclasses import dataclass

import numpy as np

from hetflow.clusters.mechanisms.easyscale import Variant
from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.clusters.simulator.events import ProposalOptions, simulate_proposals
from hetflow.clusters.simulator.metrics import summarise
from hetflow.papers.easyscale.schedulers import simulate_yarn
from hetflow.papers.easyscale.taking import take
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs

DEVICES = {"V100": 32, "P100": 16, "T4": 16}
SPEEDS = {"even": (1.0, 0.5, 0.4), "steep": (1.0, 0.3, 0.25)}
NEEDS, SHARES = (1, 2, 4, 8, 16), (0.5, 0.1, 0.15, 0.15, 0.1)
LOADS = (10.0, 20.0, 40.0, 80.0)
NUMBER = 200


@dataclass(frozen=True)
class Choice:
    """Inputs that the paper withholds, and interpretations of its text.

    Attributes:
        speeds: Which of the assumed speeds of the models to use.
        lengths: (low, high) of x; a job lasts 10^x minutes on the type that it requires.
        required: The type that jobs require: "any", "V100", or "by pool" (random, in proportion to
            the pool).
        keeps: Whether homogeneous EasyScale also keeps jobs on that type.
        takes: Whether jobs take devices from each other.
    """

    speeds: str = "even"
    lengths: tuple[float, float] = (0.0, 3.0)
    required: str = "by pool"
    keeps: bool = True
    takes: bool = False


CHOICES = {
    "as the text has it": Choice(),
    "jobs take devices from each other": Choice(takes=True),
    "homogeneous jobs choose their type": Choice(keeps=False),
    "lengths of 3 to 300 min": Choice(lengths=(0.5, 2.5)),
    "steeper speeds": Choice(speeds="steep"),
    "all jobs require V100": Choice(required="V100", keeps=False),
    "jobs require no type": Choice(required="any", keeps=False),
}


def table(speeds: tuple[float, ...], *, bound: bool) -> Throughputs:
    """A model for each required type; where ``bound``, it runs on that type only."""
    rates = dict(zip(DEVICES, speeds, strict=True))
    models = []
    for need, required in itertools.product(NEEDS, ("any", *DEVICES)):
        only = {required: rates[required]} if bound and required != "any" else rates
        models.append(ModelThroughput(model=required, scale_factor=need, steps_per_second=only))
    return Throughputs(models=tuple(models))


def draw(seed: int, jobs_per_hour: float, choice: Choice) -> list[Job]:
    """Draw jobs with Poisson arrivals; the model's name is the required type."""
    random, now, jobs = np.random.default_rng(seed), 0.0, []
    rates = dict(zip(DEVICES, SPEEDS[choice.speeds], strict=True))
    total = sum(DEVICES.values())
    for index in range(NUMBER):
        now += float(random.exponential(3600.0 / jobs_per_hour))
        need = int(random.choice(NEEDS, p=SHARES))
        minutes = 10 ** float(random.uniform(*choice.lengths))
        drawn = str(random.choice(list(DEVICES), p=[n / total for n in DEVICES.values()]))
        required = drawn if choice.required == "by pool" else choice.required
        rate = rates.get(required, 1.0)
        jobs.append(
            Job(id=str(index), model=required, steps=60.0 * minutes * rate, scale_factor=need,
                arrival_seconds=now)
        )  # fmt: skip
    return jobs


def ratios(jobs: list[Job], choice: Choice) -> tuple[float, ...]:
    """JCT and makespan of YARN-CS over both EasyScales'; then YARN-CS's utilisation in percent."""
    speeds = SPEEDS[choice.speeds]
    bound = ClusterPool(throughputs=table(speeds, bound=True), num_devices=DEVICES)
    free = ClusterPool(throughputs=table(speeds, bound=False), num_devices=DEVICES)
    yarn = summarise(simulate_yarn(jobs, bound))
    trade = take if choice.takes else None
    homogeneous = ProposalOptions(variant=Variant(mixes=False, trade=trade))
    same = summarise(simulate_proposals(jobs, bound if choice.keeps else free, homogeneous))
    heterogeneous = ProposalOptions(variant=Variant(trade=trade))
    mixed = summarise(simulate_proposals(jobs, free, heterogeneous))
    return (
        yarn.average_jct_seconds / same.average_jct_seconds,
        yarn.makespan_seconds / same.makespan_seconds,
        yarn.average_jct_seconds / mixed.average_jct_seconds,
        yarn.makespan_seconds / mixed.makespan_seconds,
        100 * yarn.utilisation,
    )


def main() -> None:
    """Print JCT and makespan relative to YARN-CS, for each choice and load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    sys.stdout.write(
        "paper: homogeneous JCT 8.3x, makespan 2.5x; heterogeneous JCT 13.2x, makespan 2.8x\n"
    )
    for name, choice in CHOICES.items():
        sys.stdout.write(f"{name}\n")
        for load in LOADS:
            rows = [ratios(draw(seed, load, choice), choice) for seed in range(seeds)]
            middle = [statistics.median(column) for column in zip(*rows, strict=True)]
            sys.stdout.write(
                f"  {load:4g} jobs/h: homogeneous JCT {middle[0]:5.2f}x, makespan "
                f"{middle[1]:.2f}x; heterogeneous JCT {middle[2]:5.2f}x, makespan "
                f"{middle[3]:.2f}x; YARN-CS {middle[4]:.0f} % busy\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()

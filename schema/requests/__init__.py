"""What a user may ask for: one record a verb, from which both doors are made."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from itertools import chain

from ..options import Option, asked_of

# The options of several verbs.
POLICIES = Option(
    names="policies",
    metavar="NAME",
    help="las, las_weighted, las_water_filling, hierarchical, makespan, makespan_budget, "
    "finish_time_fairness, fifo, static_priority, sjf, max_throughput, max_normalised_throughput, "
    "min_cost, min_cost_slo, min_cost_ratio, min_cost_ratio_slo, min_cost_per_job, "
    "min_cost_per_job_slo, min_dollars_slo or a plug-in's.",
)
POOL = Option(
    help="The pool: 2xV100,8xP100, V100:2:16GB, 4x(4xV100).",
    python='Also ``{"V100": 2, "P100": 8}``, a ``Cluster``, or the ``Path`` of a cluster\'s file.',
)
MARKET = Option(
    rare=True,
    help="Prices of the devices, in any form that `hetflow rent` takes (may be repeated); the "
    "cheapest of each type counts.",
    python="Also ``Market`` records.",
)
AT = Option(
    rare=True,
    help="Time of those prices, as 2020-03-07T00:00:00Z.",
    default="the market's last prices",
)
RATES = Option(
    flag="--rate",
    help="With {sacct}: a type's relative speed, v100=3.5; may be repeated.",
    default="a job runs only on the type that it ran on",
)
CHECKPOINT_EVERY = Option(help="Steps between checkpoints [0: at SIGTERM and the end].")
SCRIPT = Option(argument=True, help="The training script: file.py, or -m MODULE.")
ARGUMENTS = Option(argument=True, help="The script's own arguments, passed on untouched.")

_ROOMS = ("solve", "simulate", "rent", "launch", "profile", "files", "cluster")


def flag_of(name: str, value: str | bool | None = None, first: type | None = None) -> str:
    """Spell an option as a flag.

    Args:
        name: The field of a request record.
        value: Its value, if it shall be named too.
        first: The record whose flag counts before those of others.
    """
    flag = _known_flag(name, first)
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return flag if value is None else f"{flag} {value}"


def _known_flag(name: str, first: type | None) -> str:
    # Other rooms take a while to import, so they are asked only for what this record does not have.
    for record in chain([] if first is None else [first], _all_requests()):
        for asked in asked_of(record):
            if asked.name == name:
                return "--gpus" if name == "pool" else asked.option.flag_of(name)
    return "--" + name.replace("_", "-")


def _all_requests() -> Iterator[type]:
    for room in _ROOMS:
        for name, found in vars(import_module(f".{room}", __package__)).items():
            if name.endswith("Request") and is_dataclass(found):
                yield found  # type: ignore[misc]

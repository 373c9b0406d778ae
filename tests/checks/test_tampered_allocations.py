"""The judge refuses an allocation of which one number was changed, under every kind of policy."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

import hetflow
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import HetflowError
from hetflow.schema.files import from_json, to_json
from hetflow.schema.jobs import Allocation, Job, Jobs, ModelThroughput, Throughputs

JOBS = Jobs(jobs=tuple(Job(id=f"j{i}", model=f"m{i % 4}", steps=1e3 * (i + 1)) for i in range(6)))
RATES = Throughputs(
    models=tuple(
        ModelThroughput(
            model=f"m{i}", steps_per_second={"V100": 4.0 + i, "P100": 1.0 + 2 * (i % 2)}
        )
        for i in range(4)
    )
)
PRICES = {"V100": 3.0, "P100": 1.0}
PARSED = Cluster.parse("2xV100,2xP100")
POOL = replace(
    PARSED,
    device_types={
        name: replace(kind, dollars_per_hour=PRICES[name])
        for name, kind in PARSED.device_types.items()
    },
)
NOISE = 1e-6  # the judge's tolerance: a change of less is none


@pytest.mark.parametrize(
    "policy",
    ["las", "las_water_filling", "makespan", "finish_time_fairness", "max_throughput",
     "min_cost_ratio", "min_cost", "fifo"],
)  # fmt: skip
def test_numbers_of_allocations_are_judged(policy: str) -> None:
    allocation = hetflow.allocate(JOBS, RATES, POOL, policy=policy)
    assert faults(allocation) == []
    plain = json.loads(to_json(allocation))
    changes = list(changed(plain))
    assert len(changes) > 15
    accepted = []
    for path, other in changes:
        try:
            tampered = from_json(json.dumps(other), Allocation)
        except HetflowError:
            continue  # refused when it is read
        if not faults(tampered):
            accepted.append(path)
    assert accepted == []


def faults(allocation: Allocation) -> list[str]:
    """What the judge says."""
    return hetflow.check(allocation, jobs=JOBS, throughputs=RATES, pool=POOL)


def changed(plain: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the document with one number a little more or less, and where that is.

    Prices of resources are left out: others may prove the same optimum as well.
    """
    for path, value in numbers(plain):
        if "resource_prices" in path or 0 < abs(value) < NOISE:
            continue
        for other in (value * 1.05 + (0.02 if value == 0 else 0.0), value * 0.9):
            if other != value:
                copy = deepcopy(plain)
                inner: Any = copy
                for step in path[:-1]:
                    inner = inner[step]
                inner[path[-1]] = other
                yield path, copy


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Yield every number in a document with its path."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(each, (*path, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from numbers(each, (*path, number))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)

"""Plans of the older form, ``hetflow.plan/1``, which had three kinds, each with fields of its own.

Only the form is changed. What is unknown or has the wrong type is handed on as it is, so that the
record refuses it.
"""

from collections.abc import Iterator
from typing import Any

from .errors import ProblemError
from .schedule_traits import traits

Fields = dict[str, Any]

_OF_REPLICAS = ("num_replicas", "device_type", "first_device", "devices", "memory_bytes")


def converted(plan: Fields) -> Fields:
    """Return a plan of the older form, as its file has it, in the newer one."""
    found = {key: value for key, value in plan.items() if key != "kind"}
    found["schema"] = "hetflow.plan/2"
    if found.get("objective") == "step":
        found["objective"] = "step_seconds"
    try:
        return KINDS[plan["kind"]](found)
    except (
        TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, ProblemError
    ):  # fmt: skip
        return found  # not as that form has it: the record says what it misses


def _split(plan: Fields) -> Fields:
    found = {**plan, **_whole_model(plan["groups"])}
    del found["groups"]
    others = [{**other, **_whole_model(other["groups"])} for other in plan.get("alternatives", ())]
    found["alternatives"] = [_without(other, "groups") for other in others]
    return found


def _whole_model(groups: list[Fields]) -> Fields:
    replicas = []
    for group in groups:
        replicas.append(
            {
                **_without(group, "num_devices", "device_batch_size"),
                "num_replicas": group["num_devices"],
                "samples": group["num_devices"] * group["device_batch_size"],
            }
        )
    return {
        "stages": [{"replicas": replicas}],
        "microbatch_size": max(each["virtual_node_batch_size"] for each in replicas),
        "num_microbatches": sum(each["num_replicas"] * each["virtual_nodes"] for each in replicas),
    }


def _pipeline(plan: Fields) -> Fields:
    number, size = plan["microbatches"], plan["microbatch_size"]
    held = [(stage["device_type"], stage["first_device"]) for stage in plan["stages"]]
    found = _without(plan, "microbatches", "recompute")
    found["num_microbatches"] = number
    if traits(plan["schedule"]).is_chunked:
        found["num_model_chunks"] = held.count(held[0])
    found["stages"] = [
        {
            **_without(stage, *_OF_REPLICAS),
            "recompute": "full" if plan["recompute"] else "none",
            "replicas": [
                {
                    **{key: stage[key] for key in _OF_REPLICAS if key in stage},
                    "samples": plan["global_batch_size"],
                    "virtual_nodes": -(-number // stage["num_replicas"]),
                    "virtual_node_batch_size": size,
                }
            ],
        }
        for stage in plan["stages"]
    ]
    found.setdefault("objective", "bottleneck")
    found.setdefault("workers", "at_most")
    return found


def _parallel(plan: Fields) -> Fields:
    found = _with_passes(plan, plan["global_batch_size"])
    found["alternatives"] = [
        _with_passes(other, plan["global_batch_size"]) for other in plan.get("alternatives", ())
    ]
    return found


def _with_passes(plan: Fields, batch: int) -> Fields:
    """Return a plan or an alternative whose replicas state their passes and their memory."""
    number, size = plan["num_microbatches"], plan["microbatch_size"]
    passes = {"virtual_nodes": number, "virtual_node_batch_size": size}
    fullest = plan["predicted"]["memory_bytes"]
    return {
        **plan,
        "predicted": _without(plan["predicted"], "memory_bytes"),
        "num_microbatches": -(-batch // size),
        "stages": [
            {**stage, "replicas": list(_replicas(stage["replicas"], passes, fullest.get(str(n))))}
            for n, stage in enumerate(plan["stages"])
        ],
    }


def _replicas(groups: list[Fields], passes: Fields, fullest: int | None) -> Iterator[Fields]:
    for group in groups:
        known = {"memory_bytes": fullest} if fullest is not None and len(groups) == 1 else {}
        yield {**known, **group, **passes}


def _without(fields: Fields, *names: str) -> Fields:
    return {key: value for key, value in fields.items() if key not in names}


KINDS = {"split": _split, "pipeline": _pipeline, "parallel": _parallel}

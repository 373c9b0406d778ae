"""A timed pipeline schedule as a trace that Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterator
from typing import Any

from ...planning.schedules.text import pass_name
from ...planning.schedules.timing import Span, Timing
from ...schema.operations import DIFFERENTIATING, PASSES, SENDS, Kind, Operation, message_of

_MICROSECONDS = 1_000_000
_COLOURS = {
    Kind.FORWARD: "rail_response",
    Kind.BACKWARD: "good",
    Kind.BACKWARD_INPUT: "good",
    Kind.BACKWARD_WEIGHT: "bad",
}
Event = dict[str, Any]


def trace_json(timing: Timing) -> str:
    """Write the trace-event JSON of a schedule.

    Each rank has one track for passes, reductions and updates, and one for sends where they take
    time. An arrow leads from each pass to the pass on another rank that uses its result.
    """
    events: list[Event] = [_named("process_name", timing.schedule.name, 0)]
    for rank in range(timing.schedule.num_ranks):
        events.append(_named("thread_name", f"rank {rank}", 2 * rank))
        events += _slices(timing, rank)
    events += _arrows(timing)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, name: str, track: int) -> Event:
    return {"name": what, "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}


def _slices(timing: Timing, rank: int) -> Iterator[Event]:
    named = False
    for operation, span in zip(timing.schedule.ranks[rank], timing.spans[rank], strict=True):
        shown = operation.kind in PASSES or span[1] > span[0]
        if operation.kind in SENDS and shown:
            if not named:
                yield _named("thread_name", f"rank {rank} sends", 2 * rank + 1)
                named = True
            yield _slice(operation, span, 2 * rank + 1)
        elif operation.peer is None and shown:
            yield _slice(operation, span, 2 * rank)


def _slice(operation: Operation, span: Span, track: int) -> Event:
    short = operation.kind in PASSES
    name = pass_name(operation.kind, operation.microbatch) if short else str(operation.kind)
    event: Event = {
        "name": name,
        "cat": str(operation.kind),
        "ph": "X",
        "pid": 0,
        "tid": track,
        "ts": float(span[0] * _MICROSECONDS),
        "dur": float((span[1] - span[0]) * _MICROSECONDS),
        "args": {
            "stage": operation.stage,
            "microbatch": operation.microbatch,
            "weight_version": operation.weight_version,
            "peer": operation.peer,
        },
    }
    if operation.kind in _COLOURS:
        event["cname"] = _COLOURS[operation.kind]
    return event


def _arrows(timing: Timing) -> Iterator[Event]:
    """Arrows from the middle of the pass that makes a message to the start of the one using it."""
    passes: dict[tuple[bool, int, int], tuple[int, Span]] = {}
    for rank, operations in enumerate(timing.schedule.ranks):
        for operation, span in zip(operations, timing.spans[rank], strict=True):
            if operation.kind is Kind.FORWARD or operation.kind in DIFFERENTIATING:
                forward = operation.kind is Kind.FORWARD
                passes[forward, operation.stage, operation.microbatch] = (rank, span)
    number = 0
    for rank, operations in enumerate(timing.schedule.ranks):
        for operation in operations:
            if operation.kind not in SENDS:
                continue
            activation, lower, microbatch, _, _ = message_of(operation, rank)
            made = passes[activation, lower + (not activation), microbatch][1]
            used_on, used = passes[activation, lower + activation, microbatch]
            common = {"name": str(operation.kind), "cat": "transfer", "id": number, "pid": 0}
            middle = float((made[0] + made[1]) / 2 * _MICROSECONDS)
            yield {**common, "ph": "s", "tid": 2 * rank, "ts": middle}
            at = float(used[0] * _MICROSECONDS)
            yield {**common, "ph": "f", "bp": "e", "tid": 2 * used_on, "ts": at}
            number += 1

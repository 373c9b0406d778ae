"""Draw a timed pipeline schedule: for the terminal, as SVG, as one HTML file, or as papers note it.

There is one row per rank, and time goes to the right, as in the papers' figures. Forward passes,
backward passes and weight gradients differ in fill and colour. The number in a bar is the
microbatch (from 0); a letter after it is the model chunk, where a rank holds several.
"""

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10
from typing import Any

from ...planning.schedules.assemble import Pass, PassOrder, assemble
from ...planning.schedules.counting import peak_weight_versions
from ...planning.schedules.timing import Span, Timing
from ...schema.errors import ProblemError
from ...schema.schedule import (
    DIFFERENTIATING,
    PASSES,
    SENDS,
    Kind,
    Operation,
    Placement,
    Schedule,
    message_of,
)
from .grid import most_characters

_FILLS = {
    Kind.FORWARD: "-",
    Kind.BACKWARD: "=",
    Kind.BACKWARD_INPUT: "=",
    Kind.BACKWARD_WEIGHT: "~",
    Kind.UPDATE: "#",
}
_COLOURS = {
    Kind.FORWARD: "#9ec5fe",
    Kind.BACKWARD: "#a3cfbb",
    Kind.BACKWARD_INPUT: "#a3cfbb",
    Kind.BACKWARD_WEIGHT: "#ffe69c",
    Kind.UPDATE: "#e2a6d0",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "gradient of the input",
    Kind.BACKWARD_WEIGHT: "gradient of the weights",
    Kind.UPDATE: "update",
}
_IDLE = "#eeeeee"
_LEGEND = "- forward  = backward  ~ weight gradient  # update  . idle"
_ROW, _BAR, _LEFT, _TOP = 28, 22, 90, 58
_MOST_NUMBERS = 12

Bar = tuple[Operation, Span]


def terminal_timeline(timing: Timing, *, width: int | None = None) -> str:
    """Draw a schedule in plain characters.

    Args:
        timing: The timed schedule.
        width: Largest number of characters for the time axis; None fits lines to the terminal, as
            tables are, or takes 120. A number that does not fit into its bar is left out.
    """
    heads = [f"rank {rank}" for rank in range(timing.schedule.num_ranks)]
    most = most_characters()
    if width is None:
        width = 120 if most is None else max(20, most - len(heads[-1]) - len(" || 100%"))
    scale = _characters_per_second(timing, width)
    rows = [
        f"{head:>{len(heads[-1])}} |{_row(timing, rank, scale)}| {timing.utilisation[rank]:4.0%}"
        for rank, head in enumerate(heads)
    ]
    return "\n".join([*rows, _LEGEND, summary(timing)])


def summary(timing: Timing) -> str:
    """The schedule's figures in one line."""
    return (
        f"{timing.schedule.name}: {timing.schedule.num_microbatches} microbatches in "
        f"{timing.makespan_seconds:.6g} s, bubble {timing.bubble_fraction:.1%} of ideal time, "
        f"activations held {_of_ranks(timing.peak_in_flight)}, weight versions "
        f"{_of_ranks(peak_weight_versions(timing.schedule))}"
    )


def svg_timeline(timing: Timing, *, width: int = 1200) -> str:
    """Draw a schedule as a complete SVG document, ``width`` pixels wide."""
    scale = (width - _LEFT - 20) / (timing.makespan_seconds or 1)
    height = _TOP + _ROW * timing.schedule.num_ranks + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{escape(summary(timing))}</text>',
        *_svg_legend(timing),
    ]
    for rank in range(timing.schedule.num_ranks):
        top = _TOP + rank * _ROW
        parts.append(f'<text x="8" y="{top + 15}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{timing.makespan_seconds * scale:.2f}" '
            f'height="{_BAR}" fill="{_IDLE}"/>'
        )
        parts += [_svg_bar(timing, rank, bar, scale, top) for bar in _bars(timing, rank)]
    parts += _svg_axis(timing, scale, height)
    return "\n".join([*parts, "</svg>"])


def html_timeline(timing: Timing, *, title: str | None = None) -> str:
    """Draw a schedule as one HTML file that needs no other files."""
    name = escape(title or timing.schedule.name)
    rows = "\n".join(_html_row(timing, rank) for rank in range(timing.schedule.num_ranks))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{name}</title>
<style>
body {{ font-family: sans-serif; margin: 2em; }}
td, th {{ padding: 0.2em 1em; text-align: right; }}
.timeline svg {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{name}</h1>
<div class="timeline">
{svg_timeline(timing)}
</div>
<table>
<tr><th>rank</th><th>stages</th><th>busy (s)</th><th>idle (s)</th><th>utilisation</th>
<th>bubble on own span</th><th>activations held</th></tr>
{rows}
</table>
</body>
</html>
"""


def bar_label(timing: Timing, rank: int, operation: Operation) -> str:
    """The label of a bar: the microbatch, and the chunk where the rank holds several."""
    stages = timing.schedule.stages_of_rank[rank]
    chunk = chr(ord("a") + stages.index(operation.stage) % 26) if len(stages) > 1 else ""
    return "" if operation.kind is Kind.UPDATE else f"{operation.microbatch}{chunk}"


def _bars(timing: Timing, rank: int) -> Iterator[Bar]:
    operations, spans = timing.schedule.ranks[rank], timing.spans[rank]
    for operation, (start, end) in zip(operations, spans, strict=True):
        if operation.kind in _FILLS and end > start:
            yield operation, (start, end)


def _characters_per_second(timing: Timing, width: int) -> float:
    """Characters per second: a whole number of characters for the shortest pass and its label."""
    bars = [(r, bar) for r in range(timing.schedule.num_ranks) for bar in _bars(timing, r)]
    if not bars:
        return 1.0
    shortest = min(end - start for _, (_, (start, end)) in bars)
    label = max(len(bar_label(timing, rank, operation)) for rank, (operation, _) in bars)
    fitting = width * shortest / timing.makespan_seconds
    return min(label + 1, int(fitting) or fitting) / shortest


def _row(timing: Timing, rank: int, scale: float) -> str:
    text, at = "", 0
    for operation, (start, end) in _bars(timing, rank):
        first, last = round(start * scale), round(end * scale)
        label = bar_label(timing, rank, operation)
        if len(label) > last - first:
            label = ""
        text += "." * (first - at) + label.ljust(last - first, _FILLS[operation.kind])
        at = last
    return text + "." * (round(timing.makespan_seconds * scale) - at)


def _svg_bar(timing: Timing, rank: int, bar: Bar, scale: float, top: int) -> str:
    operation, (start, end) = bar
    left, long = _LEFT + start * scale, (end - start) * scale
    label = bar_label(timing, rank, operation)
    shown = label if long > 7 * len(label) + 2 else ""
    version = "writes" if operation.kind is Kind.UPDATE else "reads"
    tip = (
        f"{operation.kind} of stage {operation.stage}, microbatch {operation.microbatch}; "
        f"{start:.6g} to {end:.6g} s; {version} weight version {operation.weight_version}"
    )
    return (
        f'<g><title>{escape(tip)}</title><rect x="{left:.2f}" y="{top}" width="{long:.2f}" '
        f'height="{_BAR}" fill="{_COLOURS[operation.kind]}" stroke="#666666" '
        f'stroke-width="0.5"/><text x="{left + long / 2:.2f}" y="{top + 15}" '
        f'text-anchor="middle">{escape(shown)}</text></g>'
    )


def _svg_legend(timing: Timing) -> Iterator[str]:
    """A square of each colour that the picture has, with its name."""
    ranks = range(timing.schedule.num_ranks)
    drawn = {operation.kind for rank in ranks for operation, _ in _bars(timing, rank)}
    shown = [(_COLOURS[kind], _NAMES[kind]) for kind in _COLOURS if kind in drawn]
    x = _LEFT
    for colour, name in [*shown, (_IDLE, "idle")]:
        yield (
            f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}" stroke="#666666" '
            f'stroke-width="0.5"/><text x="{x + 17}" y="40">{name}</text>'
        )
        x += 40 + 6 * len(name)


def _round_ticks(seconds: float) -> Iterator[float]:
    """Times at multiples of 1, 2 or 5 times a power of ten: at most ten of them."""
    least = seconds / 8 or 1.0
    power = 10.0 ** floor(log10(least))
    apart = next(power * n for n in (1, 2, 5, 10) if power * n >= least)
    yield from (number * apart for number in range(int(seconds / apart * (1 + 1e-9)) + 1))


def _svg_axis(timing: Timing, scale: float, height: int) -> Iterator[str]:
    for seconds in _round_ticks(timing.makespan_seconds):
        x = _LEFT + seconds * scale
        yield (
            f'<line x1="{x:.2f}" y1="{_TOP - 4}" x2="{x:.2f}" y2="{height - 30}" '
            f'stroke="#cccccc" stroke-width="0.5"/>'
            f'<text x="{x:.2f}" y="{height - 14}" text-anchor="middle">{seconds:.4g} s</text>'
        )


def _html_row(timing: Timing, rank: int) -> str:
    cells = (
        rank,
        _numbers(timing.schedule.stages_of_rank[rank]),
        f"{timing.busy_seconds[rank]:.6g}",
        f"{timing.idle_seconds[rank]:.6g}",
        f"{timing.utilisation[rank]:.1%}",
        f"{timing.span_bubble_fractions[rank]:.1%}",
        timing.peak_in_flight[rank],
    )
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def _of_ranks(values: tuple[int, ...]) -> str:
    """A number of each rank, or the least and the most of many ranks."""
    if len(values) <= _MOST_NUMBERS:
        return _numbers(values)
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def _numbers(values: tuple[int, ...]) -> str:
    return "-".join(map(str, values))


_MICROSECONDS = 1_000_000
_TRACE_COLOURS = {
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
    if operation.kind in _TRACE_COLOURS:
        event["cname"] = _TRACE_COLOURS[operation.kind]
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


# Schedules in the papers' notation: one line per rank, ``F0 F1 BW0 ...``.
#
# ``F`` is a forward pass, ``BW`` a whole backward pass, ``B`` and ``W`` its two parts: the gradient
# of the input and that of the weights. The number is the microbatch; ``.s`` is the stage, if a rank
# holds several. ``F3&BW1`` are two passes that overlap.


_LETTERS = {
    "F": Kind.FORWARD,
    "BW": Kind.BACKWARD,
    "B": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
}
_SHORT = {kind: letters for letters, kind in _LETTERS.items()}
_PASS = re.compile(r"(F|BW|B|W)(\d+)(?:\.(\d+))?")


def pass_name(kind: Kind, microbatch: int, stage: int | None = None) -> str:
    """Return the name of a pass in this notation: ``BW3`` or ``BW3.5``."""
    return f"{_SHORT[kind]}{microbatch}" + ("" if stage is None else f".{stage}")


def to_text(schedule: Schedule) -> tuple[str, ...]:
    """[ranks] the passes of a schedule in this notation; overlapped pairs are joined by &."""
    lines = []
    for operations, stages in zip(schedule.ranks, schedule.stages_of_rank, strict=True):
        words: list[str] = []
        for at, operation in enumerate(operations):
            if operation.kind not in PASSES:
                continue
            stage = operation.stage if len(stages) > 1 else None
            word = pass_name(operation.kind, operation.microbatch, stage)
            if is_overlapped(operations, at):
                words[-1] += f"&{word}"
            else:
                words.append(word)
        lines.append(" ".join(words))
    return tuple(lines)


def is_overlapped(operations: Sequence[Operation], at: int) -> bool:
    """Whether a pass forms an overlapped pair with the pass right before it."""
    # It does if its gradient is received before the other pass starts, or if the other's result is
    # sent only after it.
    if at == 0:
        return False
    before, operation = operations[at - 1], operations[at]
    if before.kind is not Kind.FORWARD or operation.kind is not Kind.BACKWARD:
        return False
    needs = (Kind.RECEIVE_GRADIENT, operation.stage, operation.microbatch)
    makes = (Kind.SEND_ACTIVATION, before.stage, before.microbatch)
    ahead = [(op.kind, op.stage, op.microbatch) for op in operations[max(0, at - 3) : at]]
    behind = [(op.kind, op.stage, op.microbatch) for op in operations[at + 1 : at + 3]]
    return needs in ahead or makes in behind


def from_text(
    name: str, lines: Sequence[str], *, placement: Placement, num_microbatches: int
) -> Schedule:
    """Parse a schedule with one flush from this notation.

    The result is not validated (`checks.schedule.validate` does), and has no bounds on memory.

    Args:
        name: Name of the new schedule.
        lines: [ranks] the passes of each rank.
        placement: [stages] the ranks that hold each stage.
        num_microbatches: Number of microbatches.

    Raises:
        ProblemError: A word is not a pass, or lacks its stage although the rank holds several.
    """
    slots = [
        [tuple(_read(word, rank, placement) for word in pair.split("&")) for pair in line.split()]
        for rank, line in enumerate(lines)
    ]
    order = PassOrder(placement=placement, slots=slots, num_microbatches=num_microbatches)
    return assemble(name, order)


def _read(word: str, rank: int, placement: Placement) -> Pass:
    match = _PASS.fullmatch(word)
    if match is None:
        raise ProblemError(f"rank {rank}: {word!r} is no pass; write F0, BW0, B0 or W0")
    letters, microbatch, stage = match.groups()
    held = [number for number, ranks in enumerate(placement) if rank in ranks]
    if stage is None and len(held) != 1:
        raise ProblemError(
            f"rank {rank}: {word!r} names no stage but the rank holds {len(held)}; "
            f"write {word}.STAGE"
        )
    return _LETTERS[letters], held[0] if stage is None else int(stage), int(microbatch)

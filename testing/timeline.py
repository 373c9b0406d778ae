"""When what the software device was asked for would have run: a virtual clock for each device.

Processes write what they ask for, in order (``fakecuda/device/timeline.hpp``). Here this becomes a
graph: an operation starts when all that it waits for has ended. It waits for what came before it on
its stream, for events, and for what the host had waited for when it was asked for. A collective is
one node that all its ranks wait for and start together. So a circle in the graph is a deadlock.

An operator takes what an estimate says (planning/costs/roofline.py), a collective what planning
says (planning/costs/comm.py). Hosts take no time. Operators of one device run one after another, on
whatever streams they are. Collectives that share one direction of a device's link share its rate:
both together take as long as one after the other, and a short one does not wait for a long one.
"""

import heapq
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..planning.costs.comm import Collective, Wire, collective_seconds
from ..planning.costs.device_table import DeviceSpec, spec_of
from ..planning.costs.efficiency import FITTED
from ..planning.costs.estimate import LINK_LATENCY_SECONDS
from ..planning.costs.roofline import Efficiency, operator_seconds
from ..profilers.operator_counts import counted_call
from ..schema.layers import Operator
from ..schema.options import Precision

# By the names of torch's backends: as planning names them.
_COLLECTIVES: dict[str, Collective] = {
    "allreduce": "all-reduce",
    "reduce": "all-reduce",
    "allgather": "all-gather",
    "broadcast": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "send": "point-to-point",
}
_COPY_BYTES_PER_SECOND = 12e9  # between a host's pinned memory and a device, over PCIe 3 x16


class DeadlockError(Exception):
    """Collectives wait for each other in a circle, or their ranks call unlike ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast devices and links are.

    Args:
        efficiency: What share of its peaks a device reaches.
        precision: How products of 32-bit tensors are computed; None as torch does by default.
        slower: How many times slower than real ones all devices and links are. A test's model is
            many times smaller than a real one; on devices that are as much slower, its products
            take as long as real ones, and are not lost beside the launches of kernels.
        network: Between two hosts.
        one_queue: As with CUDA_DEVICE_MAX_CONNECTIONS=1: a device starts nothing before all that it
            was asked for earlier can start, on whatever streams.
    """

    efficiency: Efficiency = FITTED
    precision: Precision | None = None
    slower: float = 1.0
    network: Wire = Wire(2e-5, 12.5e9)
    one_queue: bool = False

    def spec(self, name: str) -> DeviceSpec:
        """A row of the table of devices, as slow as asked for."""
        found, by = spec_of(name), self.slower

        def less(rate: float | None) -> float | None:
            return None if rate is None else rate / by

        return replace(
            found,
            float32_flops_per_second=found.float32_flops_per_second / by,
            tf32_flops_per_second=less(found.tf32_flops_per_second),
            half_flops_per_second=less(found.half_flops_per_second),
            memory_bytes_per_second=found.memory_bytes_per_second / by,
            link_bytes_per_second=found.link_bytes_per_second / by,
        )


REAL = Rates()


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A device: its host, its number there (its place on the bus) and its row in the table."""

    host: str
    uuid: str
    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpan:
    """What ran on a stream of a device.

    ``kind`` is ``kernel``, ``copy`` or ``nccl``. ``asked_seconds`` is when all that it waited for
    on its own device had ended; a collective starts when that is so on all devices.
    """

    device: Device
    stream: int
    kind: str
    name: str
    asked_seconds: float
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When what ran on a machine's devices would have run.

    Args:
        spans: All that ran, by start.
        marks: (device, name, seconds), as the programs said them; ``step`` is where the first
            optimizer of a process has stepped.
    """

    spans: tuple[DeviceSpan, ...]
    marks: tuple[tuple[Device, str, float], ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices that ran something."""
        return tuple(sorted({span.device for span in self.spans}))

    def steps(self, device: Device, mark: str = "step") -> list[float]:
        """When each step of a device has ended; or where the program has marked it otherwise."""
        return [at for own, name, at in self.marks if own == device and name == mark]

    def steady(self, device: Device, skipped: int = 2) -> tuple[float, float]:
        """From the end of the first ``skipped`` steps to the end of the last: the steady state.

        Raises:
            ValueError: There are too few steps.
        """
        ends = self.steps(device)
        if len(ends) < skipped + 1:
            raise ValueError(f"{len(ends)} steps on {device.spec}; run at least {skipped + 1}")
        return ends[skipped - 1], ends[-1]

    @property
    def step_seconds(self) -> float:
        """The median step of the slowest device, without the first two."""
        return max(
            statistics.median(b - a for a, b in zip(ends[1:-1], ends[2:], strict=True))
            for device in self.devices
            if len(ends := self.steps(device)) > 2
        )

    @property
    def hidden_share(self) -> float:
        """The share of transfers in the steady state beside which their device computes.

        Of the device where it is least.
        """
        return min(self.hidden_share_of(device) for device in self.devices)

    def hidden_share_of(self, device: Device, period: tuple[float, float] | None = None) -> float:
        """The hidden share of one device; 1 where it transfers nothing.

        Args:
            device: Which one.
            period: From when to when; None: the steady state.
        """
        first, last = period or self.steady(device)
        own = [s for s in self.spans if s.device == device and first <= s.start_seconds < last]
        sent = [(s.start_seconds, s.end_seconds) for s in own if s.kind == "nccl"]
        computed = [(s.start_seconds, s.end_seconds) for s in own if s.kind == "kernel"]
        whole = _length(sent)
        return (whole + _length(computed) - _length(sent + computed)) / whole if whole else 1.0

    def perfetto(self) -> dict[str, Any]:
        """The timeline as ui.perfetto.dev and chrome://tracing read it, in JSON's types."""
        numbers = {device: number for number, device in enumerate(self.devices)}
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "name": "process_name",
                "pid": number,
                "args": {"name": f"{device.host} {device.spec} {device.uuid}"},
            }
            for device, number in numbers.items()
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": numbers[span.device],
                "tid": span.stream,
                "ts": span.start_seconds * 1e6,
                "dur": (span.end_seconds - span.start_seconds) * 1e6,
                "args": {"waited_us": (span.start_seconds - span.asked_seconds) * 1e6},
            }
            for span in self.spans
        ]
        events += [
            {"ph": "i", "s": "p", "name": name, "pid": numbers[device], "tid": 0, "ts": at * 1e6}
            for device, name, at in self.marks
            if device in numbers
        ]
        return {"traceEvents": events}

    def write(self, path: Path) -> None:
        """Write ``perfetto`` to a file."""
        path.write_text(json.dumps(self.perfetto()), encoding="utf-8")


def _length(spans: Iterable[tuple[float, float]]) -> float:
    # Of the union: spans of several streams overlap.
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass(slots=True, eq=False)
class _Node:
    """An operation, or a moment (``seconds`` 0, on no resource)."""

    order: int
    kind: str = "moment"
    name: str = ""
    seconds: float = 0.0
    resources: tuple[Any, ...] = ()
    # Devices and streams on which it runs, each with the nodes that it waits for there.
    sides: list[tuple[Device | None, int, frozenset["_Node"]]] = field(default_factory=list)
    missing: int = 0  # ranks of a collective that have not called it
    is_done: bool = False
    start: float = 0.0
    end: float = 0.0


Frontier = frozenset[_Node]
"""What must have ended before a stream goes on."""
_NONE: Frontier = frozenset()


class _Graph:
    """The operations of all processes, and what each waits for."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.nodes: list[_Node] = []
        self.marks: list[tuple[Device, str, _Node]] = []
        self.groups: defaultdict[str, dict[int, Device]] = defaultdict(dict)
        self._collectives: dict[tuple[Any, ...], _Node] = {}

    def node(self, **facts: Any) -> _Node:
        """A new one."""
        self.nodes.append(_Node(order=len(self.nodes), **facts))
        return self.nodes[-1]

    def collective(
        self, key: tuple[Any, ...], name: str, num_bytes: int, ranks: list[int]
    ) -> _Node:
        """The node of a collective; its ranks find it by its key.

        Raises:
            DeadlockError: A rank has called another one in its place.
        """
        if key not in self._collectives:
            devices = [self.groups[key[0]][rank] for rank in ranks]
            kind = _COLLECTIVES[name.partition(" ")[0]]
            self._collectives[key] = self.node(
                kind="nccl",
                name=name,
                seconds=collective_seconds(kind, num_bytes, len(ranks), self._wire(devices)),
                resources=(
                    ((devices[0], "out"), (devices[1], "in"))
                    if kind == "point-to-point"
                    else tuple((device, way) for device in devices for way in ("out", "in"))
                ),
                missing=len(ranks),
            )
        found = self._collectives[key]
        if found.name != name:
            raise DeadlockError(f"one rank calls {found.name} where another calls {name}")
        found.missing -= 1
        return found

    def meeting(self, key: tuple[Any, ...], num_ranks: int) -> _Node:
        """The node at which hosts wait for each other."""
        if key not in self._collectives:
            self._collectives[key] = self.node(missing=num_ranks)
        self._collectives[key].missing -= 1
        return self._collectives[key]

    def _wire(self, devices: Sequence[Device]) -> Wire:
        if len({device.host for device in devices}) > 1:
            network = self.rates.network
            return Wire(network.latency_seconds, network.bytes_per_second / self.rates.slower)
        slowest = min(self.rates.spec(device.spec).link_bytes_per_second for device in devices)
        return Wire(LINK_LATENCY_SECONDS, slowest * self.rates.efficiency.link)


class _Process:
    """What one process asked for, line by line."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self._devices: dict[int, Device] = {}
        self._ranks: dict[str, tuple[int, int]] = {}
        self._operators: dict[str, Operator | None] = {}
        self._streams: defaultdict[int, Frontier] = defaultdict(lambda: _NONE)
        self._events: dict[str, Frontier] = {}
        self._waited: Frontier = _NONE
        self._queues: defaultdict[Device, Frontier] = defaultdict(lambda: _NONE)

    def read(self, lines: Iterable[list[str]]) -> None:
        """Add a process's operations to the graph, or facts that others need for theirs."""
        for word, *values in lines:
            getattr(self, f"_{word}")(*values)

    def _device(self, index: str, host: str, spec: str, uuid: str) -> None:
        self._devices[int(index)] = Device(host, uuid, spec)

    def _group(self, name: str, rank: str, size: str, device: str) -> None:
        self._ranks[name] = int(rank), int(size)
        self._graph.groups[name][int(rank)] = self._devices[int(device)]

    def _op(self, number: str, signature: str) -> None:
        self._operators[number] = operator_of(signature)

    def _kernel(self, stream: str, number: str) -> None:
        operator, device = self._operators[number], self._device_of(stream)
        if operator is not None:
            rates = self._graph.rates
            spec = rates.spec(device.spec)
            seconds = operator_seconds(operator, spec, rates.efficiency, rates.precision)
            self._run(stream, "kernel", operator.name, seconds, ((device, "compute"),))

    def _copy(self, stream: str, kind: str, num_bytes: str) -> None:
        device, rates = self._device_of(stream), self._graph.rates
        if kind == "kernel":
            moved = Operator(name="copy_", dtype="uint8", flops=0, num_bytes=2 * int(num_bytes))
            seconds = operator_seconds(moved, rates.spec(device.spec), rates.efficiency)
            self._run(stream, "kernel", "copy_", seconds, ((device, "compute"),))
        else:
            seconds = int(num_bytes) * rates.slower / _COPY_BYTES_PER_SECOND
            self._run(stream, "copy", kind, seconds, ((device, kind),))

    def _run(
        self, stream: str, kind: str, name: str, seconds: float, resources: tuple[Any, ...]
    ) -> None:
        node = self._graph.node(kind=kind, name=name, seconds=seconds, resources=resources)
        self._ask(int(stream), node)

    def _ask(self, stream: int, node: _Node) -> None:
        device, waits = self._device_of(stream), self._streams[stream] | self._waited
        # A moment between: the operation may begin when it could, and all that was asked for
        # earlier could; what is asked for later waits for the moment, not for the operation's end.
        if self._graph.rates.one_queue:
            gate = self._graph.node()
            gate.sides.append((None, 0, waits | self._queues[device]))
            waits = self._queues[device] = frozenset((gate,))
        node.sides.append((device, stream, waits))
        self._streams[stream] = frozenset((node,))

    def _nccl(
        self, stream: str, event: str, group: str, number: str, kind: str, size: str, peer: str
    ) -> None:
        own, num_ranks = self._ranks[group]
        if kind in ("send", "recv"):
            ranks = [own, int(peer)] if kind == "send" else [int(peer), own]
            key: tuple[Any, ...] = (group, *ranks, number)
            kind = "send"
        else:
            ranks, key = list(range(num_ranks)), (group, number)
        name = f"{kind} {size}"
        node = self._graph.collective(key, name, int(size), ranks)
        self._ask(int(stream), node)
        self._events[event] = frozenset((node,))

    def _barrier(self, group: str, number: str) -> None:
        node = self._graph.meeting((group, "barrier", number), self._ranks[group][1])
        node.sides.append((None, 0, self._waited))
        self._waited = frozenset((node,))

    def _record(self, stream: str, event: str) -> None:
        self._events[event] = self._streams[int(stream)]

    def _wait(self, stream: str, event: str) -> None:
        self._streams[int(stream)] |= self._events.get(event, _NONE)

    def _join(self, stream: str, other: str) -> None:
        self._streams[int(stream)] |= self._streams[int(other)]

    def _host(self, what: str) -> None:
        of_stream = what.startswith("-")
        waits = self._streams[int(what[1:])] if of_stream else self._events.get(what, _NONE)
        if waits - self._waited:
            node = self._graph.node()
            node.sides.append((None, 0, waits | self._waited))
            self._waited = frozenset((node,))

    def _mark(self, stream: str, name: str) -> None:
        node = self._graph.node()
        node.sides.append((None, 0, self._streams[int(stream)] | self._waited))
        self._graph.marks.append((self._device_of(stream), name, node))

    def _device_of(self, stream: int | str) -> Device:
        return self._devices[int(stream) // _STREAMS_PER_DEVICE]


_STREAMS_PER_DEVICE = 100000  # device/clocks.hpp, key_of


def timeline_of(folder: Path, rates: Rates = REAL) -> Timeline:
    """The timeline of what processes wrote to a folder.

    What waits for a rank that has ended, or not come yet, is left out.

    Raises:
        DeadlockError: Collectives wait for each other, so real devices would hang.
    """
    graph = _Graph(rates)
    processes = []
    for path in sorted(folder.glob("process-*")):
        text = path.read_text(encoding="utf-8")
        lines = [line.split("\t") for line in text[: text.rfind("\n") + 1].splitlines()]
        facts = [line for line in lines if line[0] in _FACTS]
        processes.append((_Process(graph), [line for line in lines if line[0] not in _FACTS]))
        processes[-1][0].read(facts)  # which devices the ranks of a group have
    for process, lines in processes:
        process.read(lines)
    _run(graph.nodes)
    return Timeline(
        spans=tuple(
            sorted(_spans(graph.nodes), key=lambda span: (span.start_seconds, span.stream))
        ),
        marks=tuple((device, name, at.end) for device, name, at in graph.marks if at.is_done),
    )


_FACTS = ("device", "group")


def _run(nodes: Sequence[_Node]) -> None:
    """Give each node its times: what can start first is served first."""
    waits = {node: {w for _, _, found in node.sides for w in found} for node in nodes}
    after: defaultdict[_Node, list[_Node]] = defaultdict(list)
    for node, found in waits.items():
        for other in found:
            after[other].append(node)
    left = {node: len(found) + node.missing for node, found in waits.items()}
    free: defaultdict[Any, float] = defaultdict(float)
    transfers = _Transfers()
    heap = [(0.0, node.order, node) for node in nodes if not left[node]]
    heapq.heapify(heap)

    def end(node: _Node, seconds: float) -> None:
        node.end, node.is_done = seconds, True
        for other in after[node]:
            left[other] -= 1
            if not left[other]:
                ready = max(before.end for before in waits[other])
                heapq.heappush(heap, (ready, other.order, other))

    # Transfers are not in the heap: when one ends changes with every other that begins or ends on
    # its links. At equal times ends come first, so that what begins then has the link's whole rate.
    while heap or transfers.left:
        due = transfers.next_end()
        if due is not None and (not heap or due[0] <= heap[0][0]):
            transfers.pass_until(due[0])
            del transfers.left[due[1]]
            end(due[1], due[0])
            continue
        ready, _, node = heapq.heappop(heap)
        if node.kind == "nccl":
            node.start = ready
            transfers.pass_until(ready)  # the others until now at their old rates
            transfers.left[node] = node.seconds
            continue
        node.start = max([ready, *(free[resource] for resource in node.resources)])
        for resource in node.resources:
            free[resource] = node.start + node.seconds
        end(node, node.start + node.seconds)
    _check_no_circle(nodes, after)


class _Transfers:
    """Collectives under way. Those that share a direction of a device's link share its rate.

    Attributes:
        left: Of each the seconds that it would still take alone.
    """

    def __init__(self) -> None:
        self.left: dict[_Node, float] = {}
        self._now = 0.0

    def next_end(self) -> tuple[float, _Node] | None:
        """When the next one ends if no other begins before."""
        ends = ((self._now + left * self._crowd(node), node) for node, left in self.left.items())
        return min(ends, key=lambda each: (each[0], each[1].order), default=None)

    def pass_until(self, seconds: float) -> None:
        """Carry all of them on to a time that is not behind ``next_end``."""
        passed = {node: (seconds - self._now) / self._crowd(node) for node in self.left}
        for node, done in passed.items():
            self.left[node] -= done
        self._now = seconds

    def _crowd(self, node: _Node) -> int:
        """How many use the most used of the links that one crosses."""
        return max(
            sum(resource in other.resources for other in self.left) for resource in node.resources
        )


def _check_no_circle(nodes: Sequence[_Node], after: "defaultdict[_Node, list[_Node]]") -> None:
    """Whatever has not run waits for a rank that is missing; else it waits for itself."""
    excused = {node for node in nodes if node.missing}
    stack = list(excused)
    while stack:
        for other in after[stack.pop()]:
            if other not in excused:
                excused.add(other)
                stack.append(other)
    stuck = [node for node in nodes if not node.is_done and node not in excused]
    if stuck:
        names = ", ".join(dict.fromkeys(node.name for node in stuck if node.kind == "nccl"))
        raise DeadlockError(f"collectives wait for each other: {names}")


def _spans(nodes: Iterable[_Node]) -> Iterator[DeviceSpan]:
    for node in nodes:
        if node.is_done and node.kind != "moment":
            for device, stream, waits in node.sides:
                assert device is not None
                yield DeviceSpan(
                    device=device,
                    stream=stream % _STREAMS_PER_DEVICE,
                    kind=node.kind,
                    name=node.name,
                    asked_seconds=max((before.end for before in waits), default=0.0),
                    start_seconds=node.start,
                    end_seconds=node.end,
                )


@cache
def operator_of(signature: str) -> Operator | None:
    """What an estimate counts for a call of an operator; None if it moves nothing.

    Args:
        signature: The call as JSON (``fakecuda/device/operators.hpp``, signature_of).
    """
    import torch

    name, overload, given, made = json.loads(signature)
    function = getattr(getattr(torch.ops.aten, name), overload)
    tensors: dict[int, Any] = {}

    def value(found: Any) -> Any:
        if isinstance(found, list):
            return [value(one) for one in found]
        if not isinstance(found, dict):
            return found
        if found["n"] not in tensors:
            kind = getattr(torch, _TYPES.get(found["t"], found["t"].lower()))
            sizes, strides = found["s"], found["d"]
            tensors[found["n"]] = torch.empty_strided(sizes, strides, dtype=kind, device="meta")
        return tensors[found["n"]]

    arguments, named = [], {}
    for declared, found in zip(function._schema.arguments, map(value, given), strict=True):
        if declared.is_out:
            continue
        if declared.kwarg_only:
            named[declared.name] = found
        else:
            arguments.append(found)
    answers = [value(found) for found in made]
    return counted_call(function, arguments, named, answers[0] if len(answers) == 1 else answers)


# C++'s names of types, where torch's are not the same in small letters.
_TYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}

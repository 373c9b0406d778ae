"""A job's throughputs on the cluster's device types, and the plan that it runs under.

Under EasyScale's schedulers a job also has a wish. Its database of plans (EasyScale 3.4, companion
module) begins with its throughputs on each type alone. Plans on several types are made when a
decision first asks for them.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ...planning.even_split import even_split, rate_of
from ...planning.inputs import profiles_of
from ...planning.request import question_of
from ...planning.solve import solve
from ...runtime.protocol.lower import lower
from ...schema.cluster import Cluster
from ...schema.errors import FileError, InfeasibleError, ProblemError
from ...schema.files import to_plain
from ...schema.jobs import Job, MixThroughput, ModelThroughput, Throughputs
from ...schema.options import Strategy
from ...schema.plan import Plan
from ...schema.profile import Profile
from ...schema.requests.solve import SolveRequest
from ..mechanisms.easyscale import ByType, Elastic, Fixed, Variant, Wish, alone
from ..mechanisms.pool import ClusterPool
from ..mechanisms.seats import DeviceLayout
from .submission import Submission

Rate = ModelThroughput | MixThroughput
"""How fast a job is: on each type, or on the devices of several types that it asked for by name."""


def plan_on(asked: Submission, devices: Mapping[str, int]) -> Plan:
    """The plan of a job on so many devices of each type, by its profiles as they are at first.

    A job that named its devices has one plan, for just these. That of a job with throughputs is the
    even split.

    Raises:
        HetflowError: There is none, or the profiles are gone.
    """
    if asked.throughputs:
        return _plan_by_table(asked, devices)
    return _plan(_kind(asked), asked.gpus or _pool(devices))


def rate_on(asked: Submission, devices: Mapping[str, int]) -> float:
    """Steps per second of a job on devices of several types; 0 where no plan uses all of them.

    Raises:
        FileError: The profiles are gone.
    """
    if asked.throughputs:
        try:
            return 1.0 / _plan_by_table(asked, devices).predicted.step_seconds
        except (InfeasibleError, ProblemError):
            return 0.0
    return _rate(_kind(asked), _pool(devices))


def _plan_by_table(asked: Submission, devices: Mapping[str, int]) -> Plan:
    used = {name: number for name, number in devices.items() if number}
    if len(used) != 1:
        raise InfeasibleError(
            f"{_pool(used)}: several types at once need profiles, not throughputs"
        )
    [(name, number)] = used.items()
    return even_split(
        asked.throughputs, name, number,
        batch_size=asked.batch_size, virtual_nodes=asked.virtual_nodes,
    )  # fmt: skip


def _pool(devices: Mapping[str, int]) -> str:
    return ",".join(f"{number}x{name}" for name, number in devices.items() if number)


def may_mix(asked: Submission, types: Collection[str]) -> bool:
    """Whether its level of determinism lets a job hold several of these types at once."""
    # The levels static and elastic hold on one type (EasyScale 3.3); emulated types of one base
    # are one type. Throughputs are of one type alone. Where profiles are gone nobody knows.
    if asked.profiles is None:
        return False
    if asked.level in ("none", "heterogeneous"):
        return True
    try:
        found = _profiles(asked.profiles, asked.model)
    except FileError:
        return False
    emulations = [(one.device_type, one.emulation) for one in found if one.device_type in types]
    return len({name if how is None else how.base_device_type for name, how in emulations}) <= 1


class _Kind(NamedTuple):
    """What a job's plan depends on, besides devices that it did not name.

    Where there are microbatches, virtual nodes are the same: a job goes on from its checkpoint
    under a plan of another kind only if both cut a batch alike.
    """

    profiles: str
    model: str | None
    batch_size: int
    strategy: Strategy
    virtual_nodes: int | None
    microbatch_size: int | None
    gpus: str | None


def _kind(asked: Submission) -> _Kind:
    assert asked.profiles is not None
    virtual_nodes = asked.virtual_nodes
    if asked.microbatch_size is not None:
        virtual_nodes = asked.batch_size // asked.microbatch_size
    return _Kind(
        asked.profiles, asked.model, asked.batch_size, asked.strategy, virtual_nodes,
        asked.microbatch_size, asked.gpus,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _plan(kind: _Kind, gpus: str) -> Plan:
    plan = solve(
        question_of(
            SolveRequest(
                _profiles(kind.profiles, kind.model),
                gpus,
                batch_size=kind.batch_size,
                strategy=kind.strategy,
                virtual_nodes=kind.virtual_nodes,
                microbatch_size=kind.microbatch_size,
                fastest=kind.strategy != "parallel",  # a parallel plan always is
            )
        )
    )
    lower(plan)  # here, and not in its launch, a plan is refused that cannot be launched
    return plan


@lru_cache(maxsize=65536)
def _rate(kind: _Kind, gpus: str) -> float:
    try:
        plan = _plan(kind, gpus)
    except (InfeasibleError, ProblemError):
        return 0.0
    # A plan that leaves devices idle is none on these.
    used = Counter(worker.device_type for worker in lower(plan).workers)
    if used != Counter(Cluster.parse(gpus).num_devices):
        return 0.0
    return 1.0 / plan.predicted.step_seconds


@lru_cache(maxsize=256)
def _profiles(folder: str, model: str | None) -> tuple[Profile, ...]:
    return profiles_of(Path(folder), model)


def kind_of(asked: Submission) -> str:
    """One name for all jobs that reach the same throughputs."""
    what: Sequence[object] = _kind(asked) if asked.profiles is not None else (
        to_plain(asked.throughputs), asked.batch_size, asked.virtual_nodes, asked.gpus,
    )  # fmt: skip
    return "job-" + hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def throughput_of(
    asked: Submission, num_devices: Mapping[str, int], no_mixes: str | None = None
) -> Rate:
    """Steps per second on each type that it has rates of and fits, or on those that it named.

    ``no_mixes`` says why the cluster gives no job devices of several types; None where it does.

    Raises:
        InfeasibleError: No type of the cluster can run it.
        HetflowError: The profiles are gone, or have faults.
    """
    if asked.gpus is not None:
        named = Cluster.parse(asked.gpus).num_devices
        if no_mixes is not None and len(named) > 1:
            raise InfeasibleError(f"it asks for {asked.gpus}, and {no_mixes}")
        return _throughput_on(asked, named, num_devices)
    return _throughput_with(asked, asked.devices, num_devices)


def rates_of(
    asked: Submission, num_devices: Mapping[str, int], no_mixes: str | None = None
) -> tuple[Rate, ...]:
    """Steps per second with each number of devices that the job can hold, the fewest first.

    Numbers in its range without a plan that uses them all are left out.

    Raises:
        InfeasibleError: It can run with none of them.
        HetflowError: As ``throughput_of``.
    """
    if asked.devices_at_most is None:
        return (throughput_of(asked, num_devices, no_mixes),)
    most = min(asked.devices_at_most, max(num_devices.values()))
    found, obstacles = list[Rate](), list[InfeasibleError]()
    for number in range(asked.fewest_devices, max(most, asked.fewest_devices) + 1):
        try:
            found.append(_throughput_with(asked, number, num_devices))
        except InfeasibleError as error:
            obstacles.append(error)
    if not found:
        raise obstacles[0]
    return tuple(found)


def _throughput_with(
    asked: Submission, number: int, num_devices: Mapping[str, int]
) -> ModelThroughput:
    """Steps per second with so many devices of each type."""
    types = _types_of(asked, num_devices)
    rates: dict[str, float] = {}
    obstacles = []
    for name, there in num_devices.items():
        if name not in types.known:
            obstacles.append(f"{name}: no {types.source}")
        elif number > there:
            obstacles.append(f"{name}: {number} are asked for, the cluster has {there}")
        else:
            try:
                plan = plan_on(asked, {name: number})
            except (InfeasibleError, ProblemError) as error:
                obstacles.append(f"{name}: {error.message}")
                continue
            # Smaller numbers in the range are planned on their own.
            if asked.devices_at_most is not None and lower(plan).world_size < number:
                obstacles.append(f"{name}: no plan uses {number} devices")
                continue
            rates[name] = 1.0 / plan.predicted.step_seconds
    if not rates:
        raise InfeasibleError(
            f"no device type of the cluster can run it ({'; '.join(obstacles)})",
            hint=f"{types.source}s are of {types.everything}",
        )
    return ModelThroughput(model=kind_of(asked), scale_factor=number, steps_per_second=rates)


class _Types(NamedTuple):
    """Device types that a job can be planned on: those of the cluster, and what it knows of all."""

    known: frozenset[str]
    source: str
    everything: str


def _types_of(asked: Submission, types: Iterable[str]) -> _Types:
    if asked.profiles is not None:
        found = {profile.device_type for profile in _profiles(asked.profiles, asked.model)}
        return _Types(frozenset(found), "profile", ", ".join(sorted(found)))
    tables = [entry.steps_per_second for entry in asked.throughputs]
    known = {name for name in types if any(rate_of(one, name) for one in tables)}
    names = {name for one in tables for name, rate in one.items() if rate}
    return _Types(frozenset(known), "throughput", ", ".join(sorted(names)))


def _throughput_on(
    asked: Submission, named: Mapping[str, int], num_devices: Mapping[str, int]
) -> Rate:
    for name, number in named.items():
        if number > num_devices.get(name, 0):
            raise InfeasibleError(
                f"{number}x{name} are asked for, the cluster has {num_devices.get(name, 0)}"
            )
    plan = plan_on(asked, named)
    rate, model = 1.0 / plan.predicted.step_seconds, kind_of(asked)
    if len(named) == 1:
        [name] = named
        return ModelThroughput(
            model=model, scale_factor=asked.devices, steps_per_second={name: rate}
        )
    used = Counter(worker.device_type for worker in lower(plan).workers)
    if used != Counter(named):
        only = ",".join(f"{number}x{name}" for name, number in used.items())
        raise InfeasibleError(
            f"on {asked.gpus} the fastest plan uses {only} alone: ask for these devices"
        )
    return MixThroughput(
        model=model, scale_factor=asked.devices, steps_per_second=rate,
        devices={name: named[name] for name in num_devices if name in named},
    )  # fmt: skip


def rates_to(rates: Sequence[Rate]) -> str:
    """A job's rates as the state has them: one object, or a list where it states a range."""
    documents = [to_plain(rate) for rate in rates]
    return json.dumps(documents if len(documents) > 1 else documents[0])


def rates_from(text: str) -> tuple[Rate, ...]:
    """What ``rates_to`` wrote."""
    found = json.loads(text)
    return tuple(_rate_from(one) for one in (found if isinstance(found, list) else [found]))


def _rate_from(document: Mapping[str, Any]) -> Rate:
    kind = MixThroughput if "devices" in document else ModelThroughput
    return kind(**document)


def together(rates: Iterable[Rate]) -> Throughputs:
    """The rates of jobs as mechanisms take them; a job that runs on a mix alone has no others."""
    found = list(rates)
    mixes = tuple(rate for rate in found if isinstance(rate, MixThroughput))
    return Throughputs(
        models=tuple(
            ModelThroughput(model=rate.model, scale_factor=rate.scale_factor, steps_per_second={})
            if isinstance(rate, MixThroughput)
            else rate
            for rate in found
        ),
        mixes=mixes,
    )


def pool_from(
    rates: Iterable[Rate], num_devices: Mapping[str, int], dollars_per_hour: Mapping[str, float]
) -> ClusterPool:
    """A cluster's devices by type, with prices and the rates of jobs, as mechanisms take it."""
    throughputs = together(rates)
    return ClusterPool(
        throughputs=throughputs,
        num_devices=dict(num_devices),
        dollars_per_hour=dict(dollars_per_hour),
        uses_mixes=bool(throughputs.mixes),
    )


def as_job(number: int, asked: Submission, submitted: float, rates: Sequence[Rate]) -> Job:
    """What a mechanism sees of a job; its scale factor is the most that it can hold."""
    return Job(
        id=str(number),
        model=kind_of(asked),
        steps=asked.steps,
        scale_factor=rates[-1].scale_factor,
        arrival_seconds=submitted,
        priority_weight=asked.priority_weight,
        slo_seconds=asked.deadline_seconds,
        entity=asked.entity,
    )


def rates_and_wish(
    asked: Submission, num_devices: Mapping[str, int], layout: DeviceLayout, variant: Variant
) -> tuple[tuple[Rate, ...], Wish]:
    """A new job's rates, as ``rates_of`` gives them, and its wish.

    Raises:
        InfeasibleError: No server can hold it.
        HetflowError: Its profiles are gone, or have faults.
    """
    types = list(num_devices)
    try:
        rates = rates_of(asked, num_devices)
    except InfeasibleError:
        if asked.devices_at_most is None:
            raise
        wish = wish_of(asked, (), types)  # perhaps it can on several types
        if (found := alone(wish, layout, variant)) is None:
            raise
        assert isinstance(wish, Elastic)
        rates = (_rate_of_mix(asked, found, types, wish.rate(found)),)
    wish = wish_of(asked, rates, types)
    if alone(wish, layout, variant) is None:
        least = asked.gpus or f"{asked.fewest_devices} devices"
        raise InfeasibleError(f"it asks for {least} on one server, and none can hold it")
    return rates, wish


def wish_of(
    asked: Submission,
    rates: Sequence[Rate],
    types: Sequence[str],
    ratio: Callable[[Iterable[str]], float] = lambda types: 1.0,
) -> Wish:
    """What a job can run on."""
    known = dict[ByType, float]()
    for one in rates:
        if isinstance(one, MixThroughput):
            known[tuple(one.devices.get(name, 0) for name in types)] = one.steps_per_second
            continue
        for kind, name in enumerate(types):
            if found := one.steps_per_second.get(name):
                counts = tuple(one.scale_factor if k == kind else 0 for k in range(len(types)))
                known[counts] = found
    if asked.devices_at_most is None:
        if asked.gpus is not None:
            named = Cluster.parse(asked.gpus).num_devices
            return Fixed((tuple(named.get(name, 0) for name in types),))
        # The fastest first.
        return Fixed(tuple(sorted(known, key=lambda counts: -known[counts])))

    def rate(counts: ByType) -> float:
        if not any(counts):
            return 0.0
        if counts not in known:
            used = {name: number for name, number in zip(types, counts, strict=True) if number}
            try:
                # Rates on one type are all known by now: a number that they lack has no plan.
                is_known = len(used) == 1 and bool(rates)
                known[counts] = 0.0 if is_known else rate_on(asked, used) * ratio(used)
            except FileError:
                return 0.0  # its profiles are gone
        return known[counts]

    return Elastic(
        least=asked.fewest_devices,
        most=asked.devices_at_most,
        rate=rate,
        full_rate=max(known.values(), default=1.0),
        mixes=may_mix(asked, types),
    )


def _rate_of_mix(
    asked: Submission, counts: ByType, types: Sequence[str], steps_per_second: float
) -> MixThroughput:
    devices = {name: number for name, number in zip(types, counts, strict=True) if number}
    return MixThroughput(
        model=kind_of(asked), scale_factor=sum(counts), steps_per_second=steps_per_second,
        devices=devices,
    )  # fmt: skip

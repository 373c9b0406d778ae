"""Compare each term of a prediction with the run's measurement."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...schema.plan import Plan
from ...schema.run import DeviceRun, TermComparison

OFF_FRACTION = 0.05
"""Terms that differ by more than this fraction of the measured step are marked as off."""


def compared(
    plan: Plan, devices: Sequence[DeviceRun], step_seconds: float
) -> tuple[TermComparison, ...]:
    """Compare the terms of a plan's predicted step with those of its run."""
    found = _of_stages(plan, devices) if plan.layers else _of_replicas(plan, devices)
    return tuple(_marked(entry, step_seconds) for entry in found)


def _marked(entry: TermComparison, step_seconds: float) -> TermComparison:
    if entry.predicted_seconds is None:
        return entry
    error = entry.times * abs(entry.predicted_seconds - entry.measured_seconds)
    return replace(entry, is_off=error > OFF_FRACTION * step_seconds)


def _of_replicas(plan: Plan, devices: Sequence[DeviceRun]) -> Iterator[TermComparison]:
    """Compare each group's slowest worker's virtual nodes, and the slowest worker's other terms."""
    known = {device.rank: device for device in devices if device.terms is not None}
    first, slowest = 0, None
    for group in plan.groups:
        ranks = range(first, first + group.num_devices)
        first += group.num_devices
        workers = [known[rank] for rank in ranks if rank in known]
        if not workers:
            continue
        worker = max(workers, key=_own_seconds)
        seconds = group.pass_seconds
        name = f"{group.virtual_nodes} virtual nodes of {group.virtual_node_batch_size}"
        yield TermComparison(
            term=name if group.virtual_nodes > 1 else name.replace("nodes", "node"),
            device_type=group.device_type,
            predicted_seconds=None if seconds is None else group.virtual_nodes * seconds,
            measured_seconds=_nodes_seconds(worker, group.virtual_nodes),
        )
        if slowest is None or _own_seconds(worker) > _own_seconds(slowest[0]):
            slowest = (worker, group.virtual_nodes)
    if slowest is not None:
        yield from _of_step(plan, *slowest, is_alone=plan.num_devices == 1)


def _own_seconds(device: DeviceRun) -> float:
    """Seconds of a worker's virtual nodes and fixed cost; at least 0.

    Medians of parts do not add up to the median of the whole, so the difference may be negative.
    """
    terms = device.terms
    if terms is None:
        return 0.0
    return max(0.0, terms.step.seconds - terms.sync.seconds - terms.update.seconds)


def _nodes_seconds(device: DeviceRun, virtual_nodes: int) -> float:
    node = None if device.terms is None else device.terms.virtual_node
    return _own_seconds(device) if node is None else virtual_nodes * node.seconds


def _of_step(
    plan: Plan, device: DeviceRun, virtual_nodes: int, *, is_alone: bool
) -> Iterator[TermComparison]:
    """Compare a worker's terms of the whole step.

    A worker that trains alone does not synchronise; the time of its sums is fixed cost.
    """
    terms, predicted = device.terms, plan.predicted
    assert terms is not None
    sync = terms.sync.seconds
    if terms.load is not None and predicted.load_seconds is not None:
        yield TermComparison(
            term="of these, loading",
            device_type=device.device_type,
            predicted_seconds=predicted.load_seconds,
            measured_seconds=virtual_nodes * terms.load.seconds,
        )
    if terms.fixed is not None:
        yield TermComparison(
            term="fixed cost",
            predicted_seconds=predicted.fixed_seconds,
            measured_seconds=terms.fixed.seconds + (sync if is_alone else 0.0),
        )
    if not is_alone:
        yield TermComparison(
            term="sync", predicted_seconds=predicted.sync_seconds, measured_seconds=sync
        )
    yield TermComparison(
        term="update",
        predicted_seconds=predicted.update_seconds,
        measured_seconds=terms.update.seconds,
    )


def _of_stages(plan: Plan, devices: Sequence[DeviceRun]) -> Iterator[TermComparison]:
    """Compare each stage's passes of a microbatch on its slowest replica, and the update.

    The plan may have one time for both passes.
    """
    for number, stage in enumerate(plan.stages):
        runs = [run for device in devices for run in device.stages if run.stage == number]
        if not runs:
            continue
        forward, both = stage.forward_seconds, stage.compute_seconds
        if forward is None:
            taken = max(run.forward.seconds + run.backward.seconds for run in runs)
            terms = [("passes", both, taken)]
        else:
            backward = max(0.0, (both or 0.0) - forward)
            terms = [
                ("forward", forward, max(run.forward.seconds for run in runs)),
                ("backward", backward, max(run.backward.seconds for run in runs)),
            ]
        for name, predicted, measured in terms:
            yield TermComparison(
                term=f"stage {number} {name}",
                device_type=stage.device_type,
                predicted_seconds=predicted,
                measured_seconds=measured,
                times=-(-plan.num_microbatches // stage.num_replicas),
            )
    updates = [device.terms.update.seconds for device in devices if device.terms is not None]
    if updates:
        stated = plan.predicted.update_seconds
        known = [stage.update_seconds for stage in plan.stages if stage.update_seconds is not None]
        yield TermComparison(
            term="update",
            predicted_seconds=max(known, default=None) if stated is None else stated,
            measured_seconds=max(updates),
        )

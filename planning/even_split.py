"""Plan a job of which only throughputs are known: the batch in equal parts on devices of one type.

A table of throughputs says how fast a model is on so many devices, not how its batch was divided,
and nothing of memory. So a plan takes the even split, and the table's rate as its prediction.
"""

from collections.abc import Mapping, Sequence

from ..devices.cpu import is_emulated
from ..schema.errors import InfeasibleError
from ..schema.jobs import ModelThroughput
from ..schema.plan import Plan, Prediction, Proof, device_group, split_plan


def even_split(
    rates: Sequence[ModelThroughput],
    device_type: str,
    num_devices: int,
    *,
    batch_size: int,
    virtual_nodes: int | None = None,
) -> Plan:
    """Divide a batch evenly over devices of one type. Memory is not checked.

    Args:
        rates: Throughputs of one model, each with another number of devices.
        device_type: The type; its case does not matter in ``rates``.
        num_devices: How many of it.
        batch_size: Global batch, samples per step.
        virtual_nodes: Number of equal virtual nodes over all devices, a divisor of the batch; None
            gives each device one.

    Returns:
        A plan with the rate of ``rates`` as prediction, and no proof that it is the fastest.

    Raises:
        InfeasibleError: There is no rate with so many devices or on this type, the type is
            emulated, or the devices do not divide the batch or the virtual nodes.
    """
    entry = entry_with(rates, num_devices, batch_size=batch_size, virtual_nodes=virtual_nodes)
    if is_emulated(device_type):
        raise InfeasibleError("an emulated type needs profiles: they say how slow its passes are")
    rate = rate_of(entry.steps_per_second, device_type)
    if not rate:
        raise InfeasibleError(
            f"no throughput of {entry.model!r} is for {num_devices} x {device_type}"
        )
    own_nodes = 1 if virtual_nodes is None else virtual_nodes // num_devices
    device_batch_size = batch_size // num_devices
    return split_plan(
        model=entry.model,
        global_batch_size=batch_size,
        groups=(
            device_group(
                device_type=device_type,
                num_devices=num_devices,
                virtual_nodes=own_nodes,
                virtual_node_batch_size=device_batch_size // own_nodes,
            ),
        ),
        predicted=Prediction(step_seconds=1.0 / rate, samples_per_second=batch_size * rate),
        proof=Proof(
            termination="feasible",
            objective=1.0 / rate,
            lower_bound=None,
            gap=None,
            method="even split, predicted by a table of throughputs",
        ),
        uniform_virtual_nodes=virtual_nodes,
        provenance={"pool": f"{num_devices}x{device_type}"},
    )


def entry_with(
    rates: Sequence[ModelThroughput],
    num_devices: int,
    *,
    batch_size: int,
    virtual_nodes: int | None = None,
) -> ModelThroughput:
    """The throughputs with so many devices, which divide the batch or the virtual nodes.

    Raises:
        InfeasibleError: There are none, or the devices do not divide them. The message names the
            numbers of devices that there are, or the nearest ones that do.
    """
    found = {entry.scale_factor: entry for entry in rates}
    if num_devices not in found:
        known = ", ".join(map(str, sorted(found)))
        raise InfeasibleError(
            f"the throughputs of {rates[0].model!r} are for {known} devices, not for {num_devices}"
        )
    what, parts = "batch_size", batch_size
    if virtual_nodes is not None:
        what, parts = "virtual_nodes", virtual_nodes
    if parts % num_devices == 0:
        return found[num_devices]
    fitting = [number for number in sorted(found) if parts % number == 0]
    fewer = [number for number in fitting if number < num_devices][-1:]
    more = [number for number in fitting if number > num_devices][:1]
    nearest = " and ".join(map(str, (*fewer, *more)))
    can = "no number of the throughputs divides it"
    if nearest:
        can = f"the nearest numbers of the throughputs that divide it: {nearest}"
    raise InfeasibleError(
        f"{what} {parts} cannot be divided evenly among {num_devices} devices; {can}"
    )


def rate_of(steps_per_second: Mapping[str, float], device_type: str) -> float:
    """Steps per second on a type, 0 where there are none."""
    # Its case does not matter unless two types differ in it alone.
    if device_type in steps_per_second:
        return steps_per_second[device_type]
    same = [rate for name, rate in steps_per_second.items() if name.lower() == device_type.lower()]
    return same[0] if len(same) == 1 else 0.0

"""``hetflow.rent.machines``."""

from typing import Any

from ..planning.inputs import profiles_of
from ..planning.static_choice import StaticChoice, measured_choices, static_choices
from ..schema.errors import ProblemError
from ..schema.options import option
from ..schema.requests.rent import MachinesRequest
from .calls import takes
from .files import markets_of, throughputs_of


@takes(MachinesRequest)
def rent_machines(request: MachinesRequest) -> tuple[StaticChoice, ...]:
    """List the machines that could train a model, with hours and dollars; cheapest first.

    With profiles, each choice has a number of devices of one or two types, and the batch split
    solver predicts its step. With throughputs, choices are the numbers of devices and the mixes
    that these list. Whole machines are paid for, spot or on demand, at the prices of one time.

    Returns:
        The choices, those of the Pareto front over hours and dollars marked.

    Raises:
        ProblemError: Not just one of profiles and throughputs is given, no machine has a device
            that they know, or a number is not >= 1.
        InfeasibleError: No choice has a plan for the batch, or just the devices of a throughput.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import InstanceType, Market
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.5, peak_memory_bytes=1)
        >>> profile = hetflow.Profile(model="m", device_type="V100", device_memory_bytes=2,
        ...     weight_bytes=1, update_seconds=0.0, batch_curve=(point,))
        >>> machine = InstanceType(name="p3", device_type="V100", on_demand_dollars_per_hour=3.6)
        >>> choices = hetflow.rent.machines(
        ...     Market(instance_types=(machine,)), [profile], batch_size=8, steps=1000)
        >>> round(choices[0].dollars, 6), choices[0].machines
        (0.5, {'p3 on demand': 1})
    """
    profiles, throughputs, batch_size = request.profiles, request.throughputs, request.batch_size
    asked: dict[str, Any] = {"steps": request.steps, "at": request.at}
    if throughputs is not None and profiles is None:
        return measured_choices(
            throughputs_of(throughputs, pairs=False),
            markets_of(request.market),
            batch_size=batch_size,
            most_devices=request.most_devices,
            model=request.model,
            **asked,
        )
    if profiles is None or throughputs is not None:
        given = "neither profiles nor" if profiles is None else "both profiles and"
        raise ProblemError(
            f"{given} throughputs are given",
            hint=f"give one of {option('profiles')} and {option('throughputs')}",
        )
    if batch_size is None:
        raise ProblemError("profiles need a batch size", hint=f"add {option('batch_size', 'N')}")
    return static_choices(
        profiles_of(profiles, request.model),
        markets_of(request.market),
        batch_size=batch_size,
        most_devices=request.most_devices or 8,
        **asked,
    )

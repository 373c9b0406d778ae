"""``hetflow.rent_machines``."""

from ..planning.inputs import Profiles, profiles_of
from ..planning.market_prices import Markets, markets_of
from ..planning.static_choice import StaticChoice, static_choices


def rent_machines(
    market: Markets,
    profiles: Profiles,
    *,
    batch_size: int,
    steps: int,
    most_devices: int = 8,
    model: str | None = None,
    at: str | None = None,
) -> tuple[StaticChoice, ...]:
    """List the machines that could train a model, with hours and dollars; cheapest first.

    Each choice has a number of devices of one or two types. The batch split solver predicts its
    step. Whole machines are paid for, spot or on demand, at the prices of one time.

    Args:
        market: Markets, or their files.
        profiles: Profiles, or their folder.
        batch_size: Global batch, samples per step.
        steps: Steps of the whole training.
        most_devices: Most devices of each type.
        model: Name of the model; None if all profiles are of one model.
        at: The time of the prices, such as ``2020-03-07T00:00:00Z``; None takes the last known.

    Returns:
        The choices, those of the Pareto front over hours and dollars marked.

    Raises:
        ProblemError: No machine has a profiled device, or a number is not >= 1.
        InfeasibleError: No choice has a plan for the batch.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import InstanceType, Market
        >>> point = hetflow.BatchPoint(batch_size=8, step_seconds=0.5, peak_memory_bytes=1)
        >>> profile = hetflow.Profile(model="m", device_type="V100", device_memory_bytes=2,
        ...     weight_bytes=1, update_seconds=0.0, batch_curve=(point,))
        >>> machine = InstanceType(name="p3", device_type="V100", on_demand_dollars_per_hour=3.6)
        >>> choices = hetflow.rent_machines(
        ...     Market(instance_types=(machine,)), [profile], batch_size=8, steps=1000)
        >>> round(choices[0].dollars, 6), choices[0].machines
        (0.5, {'p3 on demand': 1})
    """
    return static_choices(
        profiles_of(profiles, model),
        markets_of(market),
        batch_size=batch_size,
        steps=steps,
        most_devices=most_devices,
        at=at,
    )

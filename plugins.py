"""The public names for writing plug-ins: decorators that register one, and the types they use.

    from hetflow import plugins

    @plugins.exporter("markdown", takes=(plugins.Plan,))
    def render(record, name): ...

docs/plugins.md describes each kind. Names are imported when they are first used: a worker that
needs a schedule imports no solver.
"""

from typing import TYPE_CHECKING

from .schema.lazy import lazy_names

if TYPE_CHECKING:
    from .clusters.engines.local import LocalEngine
    from .clusters.engines.protocol import (
        Engine,
        EngineDevice,
        Fate,
        UnsuitableDevicesError,
        Work,
        engine,
    )
    from .devices.backend import AcceleratorBackend, LocalDevice, device_backend
    from .devices.cpu import cpu_device
    from .devices.host import HostBackend
    from .formats.exporters.registry import exporter
    from .formats.importers.registry import (
        TraceOptions,
        jobs_importer,
        layer_importer,
        price_importer,
        trace_importer,
    )
    from .planning.checks.allocation_policies import Pool
    from .planning.checks.judges import Judge, judge
    from .planning.checks.schedule import validate
    from .planning.schedules.assemble import parallel_pipelines
    from .planning.schedules.one_f_one_b import one_rank
    from .planning.schedules.registry import schedule
    from .schema.deployment import Deployment
    from .schema.jobs import Certificate, Entity
    from .schema.market import Availability, Capacity, Market, PriceHistory
    from .schema.profile import LayerGraph, LayerNode
    from .schema.schedule import Kind, PipelineShape, Schedule
    from .solvers.allocation.engine import Outcome
    from .solvers.allocation.instance import Instance
    from .solvers.allocation.policy import (
        Goal,
        LeastAttained,
        LeastCurve,
        MaxMin,
        Ratio,
        Total,
        inverse,
        normalised,
        policy,
    )
    from .solvers.allocation.program import Floats, Ints
    from .solvers.allocation.water_filling.water import WaterFilling

_NAMES = {
    ".schema.market": "Availability Capacity Market PriceHistory",
    ".schema.jobs": "Certificate Entity",
    ".schema.deployment": "Deployment",
    ".clusters.engines.protocol": "engine Engine EngineDevice Fate UnsuitableDevicesError Work",
    ".solvers.allocation.program": "Floats Ints",
    ".devices.host": "HostBackend",
    ".solvers.allocation.instance": "Instance",
    ".planning.checks.judges": "Judge judge",
    ".schema.schedule": "Kind PipelineShape Schedule",
    ".schema.profile": "LayerGraph LayerNode",
    ".solvers.allocation.policy": "Goal LeastAttained LeastCurve MaxMin Ratio Total inverse "
    "normalised policy",
    ".devices.backend": "AcceleratorBackend LocalDevice device_backend",
    ".clusters.engines.local": "LocalEngine",
    ".solvers.allocation.engine": "Outcome",
    ".planning.checks.allocation_policies": "Pool",
    ".formats.importers.registry": "TraceOptions jobs_importer layer_importer price_importer "
    "trace_importer",
    ".solvers.allocation.water_filling.water": "WaterFilling",
    ".devices.cpu": "cpu_device",
    ".formats.exporters.registry": "exporter",
    ".planning.schedules.one_f_one_b": "one_rank",
    ".planning.schedules.assemble": "parallel_pipelines",
    ".planning.schedules.registry": "schedule",
    ".planning.checks.schedule": "validate",
}

__all__ = [
    "AcceleratorBackend",
    "Availability",
    "Capacity",
    "Certificate",
    "Deployment",
    "Engine",
    "EngineDevice",
    "Entity",
    "Fate",
    "Floats",
    "Goal",
    "HostBackend",
    "Instance",
    "Ints",
    "Judge",
    "Kind",
    "LayerGraph",
    "LayerNode",
    "LeastAttained",
    "LeastCurve",
    "LocalDevice",
    "LocalEngine",
    "Market",
    "MaxMin",
    "Outcome",
    "PipelineShape",
    "Pool",
    "PriceHistory",
    "Ratio",
    "Schedule",
    "Total",
    "TraceOptions",
    "UnsuitableDevicesError",
    "WaterFilling",
    "Work",
    "cpu_device",
    "device_backend",
    "engine",
    "exporter",
    "inverse",
    "jobs_importer",
    "judge",
    "layer_importer",
    "normalised",
    "one_rank",
    "parallel_pipelines",
    "policy",
    "price_importer",
    "schedule",
    "trace_importer",
    "validate",
]

__getattr__, __dir__ = lazy_names(globals(), _NAMES)

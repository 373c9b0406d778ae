"""The public names for writing plug-ins: decorators that register one, and the types they use.

    from hetflow import plugins

    @plugins.exporter("markdown", takes=(plugins.Plan,))
    def render(record, name): ...

docs/plugins.md describes each kind. Names are imported when they are first used: a worker that
needs a schedule imports no solver.
"""

from typing import TYPE_CHECKING

from ..schema.lazy import lazy_names

if TYPE_CHECKING:
    from ..checks.allocation_policies import Pool
    from ..checks.judges import Judge, judge
    from ..checks.schedule import validate
    from ..devices.accelerator import AcceleratorBackend
    from ..devices.backend import LocalDevice, device_backend
    from ..devices.cpu import cpu_device
    from ..devices.host import HostBackend
    from ..engines.local import LocalEngine
    from ..engines.protocol import Engine, EngineDevice, Fate, UnsuitableDevicesError, Work
    from ..engines.registry import engine
    from ..exporters.registry import exporter
    from ..importers.registry import (
        TraceOptions,
        jobs_importer,
        layer_importer,
        price_importer,
        trace_importer,
    )
    from ..schedules.one_f_one_b import one_rank
    from ..schedules.parallel import parallel_pipelines
    from ..schedules.registry import schedule
    from ..schema.deployment import Deployment
    from ..schema.jobs import Certificate, Entity
    from ..schema.market import Availability, Capacity, Market, PriceHistory
    from ..schema.operations import Kind, Schedule
    from ..schema.pipeline_shape import PipelineShape
    from ..schema.profile import LayerGraph, LayerNode
    from ..solvers.allocation.engine import Outcome
    from ..solvers.allocation.goals import Goal, LeastCurve, MaxMin, Ratio, Total
    from ..solvers.allocation.instance import Instance
    from ..solvers.allocation.policy import LeastAttained, inverse, normalised, policy
    from ..solvers.allocation.program import Floats, Ints
    from ..solvers.allocation.water_filling.water import WaterFilling

_NAMES = {
    "..devices.accelerator": "AcceleratorBackend",
    "..schema.market": "Availability Capacity Market PriceHistory",
    "..schema.jobs": "Certificate Entity",
    "..schema.deployment": "Deployment",
    "..engines.protocol": "Engine EngineDevice Fate UnsuitableDevicesError Work",
    "..solvers.allocation.program": "Floats Ints",
    "..solvers.allocation.goals": "Goal LeastCurve MaxMin Ratio Total",
    "..devices.host": "HostBackend",
    "..solvers.allocation.instance": "Instance",
    "..checks.judges": "Judge judge",
    "..schema.operations": "Kind Schedule",
    "..schema.profile": "LayerGraph LayerNode",
    "..solvers.allocation.policy": "LeastAttained inverse normalised policy",
    "..devices.backend": "LocalDevice device_backend",
    "..engines.local": "LocalEngine",
    "..solvers.allocation.engine": "Outcome",
    "..schema.pipeline_shape": "PipelineShape",
    "..checks.allocation_policies": "Pool",
    "..importers.registry": "TraceOptions jobs_importer layer_importer price_importer "
    "trace_importer",
    "..solvers.allocation.water_filling.water": "WaterFilling",
    "..devices.cpu": "cpu_device",
    "..engines.registry": "engine",
    "..exporters.registry": "exporter",
    "..schedules.one_f_one_b": "one_rank",
    "..schedules.parallel": "parallel_pipelines",
    "..schedules.registry": "schedule",
    "..checks.schedule": "validate",
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

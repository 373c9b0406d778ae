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

_WHERE = {
    "AcceleratorBackend": "..devices.accelerator",
    "Availability": "..schema.market",
    "Capacity": "..schema.market",
    "Certificate": "..schema.jobs",
    "Deployment": "..schema.deployment",
    "Engine": "..engines.protocol",
    "EngineDevice": "..engines.protocol",
    "Entity": "..schema.jobs",
    "Fate": "..engines.protocol",
    "Floats": "..solvers.allocation.program",
    "Goal": "..solvers.allocation.goals",
    "HostBackend": "..devices.host",
    "Instance": "..solvers.allocation.instance",
    "Ints": "..solvers.allocation.program",
    "Judge": "..checks.judges",
    "Kind": "..schema.operations",
    "LayerGraph": "..schema.profile",
    "LayerNode": "..schema.profile",
    "LeastAttained": "..solvers.allocation.policy",
    "LeastCurve": "..solvers.allocation.goals",
    "LocalDevice": "..devices.backend",
    "LocalEngine": "..engines.local",
    "Market": "..schema.market",
    "MaxMin": "..solvers.allocation.goals",
    "Outcome": "..solvers.allocation.engine",
    "PipelineShape": "..schema.pipeline_shape",
    "Pool": "..checks.allocation_policies",
    "PriceHistory": "..schema.market",
    "Ratio": "..solvers.allocation.goals",
    "Schedule": "..schema.operations",
    "Total": "..solvers.allocation.goals",
    "TraceOptions": "..importers.registry",
    "UnsuitableDevicesError": "..engines.protocol",
    "WaterFilling": "..solvers.allocation.water_filling.water",
    "Work": "..engines.protocol",
    "cpu_device": "..devices.cpu",
    "device_backend": "..devices.backend",
    "engine": "..engines.registry",
    "exporter": "..exporters.registry",
    "inverse": "..solvers.allocation.policy",
    "jobs_importer": "..importers.registry",
    "judge": "..checks.judges",
    "layer_importer": "..importers.registry",
    "normalised": "..solvers.allocation.policy",
    "one_rank": "..schedules.one_f_one_b",
    "parallel_pipelines": "..schedules.parallel",
    "policy": "..solvers.allocation.policy",
    "price_importer": "..importers.registry",
    "schedule": "..schedules.registry",
    "trace_importer": "..importers.registry",
    "validate": "..checks.schedule",
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

__getattr__, __dir__ = lazy_names(globals(), _WHERE)

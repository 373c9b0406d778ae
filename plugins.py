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
    from .clusters.engines.local import LocalEngine as LocalEngine
    from .clusters.engines.protocol import Engine as Engine
    from .clusters.engines.protocol import EngineDevice as EngineDevice
    from .clusters.engines.protocol import Fate as Fate
    from .clusters.engines.protocol import UnsuitableDevicesError as UnsuitableDevicesError
    from .clusters.engines.protocol import Work as Work
    from .clusters.engines.protocol import engine as engine
    from .devices.backend import AcceleratorBackend as AcceleratorBackend
    from .devices.backend import LocalDevice as LocalDevice
    from .devices.backend import device_backend as device_backend
    from .devices.cpu import cpu_device as cpu_device
    from .devices.host import HostBackend as HostBackend
    from .formats.exporters.registry import exporter as exporter
    from .formats.importers.registry import TraceOptions as TraceOptions
    from .formats.importers.registry import jobs_importer as jobs_importer
    from .formats.importers.registry import layer_importer as layer_importer
    from .formats.importers.registry import price_importer as price_importer
    from .formats.importers.registry import trace_importer as trace_importer
    from .planning.checks.allocation_policies import Pool as Pool
    from .planning.checks.judges import Judge as Judge
    from .planning.checks.judges import judge as judge
    from .planning.checks.schedule import validate as validate
    from .planning.schedules.assemble import parallel_pipelines as parallel_pipelines
    from .planning.schedules.one_f_one_b import one_rank as one_rank
    from .planning.schedules.registry import schedule as schedule
    from .schema.deployment import Deployment as Deployment
    from .schema.jobs import Certificate as Certificate
    from .schema.jobs import Entity as Entity
    from .schema.market import Availability as Availability
    from .schema.market import Capacity as Capacity
    from .schema.market import Market as Market
    from .schema.market import PriceHistory as PriceHistory
    from .schema.profile import LayerGraph as LayerGraph
    from .schema.profile import LayerNode as LayerNode
    from .schema.schedule import Kind as Kind
    from .schema.schedule import PipelineShape as PipelineShape
    from .schema.schedule import Schedule as Schedule
    from .solvers.allocation.engine import Outcome as Outcome
    from .solvers.allocation.instance import Instance as Instance
    from .solvers.allocation.policy import Goal as Goal
    from .solvers.allocation.policy import LeastAttained as LeastAttained
    from .solvers.allocation.policy import LeastCurve as LeastCurve
    from .solvers.allocation.policy import MaxMin as MaxMin
    from .solvers.allocation.policy import Ratio as Ratio
    from .solvers.allocation.policy import Total as Total
    from .solvers.allocation.policy import inverse as inverse
    from .solvers.allocation.policy import normalised as normalised
    from .solvers.allocation.policy import policy as policy
    from .solvers.allocation.program import Floats as Floats
    from .solvers.allocation.program import Ints as Ints
    from .solvers.allocation.water_filling.water import WaterFilling as WaterFilling

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

__getattr__, __dir__ = lazy_names(globals(), _NAMES)
__all__ = __dir__()

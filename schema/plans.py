"""A plan of any kind."""

from .parallel import ParallelPlan
from .pipeline import PipelinePlan
from .plan import SplitPlan

Plan = SplitPlan | PipelinePlan | ParallelPlan

"""The words that users choose between: types of values in requests and in files."""

from typing import Literal

Placement = Literal["consolidated", "unconsolidated", "mixed"]
OnFailure = Literal["stop", "shrink", "replace"]
Strategy = Literal["auto", "split", "pipeline", "parallel"]
Method = Literal["exact", "cbc", "highs"]
AnyObjective = Literal["step_seconds", "waste", "bottleneck"]
CostModelName = Literal["profiled", "closed-form", "measured"]
StageCost = Literal["ring", "thesis", "published"]

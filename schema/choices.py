"""The words that users choose between: types of values in requests and in files."""

from typing import Literal

Placement = Literal["consolidated", "unconsolidated", "mixed"]
OnFailure = Literal["stop", "shrink", "replace"]
Strategy = Literal["auto", "split", "pipeline", "parallel"]
Method = Literal["exact", "cbc", "highs"]
AnyObjective = Literal["step_seconds", "waste", "bottleneck"]
CostModelName = Literal["profiled", "closed-form", "measured"]
StageCost = Literal["ring", "thesis", "published"]
Shard = Literal["optimizer", "gradients", "all"]
"""Which states the replicas of a stage share; each includes those before it (ZeRO 5)."""
Activations = Literal["kept", "recomputed", "offloaded"]
"""What becomes of repeated layers' activations until they go back: offloaded is to the host."""
AnyShard = Literal["auto", "none", "optimizer", "gradients", "all"]


Precision = Literal["float32", "tf32", "float16", "bfloat16"]

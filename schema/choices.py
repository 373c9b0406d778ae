"""The words that users choose between: types of values in requests and in files."""

from typing import Literal

Placement = Literal["consolidated", "unconsolidated", "mixed"]
OnFailure = Literal["stop", "shrink", "replace"]

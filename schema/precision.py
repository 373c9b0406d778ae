"""Precisions of floating-point products, as options and records name them."""

from typing import Literal

Precision = Literal["float32", "tf32", "float16", "bfloat16"]

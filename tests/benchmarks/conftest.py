"""Lets tests import the parts of benchmarks, which are scripts and no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

"""Lets the tests here share modules of cases: pytest's importlib mode adds no folder itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""Efficiencies fitted to measured runs, and how far held-out estimates were off.

Written by `python benchmarks/device_estimates.py --write`; do not edit.
"""

from .roofline import Efficiency, HeldOutError

FITTED = Efficiency(
    vector=0.9356,
    tf32=0.6255,
    half=0.9189,
    convolution=0.4556,
    memory=0.8888,
    link=0.6306,
    launch_seconds=2.758e-05,
)
ESTIMATED_ERROR = HeldOutError(products=0.27, convolutions=0.57)
CARRIED_ERROR = HeldOutError(products=0.20, convolutions=1.03)

"""Efficiencies fitted to measured runs, and how far held-out estimates were off.

Written by `python benchmarks/device_estimates.py --write`; do not edit.
"""

from .roofline import Efficiency, HeldOutError

FITTED = Efficiency(
    vector=0.9967,
    tf32=0.7729,
    half=0.962,
    convolution_vector=0.8248,
    convolution_tf32=0.313,
    convolution_half=0.7773,
    memory=0.7728,
    link=0.6306,
    launch_seconds=2.477e-05,
)
ESTIMATED_ERROR = HeldOutError(products=0.25, convolutions=0.54)
CARRIED_ERROR = HeldOutError(products=0.17, convolutions=0.43)

"""Efficiencies fitted to measured runs, and how far held-out estimates were off.

Written by `python benchmarks/device_estimates.py --write`; do not edit.
"""

from .roofline import Efficiency, HeldOutError

FITTED = Efficiency(
    vector=0.8619,
    tf32=0.7788,
    half=0.8165,
    convolution_vector=0.9039,
    convolution_tf32=1.358,
    convolution_half=0.7145,
    memory=0.7611,
    convolution_memory=0.1852,
    channels_last_memory=0.3612,
    link=0.6306,
    launch_seconds=2.271e-05,
    power=0.15,
    forms={
        "A10-24GB": 0.872,
        "A100-PCIE-40GB": 0.938,
        "A100-PCIE-80GB": 0.932,
        "A100-SXM4-40GB": 1.17,
        "A100-SXM4-80GB": 1.16,
        "GH200-96GB": 0.862,
        "H100-PCIE-80GB": 0.993,
        "H100-SXM5-80GB": 0.914,
        "P100-PCIE-16GB": 0.896,
        "QuadroRTX8000-48GB": 0.883,
        "RTX-3090-24GB": 1.08,
        "RTX-4090-24GB": 1.25,
        "RTX-A6000-48GB": 1.04,
        "RTX6000Ada-48GB": 0.923,
        "TITAN-RTX-24GB": 1.08,
        "V100-SXM2-16GB": 1.09,
        "V100-SXM2-32GB": 1.09,
    },
)
ESTIMATED_ERROR = HeldOutError(products=0.38, convolutions=0.46)
RATIO_ERROR = HeldOutError(products=0.28, convolutions=0.46)

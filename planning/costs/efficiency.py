"""Efficiencies fitted to measured runs, and how far held-out estimates were off.

Written by `python benchmarks/device_estimates.py --write`; do not edit.
"""

from .roofline import Efficiency, HeldOutError

FITTED = Efficiency(
    vector=0.8123,
    tf32=0.6547,
    half=0.6407,
    convolution_vector=0.8811,
    convolution_tf32=0.7832,
    convolution_half=0.817,
    memory=0.7957,
    convolution_memory=0.1937,
    channels_last_memory=0.391,
    link=0.6306,
    launch_seconds=2.081e-05,
    forms={
        "A10-24GB": 0.787,
        "A100-PCIE-40GB": 0.885,
        "A100-PCIE-80GB": 0.945,
        "A100-SXM4-40GB": 1.37,
        "A100-SXM4-80GB": 1.23,
        "GH200-96GB": 0.788,
        "H100-PCIE-80GB": 0.915,
        "H100-SXM5-80GB": 0.826,
        "P100-PCIE-16GB": 0.761,
        "QuadroRTX8000-48GB": 0.851,
        "RTX-3090-24GB": 1.28,
        "RTX-4090-24GB": 1.53,
        "RTX-A6000-48GB": 1.1,
        "RTX6000Ada-48GB": 0.764,
        "TITAN-RTX-24GB": 1.14,
        "V100-SXM2-16GB": 1.11,
        "V100-SXM2-32GB": 1.22,
    },
)
ESTIMATED_ERROR = HeldOutError(products=0.40, convolutions=0.46)
RATIO_ERROR = HeldOutError(products=0.33, convolutions=0.49)

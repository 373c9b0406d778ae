"""Measuring: devices, batch curves, links; what the local machine can do and how fast."""

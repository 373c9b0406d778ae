"""Tensor parallelism: layers whose weights a group of workers shares (thesis 4.2.3)."""

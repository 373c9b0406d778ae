"""Pipelines: a graph of layers cut into stages on unlike devices (thesis 2.4.1, 3.3)."""

"""Pipeline, tensor and data parallelism together, on unlike devices."""

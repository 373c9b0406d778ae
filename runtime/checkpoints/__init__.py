"""Checkpoints: their files, a part for each worker of a pipeline, saving and restoring."""

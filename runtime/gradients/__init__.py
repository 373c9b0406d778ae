"""Gradients of a worker: where they lie, how they are seen to come, and their sums over workers."""

"""The jobs of a run: drawn from a seed, and checked as they arrive."""

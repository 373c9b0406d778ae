"""Check that all workers still train the same model, and explain where they do not."""

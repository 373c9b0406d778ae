"""Whether all workers still train the same model, and what to say where they do not."""

"""The least time of the slowest stage: over cuts in one line, and over any graph."""

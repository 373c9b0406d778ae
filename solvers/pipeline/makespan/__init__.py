"""The least step of a schedule that flushes, as its timer times it."""

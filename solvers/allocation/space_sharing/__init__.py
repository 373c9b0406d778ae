"""Programs in which two jobs may share devices, and estimates of how fast they then are."""

"""From a plan to running workers: lower, spawn, supervise, record."""

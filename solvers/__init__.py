"""Solvers: pure functions from a typed problem to a proved plan."""

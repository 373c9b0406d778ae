"""Judges: they verify a plan from the definitions and never import the solvers."""

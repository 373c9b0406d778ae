"""Piper (NeurIPS'21): pipelines in the steady state, Piper's inputs, and an exact planner."""

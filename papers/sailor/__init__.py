"""Sailor (SOSP'25): the inputs of its planner as a problem of three dimensions."""

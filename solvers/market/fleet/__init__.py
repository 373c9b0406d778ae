"""Elastic jobs on several machines under a deadline."""

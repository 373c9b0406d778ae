"""Gavel's mechanism: each round runs the jobs that lack most of their shares (thesis 5.5)."""

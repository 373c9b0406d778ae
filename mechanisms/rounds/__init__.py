"""Gavel's mechanism: each round to the jobs furthest behind their shares (thesis 5.5)."""

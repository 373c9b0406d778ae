"""Gavel's mechanism: time in rounds (thesis 5.5)."""

"""Rounds of ``mechanisms.rounds`` in virtual time (thesis 5.5)."""

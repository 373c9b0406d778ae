"""Lexicographic max-min fairness by water filling (thesis 5.4.3)."""

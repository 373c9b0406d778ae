"""Lexicographic max-min: all rise together until some cannot (thesis 5.4.3)."""

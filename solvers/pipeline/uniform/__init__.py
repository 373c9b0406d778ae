"""Schedules whose stages all have equally many replicas."""

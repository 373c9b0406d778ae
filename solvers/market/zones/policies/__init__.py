"""Policies for a job that may move between zones: one a file."""

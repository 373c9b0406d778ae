"""Policies for a job under a deadline: one a file."""

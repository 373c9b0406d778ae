"""Mechanisms driven by events: elastic fair sharing, and proposals of jobs."""

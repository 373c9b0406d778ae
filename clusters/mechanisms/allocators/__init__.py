"""Allocators: policies and baselines, in the form that a simulator calls again and again."""

"""Checkers: they verify plans and allocations from the definitions and never import a solver."""

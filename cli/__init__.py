"""Thin modules of commands: parse, call, check, write."""

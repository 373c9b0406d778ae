"""Policies for elastic jobs under a deadline, one file each."""

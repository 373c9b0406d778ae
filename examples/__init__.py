"""Example training scripts and reproductions of the papers."""

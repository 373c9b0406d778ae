"""Show records as tables and plots."""

"""What launcher and workers agree on, without torch: lowered plans, environment, run record."""

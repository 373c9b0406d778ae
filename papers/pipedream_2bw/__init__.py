"""PipeDream-2BW's planner for models whose blocks repeat (thesis 3.3)."""

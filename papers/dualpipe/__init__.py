"""DualPipe and DualPipeV (DeepSeek-V3): schedules that no planner here proposes."""

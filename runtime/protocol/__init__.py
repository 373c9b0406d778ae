"""The interface of launcher and workers, without torch: lowered plans, environment, records."""

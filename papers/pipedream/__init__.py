"""PipeDream as published: stages planned level by level, with its costs (thesis 2.4.1)."""

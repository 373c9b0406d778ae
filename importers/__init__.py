"""Foreign formats in: layer profiles, jobs and throughputs of other tools become records."""

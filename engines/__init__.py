"""Where a job's launch can run: what devices there are, start it there, stop it, ask after it."""

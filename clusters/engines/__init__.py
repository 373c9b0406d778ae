"""Where a job's launch can run: list devices, start a launch, stop it, ask what became of it."""

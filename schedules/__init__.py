"""Pipeline schedules as data: generate, validate, time."""
